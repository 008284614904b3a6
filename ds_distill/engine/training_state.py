"""What training has changed, by the names of parameters: it fits any number of ranks and any ZeRO
stage.

A safetensors file has, of each parameter NAME that is trained,

    weight/NAME        float32, the optimizer's copy, of the parameter's shape
    exp_avg/NAME       float32, Adam's first moment
    exp_avg_sq/NAME    float32, Adam's second moment
    step/NAME          float32 [], how often Adam has updated it

and the buffers of student and terms as buffer/NAME. A parameter that Adam has not updated yet has
its weight alone. The metadata have the schedule's number of steps and, in fp16, the loss scaler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from ds_distill.models.bundle import Bundle

MOMENTS = ("exp_avg", "exp_avg_sq")

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's DynamicLossScaler changes."""


def write_training_state(engine: Any, bundle: Bundle, file: Path, is_main: bool) -> None:
    """Gather what is trained, one parameter at a time, and have rank 0 write it. Rank 0 needs
    memory for three float32 copies of it. Every rank must call this.

    engine: DeepSpeed's, of the bundle, after its first step.
    """
    tensors: dict[str, torch.Tensor] = {}
    adam = _adam(engine)
    _link(engine.optimizer)
    updates = max((float(state.get("step", 0)) for state in adam.state.values()), default=0.0)
    whole = _whole_copies(engine)
    for name, parameter in _trained(bundle):
        if parameter in whole:
            found = {"weight": whole[parameter].detach(), **adam.state.get(whole[parameter], {})}
        else:
            found = {"weight": safe_get_full_fp32_param(parameter)}
            if updates:  # in fp16 the first steps may all have been skipped
                found["step"] = torch.tensor(updates)
                found |= {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        if is_main:
            for key, value in found.items():
                tensors[f"{key}/{name}"] = value.float().cpu().clone()
    if is_main:
        tensors |= {f"buffer/{name}": value.cpu().clone() for name, value in _buffers(bundle)}
        scaler = _loss_scaler(engine)
        state = {key: getattr(scaler, key) for key in SCALER} if scaler else {}
        steps = str(engine.lr_scheduler.last_epoch)
        save_file(tensors, file, {"steps": steps, "loss_scaler": json.dumps(state)})


def read_training_state(engine: Any, bundle: Bundle, file: Path) -> int:
    """Set what `write_training_state` wrote, with any number of ranks and at any stage. Returns the
    schedule's number of steps. Every rank must call this.

    Raises RuntimeError where the file is of a training of other parameters.
    """
    adam = _adam(engine)
    with safe_open(file, "pt") as states:
        names = set(states.keys())
        weights = {f"weight/{name}" for name, _ in _trained(bundle)}
        if weights != (there := {name for name in names if name.startswith("weight/")}):
            raise RuntimeError(f"{file} has other parameters: {sorted(weights ^ there)[:4]} ...")
        updated = [states.get_tensor(name).item() for name in names if name.startswith("step/")]
        whole = _whole_copies(engine)
        adam.state.clear()
        if not whole and updated:
            _make_states_of_shards(engine, adam, max(updated))
        for name, parameter in _trained(bundle):
            weight = states.get_tensor(f"weight/{name}").to(parameter.device)
            own = {}
            if f"step/{name}" in names:
                own = {key: states.get_tensor(f"{key}/{name}") for key in (*MOMENTS, "step")}
                own = {key: value.to(parameter.device) for key, value in own.items()}
            with torch.no_grad():
                if parameter in whole:
                    whole[parameter].copy_(weight)
                    parameter.copy_(weight)
                    adam.state[whole[parameter]] = own
                elif hasattr(parameter, "ds_id"):
                    _set_stage_3(parameter, weight, own)
                else:
                    _set_stage_1_or_2(parameter, weight, own)
        for name, buffer in _buffers(bundle):
            buffer.copy_(states.get_tensor(f"buffer/{name}"))
        metadata = states.metadata()
        if scaler := _loss_scaler(engine):
            for key, value in json.loads(metadata["loss_scaler"]).items():
                setattr(scaler, key, value)
        return int(metadata["steps"])


def _trained(bundle: Bundle) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in bundle.named_parameters() if p.requires_grad)


def _buffers(bundle: Bundle) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that transformers would save, of student and terms."""
    saved = bundle.state_dict().keys()
    for name, buffer in bundle.named_buffers():
        if name in saved and not name.startswith("teachers."):
            yield name, buffer


def _whole_copies(engine: Any) -> dict[nn.Parameter, torch.Tensor]:
    """What Adam updates for each parameter at stage 0: itself in fp32, a copy in bf16. Empty at
    other stages, where Adam has shards of all parameters together."""
    wrapper = engine.optimizer
    if isinstance(wrapper, torch.optim.AdamW):
        return {one: one for group in wrapper.param_groups for one in group["params"]}
    if not hasattr(wrapper, "fp32_groups"):
        return {}
    return {
        one: copy
        for group, copies in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for one, copy in zip(group, copies, strict=True)
    }


def _loss_scaler(engine: Any) -> Any:
    """DeepSpeed's, where it changes the scale; None elsewhere."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def _adam(engine: Any) -> torch.optim.AdamW:
    """torch's optimizer, inside of DeepSpeed's or alone."""
    adam = getattr(engine.optimizer, "optimizer", engine.optimizer)
    assert isinstance(adam, torch.optim.AdamW)
    return adam


def _make_states_of_shards(engine: Any, adam: torch.optim.AdamW, updates: float) -> None:
    """Give Adam the state of shards that it has updated so often, with moments of 0; torch makes it
    in the first step otherwise."""
    shards = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # of stage 3
    if shards is None:
        shards = [shard for group in adam.param_groups for shard in group["params"]]
    for shard in shards:
        adam.state[shard] = {
            "step": torch.tensor(updates, dtype=torch.float32, device=shard.device),
            **{key: torch.zeros_like(shard) for key in MOMENTS},
        }
    _link(engine.optimizer)


def _link(wrapper: Any) -> None:
    """Have parameters find their parts in Adam's states. At stages 1 and 2 DeepSpeed does it after
    the update of the first of its groups, when the others have no state, and never again; there is
    no public call for it."""
    if hasattr(wrapper, "_hp_optimizer_states_linked"):
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()


def _set_stage_1_or_2(
    parameter: nn.Parameter, weight: torch.Tensor, own: dict[str, torch.Tensor]
) -> None:
    safe_set_full_fp32_param(parameter, weight)
    parameter.copy_(weight)
    for key in MOMENTS if own else ():
        safe_set_full_optimizer_state(parameter, own[key], key)


def _set_stage_3(parameter: Any, weight: torch.Tensor, own: dict[str, torch.Tensor]) -> None:
    safe_set_local_fp32_param(parameter, _share(parameter, weight))
    parameter.ds_tensor.copy_(_share(parameter, weight))
    if parameter.numel():  # whole on this rank
        parameter.copy_(weight)
    for key in MOMENTS if own else ():
        safe_set_local_optimizer_state(parameter, _share(parameter, own[key]), key)


def _share(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """This rank's part at stage 3; the last ranks' are padded to the size of the others."""
    size = parameter.ds_tensor.numel()
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    share = value.flatten()[rank * size : (rank + 1) * size]
    return nn.functional.pad(share, (0, size - share.numel()))
