"""Run by each rank of a launch: the scenarios that it names, results to a JSON file (rank 0).

Several engines in one process, because starting the ranks costs more than the scenarios.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import reference
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from rank_memory import held_bytes
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from ds_distill.engine.config import deepspeed_config, zero_stage
from ds_distill.engine.engine import Engine
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.world import World
from ds_distill.losses import logits
from ds_distill.models.bundle import Bundle
from ds_distill.models.packing import packed_attention
from ds_distill.recipe.training import Training
from ds_distill.types import Batch
from ds_distill.views import PackedView, PaddedView

world = World.start()
results: dict[str, Any] = {}
kept_logits = logits.LOGIT_BYTES["cpu"]


def build(about: reference.Scenario, folder: Path, config: dict[str, Any]) -> Bundle:
    task, teachers, kind = about.task, {}, reference.auto_class(about.task)
    with sharded_loading(config):
        for name in reference.teacher_names(task):
            place = folder / task / name
            attention = None
            if about.packed:
                attention = packed_attention(AutoConfig.from_pretrained(place))
            teachers[name] = kind.from_pretrained(place, attn_implementation=attention)
    # Sharded from the first moment, not when the engine starts.
    loaded = [p for teacher in teachers.values() for p in teacher.parameters()]
    assert all(hasattr(p, "ds_tensor") == (zero_stage(config) == 3) for p in loaded)
    return reference.make_bundle(task, about.batches, about.policy, teachers)


def run(name: str, about: reference.Scenario, folder: Path) -> None:
    """Train some steps; keep losses, gradients of the first step and final weights."""
    task, batches, ahead = about.task, about.batches, about.ahead
    # A grown student's are as many as a large vocabulary has: none is kept.
    logits.LOGIT_BYTES["cpu"] = 1 if batches == "grown" else kept_logits
    accumulation = reference.MICRO_BATCHES // world.size
    limit = reference.max_grad_norm(task, batches)
    training = Training(
        batch_size=8 * reference.MICRO_BATCHES, micro_batch_size=8, max_grad_norm=limit
    )
    config = deepspeed_config(config_file(about.config, folder), training, world.size)
    bundle = build(about, folder, config)
    assert bundle.student is not None
    engine = Engine(
        bundle,
        config,
        world,
        reference.OPTIMIZER,
        student_resident=about.resident,
        together=ahead * accumulation,
    )
    before = teacher_bits(bundle)
    gradients = Gradients(engine)
    losses = []
    steps = [reference.step_batches(task, batches, number) for number in range(reference.STEPS)]
    if about.packed:
        steps = [[with_packed_teachers(batch) for batch in everyone] for everyone in steps]
    own = [everyone[world.rank :: world.size] for everyone in steps]
    for first in range(0, reference.STEPS, ahead):
        for micro_batches in engine.read_ahead(own[first : first + ahead]):
            parts = engine.train_step(micro_batches)
            total = world.sum(torch.stack(list(parts.values())))
            losses.append(dict(zip(parts, total.tolist(), strict=True)))
    result: dict[str, Any] = {
        "accumulation": accumulation,
        "losses": losses,
        "teachers_in_eval": not any(m.training for m in bundle.teachers.modules()),
        "student_in_train": bundle.student.training,
        "teachers_unchanged": before == teacher_bits(bundle),
        "held": of_all_ranks({n: held_bytes(m) for n, m in bundle.teachers.items()}),
        "student_held": of_all_ranks(held_bytes(bundle.student)),
        "optimizer_numel": optimizer_numel(engine),
    }
    if name == about.config and name.endswith("fp32"):
        result |= look_into_checkpoint(engine, folder / f"checkpoint-{name}")
    weights = engine.student_weights()
    if world.is_main:
        save_file(weights, folder / f"{name}-weights.safetensors")
        save_file(gradients.first, folder / f"{name}-gradients.safetensors")
    results[name] = result
    engine.close()


def config_file(name: str, folder: Path) -> str:
    """A config by name. In fp16 with a scale at which no step is skipped: a skipped one would
    change the losses of the next."""
    stage, half = name.removeprefix("zero").split("_")
    if half != "fp16":
        return name
    fp16 = {"enabled": True, "initial_scale_power": 8}
    file = folder / f"{name}-{world.rank}.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": int(stage)}, "fp16": fp16}))
    return str(file)


def with_packed_teachers(batch: Batch) -> Batch:
    views = {
        name: view if name == "student" else PackedView.of(view)
        for name, view in batch.views.items()
        if isinstance(view, PaddedView)
    }
    return replace(batch, views=views)


class Gradients:
    """Keeps the student's gradients as they are just before the first optimizer step."""

    def __init__(self, engine: Engine) -> None:
        self.first: dict[str, torch.Tensor] = {}
        self._engine = engine._engine
        self._student = engine.bundle.student
        self._step, self._engine.step = self._engine.step, self._look

    def _look(self) -> None:
        if not self.first and self._engine.is_gradient_accumulation_boundary():
            assert self._student is not None
            for name, parameter in self._student.named_parameters():
                gradient = safe_get_full_grad(parameter)
                if gradient is not None:
                    self.first[name] = gradient.float().clone()
        self._step()


def teacher_bits(bundle: Bundle) -> list[list[float]]:
    """Exact words of every rank's part of every teacher's weights, as bits added up."""
    sums = []
    for parameter in bundle.teachers.parameters():
        held = getattr(parameter, "ds_tensor", parameter).detach()
        bits = held.contiguous().view(torch.int16 if held.element_size() == 2 else torch.int32)
        weights = torch.arange(1, bits.numel() + 1).reshape(bits.shape)
        sums.append(int((bits.long() * weights).sum()))
    return of_all_ranks(sums)


def of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(values, value)
    return values


def optimizer_numel(engine: Engine) -> int:
    """Numbers that the optimizer's states hold over all ranks, moments alone."""
    inner = engine._engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    held = sum(
        value.numel()
        for state in inner.state.values()
        for name, value in state.items()
        if name == "exp_avg"
    )
    total = torch.tensor([float(held)])
    return int(world.sum(total).item())


def look_into_checkpoint(engine: Engine, folder: Path) -> dict[str, Any]:
    """Names and size of what a checkpoint holds."""
    folder.mkdir(exist_ok=True)
    engine.save(folder)
    if not world.is_main:
        return {}
    [file] = folder.glob("training.safetensors")
    with safe_open(file, "pt") as states:
        keys = sorted(states.keys())
    return {"checkpoint_keys": keys, "checkpoint_bytes": file.stat().st_size}


def main(folder: Path) -> None:
    # Stage 3 collects garbage for each engine, and would go over all that the libraries hold.
    gc.freeze()
    if world.is_main:
        for task in ("classification", "other families", "masked-lm"):
            for name in reference.teacher_names(task):
                reference.make_teacher(task, name).save_pretrained(folder / task / name)
    world.barrier()
    # A CPU without fp16 computes it in software; DeepSpeed has to be told that it may.
    get_accelerator().is_fp16_supported = lambda: True
    for name in sys.argv[2:]:
        run(name, {**reference.SCENARIOS, **reference.LOW}[name], folder)
    if world.is_main:
        (folder / "port").write_text(os.environ["MASTER_PORT"])
        (folder / "results.json").write_text(json.dumps(results))
    world.barrier()
    world.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
