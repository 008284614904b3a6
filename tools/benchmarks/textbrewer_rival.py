"""The rival TextBrewer 0.2.1.post1, the last on PyPI: pip install textbrewer (with tensorboard).

It imports on torch 2.13 and transformers 5.23 as it is. Its documented way is followed: a
MultiTeacherDistiller (classification) or GeneralDistiller (masked-LM, rows as `logits_mask`)
whose `train` runs over a data loader. What had to be decided:

- bf16: TextBrewer offers mixed precision through Apex alone, which is no longer made. So
  `train_on_batch` runs under `torch.autocast` with the student's weights in fp32. Teachers are
  loaded in bf16, the best for memory and time that its users could do. (On a CPU, autocast
  leaves the loss itself in bf16: its first loss is coarse there, as it is not on a GPU.)
- It hands all teachers one batch. A wrapper lets each take its own view of it.
- Its loss is the cross-entropy with the softened target, without T^2: T^2 is its weight here,
  and T^2 times the target's entropy is taken off the first loss, which makes it ours.
- A step lasts from one taking of a batch to the next. It reads each loss back, twice, for a log
  that is off; that is part of its step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import textbrewer
import torch
from distillation_paths import (
    TEMPERATURE,
    Runner,
    Setting,
    Steps,
    load_teachers,
    model_of,
    now,
    optimizer_settings,
)
from torch import nn
from transformers import PreTrainedModel, get_linear_schedule_with_warmup
from two_engines_rival import adamw

from ds_distill.engine.world import World
from ds_distill.recipe.training import Training
from ds_distill.types import Batch
from ds_distill.views import PaddedView


class OwnView(nn.Module):
    """A model that takes its own view from a batch that holds several."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__()
        self.model = model
        self._name = name
        self.train(model.training)  # a distiller puts its models back into the mode they had

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch[self._name])


class Teacher(OwnView):
    """In the dtype of its weights: autocast would go back and forth between two."""

    def forward(self, **batch: Any) -> Any:
        with torch.autocast(self.model.device.type, enabled=False):
            return super().forward(**batch)


class Clocked:
    """A data loader that measures the seconds between one batch's taking and the next's."""

    def __init__(
        self, batches: list[Any], device: torch.device, between: Callable[[], None]
    ) -> None:
        self._batches, self._device, self._between = batches, device, between
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            if number < len(self._batches) - 1:
                self._between()
            started = now(self._device)
            yield batch
            self.seconds.append(now(self._device) - started)


def text_brewer(
    setting: Setting,
    folder: Path,
    world: World,
    between: Callable[[], None] = lambda: None,
) -> Runner:
    """between: called before each step, and no part of it."""
    device, settings = world.device, optimizer_settings(setting)
    student = OwnView(model_of(setting, folder, "student", world), "student").to(device)
    teachers = [
        Teacher(teacher, name).to(device, setting.dtype)
        for name, teacher in load_teachers(setting, folder, world).items()
    ]
    single = setting.task == "masked-lm"
    kind = _autocast(textbrewer.GeneralDistiller if single else textbrewer.MultiTeacherDistiller)
    optimizer = adamw(student, settings)
    steps = {"num_warmup_steps": 1, "num_training_steps": settings.total_steps}

    def run(batches: list[Batch]) -> Steps:
        # The last batch comes twice: a training ends with a checkpoint, which is no step.
        loader = Clocked([_as_dicts(batch) for batch in [*batches, batches[-1]]], device, between)
        with tempfile.TemporaryDirectory() as output:
            distiller = kind(
                textbrewer.TrainingConfig(device=device, output_dir=output),
                textbrewer.DistillationConfig(
                    temperature=TEMPERATURE, kd_loss_weight=TEMPERATURE**2
                ),
                teachers[0] if single else teachers,
                student,
                _adaptor,
                _adaptor,
            )
            distiller.bf16 = setting.dtype is torch.bfloat16
            with distiller:
                distiller.train(
                    optimizer,
                    loader,
                    num_epochs=1,
                    scheduler_class=get_linear_schedule_with_warmup,
                    scheduler_args=steps,
                    max_grad_norm=Training().max_grad_norm,
                )
        return Steps(
            loader.seconds[: len(batches)],
            float(distiller.first_loss) - _least(distiller, batches[0], teachers),
        )

    return run


def _autocast(kind: Any) -> Any:
    """A distiller that computes in bf16 where it should, and keeps its first loss."""

    class Autocast(kind):
        bf16 = False
        first_loss: torch.Tensor | None = None

        def train_on_batch(self, batch: Any, args: Any) -> Any:
            device = torch.device(self.t_config.device).type
            with torch.autocast(device, torch.bfloat16, self.bf16):
                loss, parts = super().train_on_batch(batch, args)
            if self.first_loss is None:
                # A copy: its training loop divides the loss in place.
                self.first_loss = loss.detach().clone()
            return loss, parts

    return Autocast


def _adaptor(batch: dict[str, Any], output: Any) -> dict[str, torch.Tensor]:
    if "positions" not in batch:
        return {"logits": output.logits}
    return {"logits": output.logits, "logits_mask": batch["positions"]}


def _as_dicts(batch: Batch) -> dict[str, dict[str, Any]]:
    """TextBrewer's form of a batch whose views differ between teachers and student."""
    inputs: dict[str, Any] = {}
    for name, view in batch.views.items():
        assert isinstance(view, PaddedView)
        inputs[name] = view.model_inputs()
        if view.positions is not None:
            mask = torch.zeros(view.input_ids.numel(), dtype=torch.bool)
            mask[view.positions] = True
            inputs["positions"] = mask.view_as(view.input_ids)
    of_student = {name: given for name, given in inputs.items() if name in ("student", "positions")}
    of_teachers = {name: given for name, given in inputs.items() if name != "student"}
    return {"teacher": of_teachers, "student": of_student}


@torch.no_grad()
def _least(distiller: Any, batch: Batch, teachers: list[Teacher]) -> float:
    """TextBrewer's loss of a student that says what the teachers say on average."""
    inputs = _as_dicts(batch.to(distiller.t_config.device))["teacher"]
    outputs = [teacher(**inputs).logits for teacher in teachers]
    target = sum(outputs) / len(outputs)
    if "positions" in inputs:
        target = target[inputs["positions"]]
    target = target.float()
    return TEMPERATURE**2 * float(distiller.kd_loss(target, target, TEMPERATURE))
