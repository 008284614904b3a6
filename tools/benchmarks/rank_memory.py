"""What a rank holds."""

from __future__ import annotations

import resource

import torch
from torch import nn

from ds_distill.engine.world import World


def held_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters that this rank holds between steps."""
    total = 0
    for parameter in module.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        unsharded = parameter.numel() * parameter.element_size()  # 0 while it is sharded
        if shard is not None and unsharded == 0:
            total += shard.numel() * shard.element_size()
        else:
            total += unsharded
    return total


def peak_bytes(world: World) -> int:
    """The device's memory at its fullest since it was last forgotten; on CPU the process's, over
    all its life."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
