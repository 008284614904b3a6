"""The rival with two kinds of DeepSpeed engine, as accelerate's guide to several models has it.

The student trains in an engine of its own; each teacher is in another, of ZeRO stage 3 and
without an optimizer; the loss is plain PyTorch between them.

https://huggingface.co/docs/accelerate/usage_guides/deepspeed_multiple_model
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # nowhere else outside of `engine`: a run of ours has one engine
import torch
import torch.nn.functional as F
from distillation_paths import (
    TEMPERATURE,
    Runner,
    Setting,
    load_teachers,
    model_of,
    optimizer_settings,
    run_steps,
)
from transformers import PreTrainedModel, get_linear_schedule_with_warmup

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import OptimizerSettings
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.world import World, no_chatter
from ds_distill.types import Batch
from ds_distill.views import PaddedView

_GUIDE: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "sub_group_size": 10**9,
    "stage3_prefetch_bucket_size": 10**9,
    "stage3_param_persistence_threshold": 10**9,
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 10**9,
}
"""A teacher's ZeRO section in the guide, without its offload to the CPU, which would be slower.
With these thresholds a rank keeps the weights that it has gathered."""


def two_engines(setting: Setting, folder: Path, world: World) -> Runner:
    student = model_of(setting, folder, "student", world)
    engine = _student_engine(student, setting)
    plain = deepspeed_config(setting.config, None, 1)
    config = {**plain, "zero_optimization": _GUIDE}
    with sharded_loading(config):
        loaded = load_teachers(setting, folder, world)
    teachers = {name: _teacher_engine(teacher, config) for name, teacher in loaded.items()}

    def step(batch: Batch) -> torch.Tensor:
        batch = batch.to(world.device)
        with torch.no_grad():
            outputs = [_logits(teacher, batch, name) for name, teacher in teachers.items()]
            target = torch.stack([each.float() for each in outputs]).mean(0)
        loss = kl(_logits(engine, batch, "student").float(), target)
        engine.backward(loss)
        engine.step()
        return loss

    return run_steps(step, world.device)


def adamw(student: torch.nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """The rivals' optimizer: as ours, one group."""
    return torch.optim.AdamW(
        student.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """T^2 * KL(teacher || student) of logits [n, C], mean over rows."""
    own = F.log_softmax(student / TEMPERATURE, dim=-1)
    target = F.log_softmax(teacher / TEMPERATURE, dim=-1)
    return TEMPERATURE**2 * F.kl_div(own, target, log_target=True, reduction="batchmean")


def _logits(model: Any, batch: Batch, name: str) -> torch.Tensor:
    """[n, C]; of a masked-LM all positions are made, as its forward does, then rows taken."""
    view = batch.views[name]
    assert isinstance(view, PaddedView)
    logits = model(**view.model_inputs()).logits
    return logits if view.positions is None else logits.flatten(0, 1)[view.positions]


def _student_engine(student: PreTrainedModel, setting: Setting) -> Any:
    settings = optimizer_settings(setting)
    steps = settings.warmup_steps, settings.total_steps
    with no_chatter():
        engine, *_ = deepspeed.initialize(
            model=student,
            optimizer=adamw(student, settings),
            lr_scheduler=lambda optimizer: get_linear_schedule_with_warmup(optimizer, *steps),
            config=setting.deepspeed,
            dist_init_required=False,
        )
    engine.train()
    return engine


def _teacher_engine(teacher: PreTrainedModel, config: dict[str, Any]) -> Any:
    with no_chatter():
        engine, *_ = deepspeed.initialize(model=teacher, config=config, dist_init_required=False)
    engine.eval()
    return engine
