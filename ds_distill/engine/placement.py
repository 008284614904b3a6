"""Placement of the weights of student and teachers under ZeRO stage 3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ds_distill.engine.accelerator  # noqa: F401  # isort: skip  (before deepspeed)
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds_distill.engine.config import LAYERS_WHOLE, zero_stage
from ds_distill.models.bundle import Bundle
from ds_distill.models.load import layers_of
from ds_distill.models.packed import parts_called

BUCKET = 500_000_000
"""Elements of DeepSpeed's bucket of gradients where a config says nothing."""


@contextmanager
def sharded_loading(config: dict[str, Any]) -> Iterator[None]:
    """Models that transformers loads in this block keep, under ZeRO stage 3, only each rank's
    share of their weights; under other stages nothing changes."""
    if zero_stage(config) != 3:
        yield
        return
    config = plain_linear(config)
    holder = HfDeepSpeedConfig(config)  # transformers only has a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del holder


def stage3_config(
    config: dict[str, Any], bundle: Bundle, *, trains: bool, student_resident: bool
) -> dict[str, Any]:
    """A stage 3 config for an engine of a bundle.

    trains: with an optimizer; without one all weights are sharded.
    """
    given = bundle.teachers.values()
    teachers = [teacher for teacher in given if isinstance(teacher, PreTrainedModel)]
    config = gather_by_layer(config, teachers)
    if student_resident or not trains:
        config = plain_linear(config)
    if trains and student_resident:
        return keep_resident(config, bundle.trained)
    # DeepSpeed's default would leave every small parameter whole.
    zero = {"stage3_param_persistence_threshold": 0, **config["zero_optimization"]}
    if not trains:
        zero["stage3_param_persistence_threshold"] = 0
    return {**config, "zero_optimization": zero}


def plain_linear(config: dict[str, Any]) -> dict[str, Any]:
    """A stage 3 config that leaves torch's linear layers as they are. A value that the config has
    stays.

    DeepSpeed's hold no gathered weights for the backward pass, which only sharded weights that
    learn need. They add the bias in an operation of its own: in bf16 results are rounded twice, and
    differ from other stages' (.04% of a loss in tests).
    """
    zero = {"memory_efficient_linear": False, **config["zero_optimization"]}
    return {**config, "zero_optimization": zero}


def keep_resident(config: dict[str, Any], modules: list[nn.Module]) -> dict[str, Any]:
    """A stage 3 config under which the parameters of `modules` stay whole on each rank.

    DeepSpeed goes through the parameters in registration order and leaves those whole that still
    fit the model threshold. So `modules` must be registered first.
    """
    numel = sum(numel_of(parameter) for module in modules for parameter in module.parameters())
    zero = dict(config["zero_optimization"])
    zero["stage3_param_persistence_threshold"] = numel
    zero["stage3_model_persistence_threshold"] = numel
    return {**config, "zero_optimization": zero}


def gather_by_layer(config: dict[str, Any], teachers: Iterable[PreTrainedModel]) -> dict[str, Any]:
    """A stage 3 config under which few of the teachers' layers are whole at once, and each is
    gathered in one piece: DeepSpeed would gather up to 1e9 weights ahead, and run its hooks, some
    5 ms a layer, on each module inside. Values that the config has stay.

    Marks the teachers' modules for it.
    """
    largest = 0
    for teacher in teachers:
        layers = layers_of(teacher)
        for layer in layers:
            largest = max(largest, sum(map(numel_of, layer.parameters())))
        for module in parts_called(teacher.config, layers):
            set_z3_leaf_module(module, True)
    if not largest:
        return config
    bounds = {
        "stage3_prefetch_bucket_size": largest,
        "stage3_max_live_parameters": LAYERS_WHOLE * largest,
        "stage3_max_reuse_distance": LAYERS_WHOLE * largest,
    }
    return {**config, "zero_optimization": {**bounds, **config["zero_optimization"]}}


def fit_bucket(config: dict[str, Any], trained: Iterable[nn.Parameter]) -> dict[str, Any]:
    """A config whose bucket of gradients is as long as these weights' are: DeepSpeed allocates it
    whole at stages 1 to 3, which by default is 0.9 GiB in bf16. A value that the config has stays.
    """
    numel = sum(map(numel_of, trained))
    if not numel or zero_stage(config) == 0:
        return config
    bucket = {"reduce_bucket_size": min(numel, BUCKET)}
    return {**config, "zero_optimization": {**bucket, **config["zero_optimization"]}}


def numel_of(parameter: torch.nn.Parameter) -> int:
    """Elements of a weight, which may be sharded."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
