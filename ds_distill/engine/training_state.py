"""What training has changed, by the names of parameters: it fits any number of ranks and any ZeRO
stage.

A safetensors file has, of each parameter NAME that is trained,

    weight/NAME        float32, the optimizer's copy, of the parameter's shape
    exp_avg/NAME       float32, Adam's first moment
    exp_avg_sq/NAME    float32, Adam's second moment
    step/NAME          float32 [], how often Adam has updated it

and the buffers of student and terms as buffer/NAME. A parameter that Adam has not updated yet has
its weight alone. The metadata have the schedule's number of steps, in fp16 the loss scaler, and
that weights rested which no term read.
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

from ds_distill.engine.flat_adamw import MOMENTS, FlatAdamW
from ds_distill.engine.internals import link_states, loss_scaler, shards_of, whole_copies
from ds_distill.models.bundle import Bundle

RESTED = "rested"
"""Metadata of a file since weights that no active term reads rest."""

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's DynamicLossScaler changes."""


def write_training_state(engine: Any, bundle: Bundle, file: Path, is_main: bool) -> None:
    """Gather what is trained, one parameter at a time, and have rank 0 write it. Rank 0 needs
    memory for three float32 copies of it. Every rank must call this.

    engine: DeepSpeed's, of the bundle, after its first step.
    """
    tensors: dict[str, torch.Tensor] = {}
    adam = _adam(engine)
    link_states(engine.optimizer)
    whole, shards = whole_copies(engine), shards_of(engine)
    is_flat = isinstance(engine.optimizer, FlatAdamW)
    for name, parameter in _trained(bundle):
        if parameter in whole:
            copy = whole[parameter]
            own = engine.optimizer.state_of(parameter) if is_flat else adam.state.get(copy, {})
            found = {"weight": copy.detach(), **own}
        else:
            found = {"weight": safe_get_full_fp32_param(parameter)}
            if step := adam.state[shards[parameter]].get("step"):
                found["step"] = step
                found |= {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        if is_main:
            for key, value in found.items():
                tensors[f"{key}/{name}"] = value.float().cpu().clone()
    if is_main:
        tensors |= {f"buffer/{name}": value.cpu().clone() for name, value in _buffers(bundle)}
        scaler = loss_scaler(engine)
        state = {key: getattr(scaler, key) for key in SCALER} if scaler else {}
        steps = str(engine.lr_scheduler.last_epoch)
        about = {"steps": steps, "loss_scaler": json.dumps(state), RESTED: "true"}
        save_file(tensors, file, about)


def read_training_state(engine: Any, bundle: Bundle, file: Path) -> int:
    """Set what `write_training_state` wrote, with any number of ranks and at any stage. Returns the
    schedule's number of steps. Every rank must call this.

    Raises RuntimeError where the file is of a training of other parameters, or in which weights did
    not rest that do here.
    """
    adam = _adam(engine)
    with safe_open(file, "pt") as states:
        names = set(states.keys())
        weights = {f"weight/{name}" for name, _ in _trained(bundle)}
        if weights != (there := {name for name in names if name.startswith("weight/")}):
            raise RuntimeError(f"{file} has other parameters: {sorted(weights ^ there)[:4]} ...")
        metadata = states.metadata()
        if RESTED not in metadata and not all(all(one["learns"]) for one in adam.param_groups):
            raise RuntimeError(
                f"{file} is of an earlier version, which updated weights that no term read yet"
            )
        whole, shards = whole_copies(engine), shards_of(engine)
        is_flat = isinstance(engine.optimizer, FlatAdamW)
        adam.state.clear()
        for name, parameter in _trained(bundle):
            if parameter in shards and f"step/{name}" in names:
                _make_state(adam, shards[parameter], states.get_tensor(f"step/{name}"))
        link_states(engine.optimizer)
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
                    if not is_flat:
                        adam.state[whole[parameter]] = own
                    elif own:
                        engine.optimizer.set_state(parameter, own)
                elif hasattr(parameter, "ds_id"):
                    _set_stage_3(parameter, weight, own)
                else:
                    _set_stage_1_or_2(parameter, weight, own)
        for name, buffer in _buffers(bundle):
            buffer.copy_(states.get_tensor(f"buffer/{name}"))
        of_scaler = json.loads(metadata["loss_scaler"])
        if scaler := loss_scaler(engine):
            for key, value in of_scaler.items():
                setattr(scaler, key, value)
        # In earlier versions the schedule did not count the steps that fp16 skipped.
        return max(int(metadata["steps"]), of_scaler.get("cur_iter", 0))


def _trained(bundle: Bundle) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in bundle.named_parameters() if p.requires_grad)


def _buffers(bundle: Bundle) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that transformers would save, of student and terms."""
    saved = bundle.state_dict().keys()
    for name, buffer in bundle.named_buffers():
        if name in saved and not name.startswith("teachers."):
            yield name, buffer


def _adam(engine: Any) -> torch.optim.AdamW:
    """torch's optimizer, inside of DeepSpeed's or alone."""
    adam = getattr(engine.optimizer, "optimizer", engine.optimizer)
    assert isinstance(adam, torch.optim.AdamW)
    return adam


def _make_state(adam: torch.optim.AdamW, shard: torch.Tensor, step: torch.Tensor) -> None:
    """Give Adam the state of a shard that it has updated so often, with moments of 0; torch makes
    it in the first step otherwise."""
    if not adam.state[shard]:
        adam.state[shard] = {
            "step": step.to(shard.device),
            **{key: torch.zeros_like(shard) for key in MOMENTS},
        }


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


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's generators, which only dropout uses: data choices are functions of
    example keys."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
