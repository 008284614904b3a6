"""Predictions of an engine's models for every example of a split, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ds_distill.data.batches import Collator, Examples
from ds_distill.data.plan import plan_once, split_batch
from ds_distill.data.prefetch import prefetch
from ds_distill.engine.engine import Engine
from ds_distill.evaluation.predictions import TokenScores
from ds_distill.types import Signals


class Bar(Protocol):
    """A progress bar."""

    def advance(self, steps: int) -> None: ...


def predict_all(
    engine: Engine,
    collate: Collator,
    examples: Examples,
    models: Sequence[str],
    batch_size: int,
    bar: AbstractContextManager[Bar] | None = None,
    *,
    layers: Sequence[int] = (),
) -> dict[str, Signals]:
    """Signals of models for all R rows of examples, on the CPU of every rank: logits float32
    [R, C], of partial teachers [R, K], and the states of `layers`, float32 [R, H].

    collate: makes batches of `examples`. batch_size: examples per rank and forward pass.
    """
    batches = plan_once(collate.lengths, batch_size * engine.world.size)
    shares = [split_batch(batch, 1, engine.world.size, engine.world.rank)[0] for batch in batches]
    outputs: dict[str, dict[Any, torch.Tensor]] = {name: {} for name in models}
    classes: dict[str, torch.Tensor] = {}  # of partial teachers
    with bar or nullcontext() as progress:
        for batch, mine, inputs in zip(batches, shares, prefetch(collate, shares), strict=True):
            for name, signals in engine.predict(inputs, models, layers).items():
                if signals.classes is not None:
                    classes[name] = signals.classes.cpu()
                for what, values in [("logits", signals.logits), *signals.hidden.items()]:
                    if what not in outputs[name]:
                        shape = (len(examples.labels), values.shape[1])
                        outputs[name][what] = torch.zeros(shape)
                    if len(mine):
                        rows = torch.from_numpy(examples.rows_of(mine))
                        outputs[name][what][rows] = values.float().cpu()
            if progress:
                progress.advance(len(batch))
    world = engine.world
    summed = {
        # Each example ran on one rank and is zero on the others.
        name: {what: world.sum(part.to(world.device)).cpu() for what, part in parts.items()}
        for name, parts in outputs.items()
    }
    return {
        name: Signals(parts.pop("logits"), parts, classes.get(name))
        for name, parts in summed.items()
    }


def best_of_each(
    engine: Engine,
    collate: Collator,
    models: Sequence[str],
    batch_size: int,
    best: Callable[[torch.Tensor], torch.Tensor],
    bar: AbstractContextManager[Bar] | None = None,
) -> dict[str, torch.Tensor]:
    """What `best` makes of the logits of each of N examples, on the CPU of every rank: float32
    [N, ...]. For logits whose classes are not the same in all batches.

    best: (a batch's logits [n, C]) -> float32 [B, ...], of each example. batch_size: examples per
        rank and forward pass.
    """
    found: dict[str, torch.Tensor] = {}
    batches = plan_once(collate.lengths, batch_size * engine.world.size)
    shares = [split_batch(batch, 1, engine.world.size, engine.world.rank)[0] for batch in batches]
    with bar or nullcontext() as progress:
        for batch, mine, inputs in zip(batches, shares, prefetch(collate, shares), strict=True):
            for name, signals in engine.predict(inputs, models).items():
                values = best(signals.logits).cpu()
                if name not in found:
                    found[name] = torch.zeros(len(collate.lengths), *values.shape[1:])
                if len(mine):
                    found[name][torch.from_numpy(mine)] = values
            if progress:
                progress.advance(len(batch))
    world = engine.world
    # Each example ran on one rank and is zero on the others.
    return {name: world.sum(part.to(world.device)).cpu() for name, part in found.items()}


def score_tokens(
    engine: Engine,
    collate: Collator,
    models: Sequence[str],
    batch_size: int,
    bar: AbstractContextManager[Bar] | None = None,
) -> dict[str, TokenScores]:
    """Scores of masked-LMs on each of N examples with its first mask variant, on every rank.

    Logits over a vocabulary are too large to collect: only sums per example leave a batch, and one
    model runs at a time.

    batch_size: examples per rank and forward pass.
    """
    count = len(collate.lengths)
    sums = {name: torch.zeros(3, count, dtype=torch.float64) for name in models}
    batches = plan_once(collate.lengths, batch_size * engine.world.size)
    shares = [split_batch(batch, 1, engine.world.size, engine.world.rank)[0] for batch in batches]
    with bar or nullcontext() as progress:
        for batch, mine, inputs in zip(batches, shares, prefetch(collate, shares), strict=True):
            counted = inputs.row_sets["all"]
            for name in models:
                logits = engine.predict(inputs, [name])[name].logits
                logits, labels = logits[counted], inputs.labels[counted].to(logits.device)
                losses = F.cross_entropy(logits, labels, reduction="none")
                right = logits.argmax(dim=-1) == labels
                example = torch.from_numpy(mine)[inputs.views[name].example_indices[counted]]
                values = torch.stack([losses.double(), right.double(), torch.ones_like(losses)])
                sums[name].index_add_(1, example, values.cpu())
            if progress:
                progress.advance(len(batch))
    return {
        # Each example ran on one rank and is zero on the others.
        name: TokenScores(*engine.world.sum(values.to(engine.world.device)).cpu().numpy())
        for name, values in sums.items()
    }
