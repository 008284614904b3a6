"""What DeepSpeed 0.19 has no public call for: all uses of its private names, and of attributes that
it does not document."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import ds_distill.engine.accelerator  # noqa: F401  # isort: skip  (before deepspeed)
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partitioned_param_coordinator import (
    PartitionedParameterCoordinator,
    ZeRoTraceMode,
)
from torch import nn

from ds_distill.engine.flat_adamw import FlatAdamW


def compile_nothing() -> None:
    """Prevent DeepSpeed from compiling its CPU collectives for tensor-parallel inference, which are
    not used here. It takes a minute, in a folder that all environments of a user share, behind a
    lock that a killed process leaves."""
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False


def trust_the_norm(optimizer: Any) -> None:
    """Of stages 0 to 2, in bf16 and fp16: the norm of all gradients tells whether one of them is
    not finite. DeepSpeed skips the step for that too, but looks at each gradient by itself before,
    with eight launches: a quarter of a short step on a GPU at stage 1, two fifths at stage 0."""
    if getattr(optimizer, "compute_grad_norm", False):  # of stages 1 and 2
        optimizer.check_overflow = lambda partition_gradients=True: None
    elif hasattr(optimizer, "overflow_checker"):
        optimizer.overflow_checker.check = lambda: False


def step_alone(engine: Any, groups: Sequence[Sequence[nn.Parameter]], *, looks: bool) -> None:
    """Have an engine of one rank, at stage 0, step with a `FlatAdamW`. DeepSpeed would copy all
    gradients into one tensor and back, for an all-reduce that changes nothing, and in bf16 has made
    an optimizer of its own, with a copy of all weights.

    groups, looks: see `FlatAdamW`.
    """
    norm = engine.gradient_clipping()
    engine.optimizer = optimizer = FlatAdamW(engine.basic_optimizer, groups, norm, looks=looks)
    engine.enable_backward_allreduce = False
    engine.zero_grad = optimizer.zero_grad
    engine.clip_fp32_gradients = lambda: None


def spare_stage_0(engine: Any, trained: list[nn.Parameter]) -> None:
    """Leave out what DeepSpeed does at stage 0 to no effect: in fp32 it goes through the weights of
    the whole bundle to clip gradients and again to drop them, a sixth of a short step beside three
    large teachers."""
    engine.zero_grad = engine.optimizer.zero_grad
    engine.clip_fp32_gradients = lambda: nn.utils.clip_grad_norm_(
        trained, engine.gradient_clipping()
    )


def whole_copies(engine: Any) -> dict[nn.Parameter, torch.Tensor]:
    """What Adam updates for each parameter where it is in one piece, at stage 0 or of a lone rank:
    itself in fp32, a copy in bf16. Empty where Adam has shards of all parameters together."""
    wrapper = engine.optimizer
    if isinstance(wrapper, FlatAdamW):
        return wrapper.masters()
    if isinstance(wrapper, torch.optim.AdamW):
        return {one: one for group in wrapper.param_groups for one in group["params"]}
    if not hasattr(wrapper, "fp32_groups"):
        return {}
    return {
        one: copy
        for group, copies in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for one, copy in zip(group, copies, strict=True)
    }


def loss_scaler(engine: Any) -> Any:
    """DeepSpeed's, where it changes the scale; None elsewhere."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def shards_of(engine: Any) -> dict[nn.Parameter, torch.Tensor]:
    """This rank's shard of the group of each parameter, which Adam updates at stages 1 to 3. Empty
    at stage 0."""
    wrapper = engine.optimizer
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # stage 3
        groups, shards = wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat
    elif hasattr(wrapper, "single_partition_of_fp32_groups"):
        groups, shards = wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups
    else:
        return {}
    return {one: shard for group, shard in zip(groups, shards, strict=True) for one in group}


def link_states(wrapper: Any) -> None:
    """Have parameters find their parts in Adam's states. At stages 1 and 2 DeepSpeed does it after
    the update of the first of its groups, when the others have no state, and never again; there is
    no public call for it."""
    if hasattr(wrapper, "_hp_optimizer_states_linked"):
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()


class Traces:
    """What DeepSpeed 0.19 prefetches under stage 3, for each kind of pass.

    It records which modules the last pass ran, and gathers their weights ahead in the next one as
    long as that runs the same. Where passes of different kinds alternate, such as teachers' and
    micro-steps, no record would ever fit: here each kind has its own.
    """

    def __init__(self, optimizer: Any) -> None:
        """optimizer: DeepSpeed's, of stage 3."""
        offload = getattr(optimizer, "parameter_offload", optimizer)
        self._coordinator: PartitionedParameterCoordinator = offload.get_param_coordinator()
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
