"""Placement of the weights of student and teachers under ZeRO stage 3."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ds_distill.engine.accelerator  # noqa: F401  # isort: skip  (before deepspeed)
import torch
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partitioned_param_coordinator import (
    PartitionedParameterCoordinator,
    ZeRoTraceMode,
)
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


class Traces:
    """What DeepSpeed 0.19 prefetches under stage 3, for each kind of pass.

    It records which modules the last pass ran, and gathers their weights ahead in the next one as
    long as that runs the same. Where passes of different kinds alternate, such as teachers' and
    micro-steps, no record would ever fit: here each kind has its own.
    """

    def __init__(self, coordinator: PartitionedParameterCoordinator) -> None:
        self._coordinator = coordinator
        self._kind: Hashable = None
        self._kept: dict[Hashable, tuple[int, dict[str, Any]]] = {}

    def turn_to(self, kind: Hashable) -> None:
        """Called before a pass, on every rank alike: it is one of that kind."""
        if kind == self._kind:
            return
        own = self._coordinator
        if own.is_record_trace():
            own.reset_step()  # the pass before was recorded whole
        trace = {name: getattr(own, name) for name in _TRACE}
        self._kept[self._kind] = _weights_of_others(trace), trace
        own._clear_trace_structures()
        weights, trace = self._kept.get(kind, (0, {}))
        if weights != _weights_of_others(trace):  # a pass in between has read more
            trace = {}
        for name, value in {_MODE: ZeRoTraceMode.INVALID, **trace}.items():
            setattr(own, name, value)
        # A weight that a pass of one kind reads again stays whole until then, in another for good.
        _forget_releases()
        self._kind = kind


_MODE, _MODULES, _ = _TRACE = tuple(
    f"_PartitionedParameterCoordinator__{name}"
    for name in ("trace_mode", "submodule_order", "param_order")
)


def _weights_of_others(trace: dict[str, Any]) -> int:
    """How many weights the modules of a trace read that are other modules', such as a head's that
    is tied to embeddings: DeepSpeed adds one where it first sees it."""
    return sum(len(module._external_params) for module in trace.get(_MODULES, ()))


def forget(model: nn.Module) -> None:
    """Take a model out of what DeepSpeed 0.19 keeps of the models of stage 3 for as long as the
    process lives. With the model all its weights and the optimizer would stay: 16 bytes for each
    weight in bf16.

    model: that of an engine which was closed.
    """
    # The model itself, and layers that activation checkpointing ran again: it ends their forward
    # passes early, without the hook that takes them out.
    known = set(model.modules())
    FWD_MODULE_STACK[:] = [one for one in FWD_MODULE_STACK if one not in known]
    _forget_releases()


def _forget_releases() -> None:
    """Empty DeepSpeed's cache of which weights a module releases at which step of a pass. It fills
    again; its keys are coordinators and modules, and say nothing of what the pass does later."""
    # DeepSpeed wraps the cache in a function.
    method = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()
