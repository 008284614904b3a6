"""Placement of the weights of student and teachers under ZeRO stage 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds_distill.engine.config import zero_stage


@contextmanager
def sharded_loading(config: dict[str, Any]) -> Iterator[None]:
    """Models that transformers loads in this block keep, under ZeRO stage 3, only each rank's
    share of their weights; under other stages nothing changes."""
    if zero_stage(config) != 3:
        yield
        return
    holder = HfDeepSpeedConfig(config)  # transformers only has a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del holder


def keep_resident(config: dict[str, Any], modules: list[nn.Module]) -> dict[str, Any]:
    """A stage 3 config under which the parameters of `modules` stay whole on each rank.

    DeepSpeed goes through the parameters in registration order and leaves those whole that still
    fit the model threshold. So `modules` must be registered first.
    """
    numel = sum(_numel(parameter) for module in modules for parameter in module.parameters())
    zero = dict(config["zero_optimization"])
    zero["stage3_param_persistence_threshold"] = numel
    zero["stage3_model_persistence_threshold"] = numel
    return {**config, "zero_optimization": zero}


def _numel(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


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
