"""Predictions of models for every example of a split, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ds_distill.data.batches import Collator, Units
from ds_distill.data.masking import HiddenWordsCollator
from ds_distill.data.schedule import pinned_for, plan_once, prefetch, split_batch
from ds_distill.engine.world import World
from ds_distill.evaluation.predictions import TokenScores
from ds_distill.types import Batch, Signals


class Bar(Protocol):
    """A progress bar."""

    def advance(self, steps: int) -> None: ...


class ModelRunner(Protocol):
    """What runs models on batches: an `Engine`, or an exported model's."""

    @property
    def world(self) -> World: ...

    def predict(
        self, batch: Batch, models: Iterable[str], layers: Iterable[int] = ()
    ) -> dict[str, Signals]:
        """See `Engine.predict`."""
        ...


def _batches(
    runner: ModelRunner,
    collate: Collator,
    batch_size: int,
    bar: AbstractContextManager[Bar] | None,
) -> Iterator[tuple[np.ndarray, Batch]]:
    """All examples of a split once: this rank's of each batch, and the batch.

    batch_size: examples per rank and forward pass.
    """
    world = runner.world
    batches = plan_once(collate.lengths, batch_size * world.size)
    shares = [split_batch(batch, 1, world.size, world.rank)[0] for batch in batches]

    def pinned(share: np.ndarray) -> Batch:
        return pinned_for(world.device, collate(share))

    with bar or nullcontext() as progress:
        for batch, mine, inputs in zip(batches, shares, prefetch(pinned, shares), strict=True):
            yield mine, inputs
            if progress:
                progress.advance(len(batch))


def _of_all_ranks(runner: ModelRunner, part: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, on the CPU: each example ran on one and is zero on the others."""
    if runner.world.size == 1:  # else a whole split would be on the device, beside all models
        return part
    return runner.world.sum(part.to(runner.world.device)).cpu()


def predict_all(
    runner: ModelRunner,
    collate: Collator,
    examples: Units,
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
    outputs: dict[str, dict[Any, torch.Tensor]] = {name: {} for name in models}
    classes: dict[str, torch.Tensor] = {}  # of partial teachers
    for mine, inputs in _batches(runner, collate, batch_size, bar):
        for name, signals in runner.predict(inputs, models, layers).items():
            if signals.classes is not None:
                classes[name] = signals.classes.cpu()
            for what, values in [("logits", signals.logits), *signals.hidden.items()]:
                if what not in outputs[name]:
                    shape = (len(examples.labels), values.shape[1])
                    outputs[name][what] = torch.zeros(shape)
                if len(mine):
                    rows = torch.from_numpy(examples.rows_of(mine))
                    outputs[name][what][rows] = values.float().cpu()
    found = {}
    for name, parts in outputs.items():
        whole = {what: _of_all_ranks(runner, part) for what, part in parts.items()}
        found[name] = Signals(whole.pop("logits"), whole, classes.get(name))
    return found


def best_of_each(
    runner: ModelRunner,
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
    for mine, inputs in _batches(runner, collate, batch_size, bar):
        for name, signals in runner.predict(inputs, models).items():
            values = best(signals.logits).cpu()
            if name not in found:
                found[name] = torch.zeros(len(collate.lengths), *values.shape[1:])
            if len(mine):
                found[name][torch.from_numpy(mine)] = values
    return {name: _of_all_ranks(runner, part) for name, part in found.items()}


def score_tokens(
    runner: ModelRunner,
    collate: Collator,
    models: Sequence[str],
    batch_size: int,
    bar: AbstractContextManager[Bar] | None = None,
) -> dict[str, TokenScores]:
    """Scores of masked-LMs on each of N examples with its first mask variant, on every rank.

    Logits over a vocabulary are too large to collect: only sums per example leave a batch, and one
    model runs at a time. A model that knows tokens that others do not is scored on all, too.

    batch_size: examples per rank and forward pass.
    """
    count = len(collate.lengths)
    sums = {name: torch.zeros(6, count, dtype=torch.float64) for name in models}
    for mine, inputs in _batches(runner, collate, batch_size, bar):
        known, masked = inputs.row_sets["all"], inputs.row_sets["labelled"]
        for name in models:
            logits = runner.predict(inputs, [name])[name].logits
            own = masked[inputs.labels[masked] < logits.shape[1]]
            example, of_rows = _scores(logits, own, inputs, mine, name)
            by_all = torch.isin(own, known).cpu()
            sums[name][:3].index_add_(1, example[by_all], of_rows[:, by_all])
            sums[name][3:].index_add_(1, example, of_rows)
    found = {}
    for name, values in sums.items():
        scores = _of_all_ranks(runner, values).numpy()
        knows_more = scores[5].sum() > scores[2].sum()
        found[name] = TokenScores(
            scores[0], scores[1], scores[2], scores[3:] if knows_more else None
        )
    return found


def score_words(
    runner: ModelRunner,
    collators: Mapping[str, HiddenWordsCollator],
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Of masked-LMs, by name, the cross-entropies of each example's hidden words, in nats: float64
    [N], on every rank.

    A word's is the sum over its pieces, each predicted from those before it and the words that are
    not hidden. collators: by model; a forward pass for the first pieces, one for the second, and so
    on, of the examples that have such.
    """
    found = {}
    for name, collate in collators.items():
        sums = torch.zeros(3, len(collate.lengths), dtype=torch.float64)
        for piece in range(int(collate.words.pieces.max(initial=0))):
            asked = np.unique(collate.words.example[collate.words.pieces > piece])
            for batch in plan_once(collate.lengths[asked], batch_size * runner.world.size):
                [mine] = split_batch(asked[batch], 1, runner.world.size, runner.world.rank)
                inputs = collate(mine, piece, name)
                logits = runner.predict(inputs, [name])[name].logits
                sums.index_add_(1, *_scores(logits, inputs.row_sets["all"], inputs, mine, name))
        found[name] = _of_all_ranks(runner, sums[0]).numpy()
    return found


def _scores(
    logits: torch.Tensor, rows: torch.Tensor, inputs: Batch, mine: np.ndarray, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of k rows of a batch, on the CPU: the example of each, int64 [k], and float64 [3, k]: its
    cross-entropy, whether the label has the largest logit, and 1.

    mine: the examples of the batch.
    """
    logits, labels = logits[rows], inputs.labels[rows].to(logits.device)
    losses = F.cross_entropy(logits, labels, reduction="none").double()
    right = logits.argmax(dim=-1) == labels
    example = torch.from_numpy(mine)[inputs.views[name].example_indices[rows].cpu()]
    return example, torch.stack([losses, right.double(), torch.ones_like(losses)]).cpu()
