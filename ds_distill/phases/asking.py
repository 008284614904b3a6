"""What every model says about every example of a split, by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ds_distill.data.ahead import made_ahead
from ds_distill.data.batches import Collator
from ds_distill.data.plan import deal, plan_once
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.evaluation.metrics import TokenScores
from ds_distill.events import Bar
from ds_distill.types import Signals


def ask_all(
    engine: Engine,
    collate: Collator,
    models: Sequence[str],
    batch_size: int,
    world: World,
    bar: AbstractContextManager[Bar] | None = None,
    *,
    layers: Sequence[int] = (),
) -> dict[str, Signals]:
    """What models say about all N examples, on the CPU of every rank: logits float32 [N, C] and
    the states of `layers`, float32 [N, H].

    batch_size: examples per rank and forward pass.
    """
    batches = plan_once(collate.lengths, batch_size * world.size)
    shares = [deal(batch, 1, world.size, world.rank)[0] for batch in batches]
    said: dict[str, dict[Any, torch.Tensor]] = {name: {} for name in models}
    with bar or nullcontext() as progress:
        for batch, mine, asked in zip(batches, shares, made_ahead(collate, shares), strict=True):
            answers = engine.ask(asked, models, layers)
            for name, answer in answers.items():
                for what, values in [("logits", answer.logits), *answer.hidden.items()]:
                    if what not in said[name]:
                        shape = (len(collate.lengths), values.shape[1])
                        said[name][what] = torch.zeros(shape)
                    if len(mine):
                        said[name][what][torch.from_numpy(mine)] = values.float().cpu()
            if progress:
                progress.advance(len(batch))
    whole = {
        # Each example was answered by one rank and is zero on the others.
        name: {what: world.sum(part.to(world.device)).cpu() for what, part in parts.items()}
        for name, parts in said.items()
    }
    return {name: Signals(parts.pop("logits"), parts) for name, parts in whole.items()}


def score_tokens(
    engine: Engine,
    collate: Collator,
    models: Sequence[str],
    batch_size: int,
    world: World,
    bar: AbstractContextManager[Bar] | None = None,
) -> dict[str, TokenScores]:
    """How masked-LMs do on each of N examples with its first draw of masks, on every rank.

    Logits over a vocabulary are too large to keep: only sums per example leave a batch, and one
    model is asked at a time.

    batch_size: examples per rank and forward pass.
    """
    count = len(collate.lengths)
    sums = {name: torch.zeros(3, count, dtype=torch.float64) for name in models}
    batches = plan_once(collate.lengths, batch_size * world.size)
    shares = [deal(batch, 1, world.size, world.rank)[0] for batch in batches]
    with bar or nullcontext() as progress:
        for batch, mine, hidden in zip(batches, shares, made_ahead(collate, shares), strict=True):
            counted = hidden.row_sets["all"]
            for name in models:
                logits = engine.ask(hidden, [name])[name].logits
                labels = hidden.labels.to(logits.device)
                losses = F.cross_entropy(logits, labels, reduction="none")
                right = logits.argmax(dim=-1) == labels
                example = torch.from_numpy(mine)[hidden.views[name].row_examples[counted]]
                values = torch.stack([losses.double(), right.double(), torch.ones_like(losses)])
                sums[name].index_add_(1, example, values.cpu()[:, counted])
            if progress:
                progress.advance(len(batch))
    return {
        # Each example was answered by one rank and is zero on the others.
        name: TokenScores(*world.sum(values.to(world.device)).cpu().numpy())
        for name, values in sums.items()
    }
