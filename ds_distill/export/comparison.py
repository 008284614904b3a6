"""An exported model beside the one that it was made of, on a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch

from ds_distill.data.batches import Collator
from ds_distill.data.schedule import plan_once
from ds_distill.engine.world import World
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.results import interval_as
from ds_distill.run.any_checkpoint import CHECKPOINT
from ds_distill.types import LACKING, Batch, Signals
from ds_distill.views import PaddedView

TEXTS = 1000
"""On so many of a split, at most, logits are compared one by one."""
BATCH = 32


@dataclass(frozen=True)
class LoneModel:
    """A `ModelRunner` of one model, without an engine."""

    world: World
    logits: Callable[[PaddedView], torch.Tensor]
    """At the rows of a view, float32 [n, C]."""

    def predict(
        self, batch: Batch, models: Iterable[str], layers: Iterable[int] = ()
    ) -> dict[str, Signals]:
        [name] = models
        with torch.no_grad():
            return {name: Signals(self.logits(cast(PaddedView, batch.views[name])))}


@dataclass
class LogitDifference:
    """Between two models, over the rows of some texts."""

    texts: int = 0
    largest: float = 0.0
    scale: float = 0.0
    """The largest logit of the first."""

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Count rows; logits of both: float32 [n, C], on the CPU."""
        known = first > LACKING / 2
        if not known.any():
            return
        difference = (first - second)[known].abs().max().item()
        # A NaN is as far as can be: max() would drop it.
        self.largest = max(self.largest, float("inf") if difference != difference else difference)
        self.scale = max(self.scale, first[known].abs().max().item())


def logit_difference(first: LoneModel, second: LoneModel, collate: Collator) -> LogitDifference:
    """Over the longest, shortest and all between of the first TEXTS examples."""
    found = LogitDifference()
    for examples in plan_once(collate.lengths[:TEXTS], BATCH):
        batch = collate(examples)
        one, other = (
            runner.predict(batch, [CHECKPOINT])[CHECKPOINT].logits.cpu()
            for runner in (first, second)
        )
        found.add(one, other)
        found.texts += len(examples)
    return found


def loses(
    interval: list[float] | None, score: float, metric: MetricClass, most: float
) -> str | None:
    """Why a model is refused whose score differs from another's: the interval of the difference,
    with all of which it is worse by more than `most`. None where it is taken.

    score: the other's. most: points; of a metric that is no share, per cent of the score.
    """
    bound = most / 100 * (1.0 if metric.is_share() else abs(score))
    shown = f"{most:g} points" if metric.is_share() else f"{most:g}% of {metric.shown_as(score)}"
    if interval is None:
        return f"{metric.title} is not defined for what it predicts, so nothing says how good it is"
    low, high = interval
    if (high < -bound) if metric.higher_is_better else (low > bound):
        ends = interval_as(metric.difference_as, interval)
        return f"its {metric.title} differs by {ends}, beyond chance more than {shown}"
    return None
