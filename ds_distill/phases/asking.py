"""Every model's logits on every example of a split, by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from ds_distill.data.batches import SequenceCollator
from ds_distill.data.plan import deal, plan_once
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.events import Bar


def ask_all(
    engine: Engine,
    collate: SequenceCollator,
    models: Sequence[str],
    num_labels: int,
    batch_size: int,
    world: World,
    bar: AbstractContextManager[Bar] | None = None,
) -> dict[str, np.ndarray]:
    """Logits float32 [N, num_labels] by model, the same on every rank.

    batch_size: examples per rank and forward pass.
    """
    batches = plan_once(collate.lengths, batch_size * world.size)
    logits = {name: torch.zeros(len(collate.lengths), num_labels) for name in models}
    progress = bar.__enter__() if bar else None
    for batch in batches:
        [mine] = deal(batch, 1, world.size, world.rank)
        answers = engine.ask(collate(mine), models)
        if len(mine):
            for name in models:
                logits[name][torch.from_numpy(mine)] = answers[name].cpu()
        if progress:
            progress.advance(len(batch))
    if bar:
        bar.__exit__(None, None, None)
    for name in models:  # each example was answered by one rank and is zero on the others
        logits[name] = world.sum(logits[name].to(world.device)).cpu()
    return {name: values.numpy() for name, values in logits.items()}
