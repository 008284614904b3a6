"""What every model says about every example of a split, by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ds_distill.data.batches import SequenceCollator
from ds_distill.data.plan import deal, plan_once
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.events import Bar
from ds_distill.types import Signals


def ask_all(
    engine: Engine,
    collate: SequenceCollator,
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
    said: dict[str, dict[Any, torch.Tensor]] = {name: {} for name in models}
    with bar or nullcontext() as progress:
        for batch in batches:
            [mine] = deal(batch, 1, world.size, world.rank)
            answers = engine.ask(collate(mine), models, layers)
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
