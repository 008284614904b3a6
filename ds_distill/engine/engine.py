"""The DeepSpeed engine of a bundle."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import ds_distill.engine.accelerator  # noqa: F401  # isort: skip  (before deepspeed)
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import get_scheduler

from ds_distill.engine.config import trains_alone, zero_stage
from ds_distill.engine.internals import (
    Traces,
    forget,
    spare_stage_0,
    step_alone,
    trust_the_norm,
    whole_copies,
)
from ds_distill.engine.placement import fit_bucket, stage3_config
from ds_distill.engine.precision import is_half, model_dtype
from ds_distill.engine.training_state import (
    random_state,
    read_training_state,
    set_random_state,
    write_training_state,
)
from ds_distill.engine.world import World, no_chatter
from ds_distill.models.active_weights import Rest, WeightGroup, frozen_weights, weight_groups
from ds_distill.models.bundle import Bundle
from ds_distill.models.load import checkpoint_activations
from ds_distill.process.timers import timed
from ds_distill.types import Batch, Signals

STATE = "training.safetensors"
"""A checkpoint's file of what is trained."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with linear warm-up, and decay to 0 by a `schedule` of transformers."""

    learning_rate: float
    weight_decay: float
    total_steps: int
    warmup_steps: int
    beta2: float = 0.999
    epsilon: float = 1e-8
    schedule: str = "linear"

    def scheduler(self, adamw: torch.optim.Optimizer) -> Any:
        return get_scheduler(self.schedule, adamw, self.warmup_steps, self.total_steps)


@dataclass(frozen=True)
class LossScale:
    value: float
    least: float | None
    """DeepSpeed lowers it to that; None for a fixed one."""


class Engine:
    """Trains a bundle's student, or only runs its models forward."""

    def __init__(
        self,
        bundle: Bundle,
        config: dict[str, Any],
        world: World,
        optimizer: OptimizerSettings | None = None,
        *,
        student_resident: bool = True,
        together: int | None = None,
    ) -> None:
        """
        config: from `deepspeed_config`.
        optimizer: None for an engine that only runs inference.
        student_resident: with stage 3, keep the student whole on each rank.
        together: micro-batches that live teachers read at once, see `micro_batches_together`;
            None: those of a step.
        """
        self.bundle = bundle
        self.world = world
        self._stage = zero_stage(config)
        self._micro_steps = int(config["gradient_accumulation_steps"])
        self._together = together or self._micro_steps
        self.steps_ahead = max(1, self._together // self._micro_steps) if bundle.teachers else 1
        """Optimizer steps whose texts live teachers read at once, by `read_ahead`."""
        self._optimizer = optimizer
        self._traces: Traces | None = None
        self._wishes_are_here: torch.cuda.Event | None = None
        self._frozen = frozen_weights(bundle) if optimizer and is_half(config) else {}
        if optimizer is None and self._stage != 3:
            # Nothing to shard or to step; DeepSpeed would add an fp32 copy of models in bf16.
            self._engine: Any = bundle.to(world.device, model_dtype(config))
            return
        if self._stage == 3:
            config = stage3_config(
                config, bundle, trains=optimizer is not None, student_resident=student_resident
            )
        if optimizer is not None:
            self._prepare(config)
        alone = optimizer is not None and trains_alone(config, world.size)
        looks = self._stage > 0 or is_half(config)  # as DeepSpeed does
        if alone:
            config = {**config, "zero_optimization": {"stage": 0}}
        trained = [p for p in bundle.parameters() if p.requires_grad]
        with no_chatter():
            self._engine, *_ = deepspeed.initialize(
                model=bundle,
                model_parameters=trained or None,
                optimizer=self._adamw(optimizer) if optimizer else None,
                lr_scheduler=optimizer.scheduler if optimizer else None,
                config=fit_bucket(config, trained),
                dist_init_required=False,
            )
        if self._stage == 3:
            self._traces = self._sharded()
        elif alone:
            step_alone(self._engine, self._groups, looks=looks)
        elif optimizer is not None:
            trust_the_norm(self._engine.optimizer)
            if self._stage == 0:
                spare_stage_0(self._engine, trained)

    def _adamw(self, settings: OptimizerSettings) -> torch.optim.Optimizer:
        starts, groups = weight_groups(self.bundle)
        self._groups = [group.weights for group in groups]
        adamw = _adamw(groups, settings)
        self._rest = Rest(adamw, starts)
        return adamw

    def _sharded(self) -> Traces:
        """What DeepSpeed leaves to be done beside sharded weights."""
        # It moves no buffers. Not before it: `_adamw` runs the student where its weights are.
        for buffer in self.bundle.buffers():
            buffer.data = buffer.data.to(self.world.device)
        return Traces(self._engine.optimizer)

    def _prepare(self, config: dict[str, Any]) -> None:
        """What DeepSpeed leaves to be done with what is trained."""
        if self._stage == 3:
            # It takes a module with sharded teachers for one that is in its dtype already, and
            # would leave the student in fp32.
            for module in self.bundle.trained:
                module.to(model_dtype(config))
        if config.get("activation_checkpointing"):
            for student in self.bundle.students.values():
                checkpoint_activations(student)

    @property
    def learning_rate(self) -> float:
        return float(self._engine.get_lr()[0])

    @property
    def loss_scale(self) -> LossScale | None:
        """What DeepSpeed multiplies losses by, so that their gradients do not vanish in fp16; None
        in bf16 and fp32."""
        if not self._engine.fp16_enabled():
            return None
        scaler = self._engine.optimizer.loss_scaler
        least = float(scaler.min_scale) if scaler.dynamic else None
        return LossScale(float(scaler.cur_scale), least)

    @property
    def was_step_skipped(self) -> bool:
        """Whether the last step changed no weight, because a gradient was not finite. DeepSpeed
        looks in fp16 and bf16, and in fp32 from stage 1 on."""
        return not self._engine.was_step_applied()

    def train_step(
        self, micro_batches: list[Batch], wishes: Sequence[bool] = ()
    ) -> dict[str, torch.Tensor]:
        """One optimizer step over this rank's micro-batches.

        wishes: of this rank, see `wished`.

        Returns this rank's share of `loss` and of each term, on the device; their sum over
        ranks is the mean over the step's rows.
        """
        assert len(micro_batches) == self._micro_steps
        self._to_train()
        self._rest.at(micro_batches[0].progress)
        total: dict[str, torch.Tensor] = {}
        for batch in self._signalled(self._moved(micro_batches, wishes)):
            parts = self._forward("step", batch)
            # DeepSpeed averages gradients over ranks. Rows are already divided by their number
            # over all ranks, so the factor turns the average into a sum.
            with timed("backward"):
                self._engine.backward(parts["loss"] * self.world.size, scale_wrt_gas=False)
            with timed("optimizer"):
                self._engine.step()
            for name, part in parts.items():
                own = part.detach().float()
                total[name] = total[name] + own if name in total else own
        if self.was_step_skipped:
            # DeepSpeed's schedule would wait, and end above 0: this one goes by planned steps.
            with warnings.catch_warnings():  # torch's, where the first steps are skipped
                warnings.simplefilter("ignore", UserWarning)
                self._engine.lr_scheduler.step()
        return total

    def _to_train(self) -> None:
        if not self.bundle.training:  # after `predict`; it visits every module
            self._engine.train()

    def read_ahead(self, steps: list[list[Batch]]) -> list[list[Batch]]:
        """The micro-batches of some optimizer steps, at most `steps_ahead`, with what live teachers
        say of them, where more than one step is read at once. Teachers are frozen: they may read a
        text before the step that learns from it. Every rank must call this with as many."""
        first = steps[0][0]
        if self.steps_ahead == 1 or first.signals or not self.bundle.needs_teachers(first.progress):
            return steps
        self._to_train()
        moved = [[batch.to(self.world.device) for batch in step] for step in steps]
        signals = iter(self._teachers_read([batch for step in moved for batch in step]))
        return [[replace(batch, signals=next(signals)) for batch in step] for step in moved]

    def _teachers_read(self, batches: list[Batch]) -> list[dict[str, Signals]]:
        """What live teachers say of each of some micro-batches, in one pass."""
        with torch.no_grad():
            return cast(list[dict[str, Signals]], self._forward("teachers", batches))

    def _forward(self, kind: Hashable, batch: Batch | list[Batch], **options: Any) -> Any:
        """A pass through the bundle; see `Bundle.forward`. kind: see `Traces`."""
        if self._traces is not None:
            self._traces.turn_to(kind)
        if isinstance(batch, Batch):  # not before, and not held beyond the backward pass
            batch = batch.decoded(self.world.device)
        with timed("deepspeed"):  # what is neither of the models' passes nor of the loss
            return self._engine(batch=batch, **options)

    def _signalled(self, micro_batches: list[Batch]) -> Iterator[Batch]:
        """The micro-batches with what live teachers say of them, as if it were cached. They run
        once for as many as have TOKENS_AT_ONCE, just before the first of these: a pass of theirs
        costs the same Python whatever it reads, and at stage 3 gathers all their weights.

        A masked-LM teacher's last layer, over the vocabulary, is left to the loss: the logits of a
        step would not fit.
        """
        first, bundle = micro_batches[0], self.bundle
        alive = self._together > 1 and bundle.teachers and not first.signals
        if not alive or not bundle.needs_teachers(first.progress):
            yield from micro_batches
            return
        for start in range(0, len(micro_batches), self._together):
            some = micro_batches[start : start + self._together]
            signals = self._teachers_read(some)
            for batch in some:
                yield replace(batch, signals=signals.pop(0))

    def predict(
        self, batch: Batch, models: Iterable[str], layers: Iterable[int] = ()
    ) -> dict[str, Signals]:
        """Run models of the bundle without gradients: logits float32 [n, C] and the states of
        `layers`, on the device. Every rank must call this with the same models at the same
        time."""
        if self.bundle.training:  # it visits every module
            self._engine.eval()
        models = tuple(models)
        with torch.no_grad():
            predictions = self._forward(
                models, batch.to(self.world.device), predict=models, layers=tuple(layers)
            )
        return {
            name: replace(outputs, output=outputs.logits.float())
            for name, outputs in predictions.items()
        }

    def wished(self) -> list[bool]:
        """Of each of the last step's `wishes` whether a rank had it: the same on all ranks."""
        if self._wishes_are_here is not None:
            self._wishes_are_here.synchronize()
        return [number > 0 for number in self._wished.tolist()]

    def _moved(self, micro_batches: list[Batch], wishes: Sequence[bool]) -> list[Batch]:
        """The micro-batches on the device, with the row counts of the whole optimizer step, which
        are known before its first backward. With them go wishes: no collective of their own."""
        names = list(micro_batches[0].row_sets)
        numbers = [sum(len(batch.row_sets[name]) for batch in micro_batches) for name in names]
        counts, on_gpu = torch.tensor([*numbers, *wishes]).float(), self.world.device.type == "cuda"
        if on_gpu:
            counts = counts.pin_memory()  # else the copy waits for the device
        counts = self.world.sum(counts.to(self.world.device, non_blocking=True))
        counts, wished = counts[: len(names)], counts[len(names) :]
        self._wished = torch.empty(len(wishes), pin_memory=on_gpu)
        self._wished.copy_(wished, non_blocking=True)
        if on_gpu:  # what is behind it on the stream is not waited for
            self._wishes_are_here = torch.cuda.Event()
            self._wishes_are_here.record()
        shared = dict(zip(names, counts, strict=True))
        return [batch.moved(self.world.device, shared) for batch in micro_batches]

    # ------------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write optimizer, schedule, trained weights and random state of all ranks into a folder
        that is there.

        Frozen weights are left out. Every rank must call this.
        """
        write_training_state(self._engine, self.bundle, folder / STATE, self.world.is_main)
        save_file(random_state(self.world.device), self._random_file(folder))
        self.world.barrier()

    def load(self, folder: Path) -> None:
        """Load what `save` wrote, with any number of ranks and at any stage. A rank that was not
        there then goes on with its own random state. The highest learning rate is this engine's
        own."""
        steps = read_training_state(self._engine, self.bundle, folder / STATE)
        if self._random_file(folder).is_file():
            set_random_state(load_file(self._random_file(folder)), self.world.device)
        assert self._optimizer is not None
        rate, scheduler = self._optimizer.learning_rate, self._engine.lr_scheduler
        scheduler.last_epoch = steps
        scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
        groups = self._engine.optimizer.param_groups
        for group, factor in zip(groups, scheduler.lr_lambdas, strict=True):
            group.update(initial_lr=rate, lr=rate * factor(steps))
        scheduler._last_lr = [group["lr"] for group in groups]

    def _random_file(self, folder: Path) -> Path:
        return folder / f"random-rank{self.world.rank:05d}.safetensors"

    def student_weights(self, name: str = "student") -> dict[str, torch.Tensor]:
        """A student's state dict in fp32 on the CPU of rank 0 (others get an empty one).

        Trained weights come from the optimizer's fp32 copy, frozen ones are as they were loaded.
        Every rank must call this.
        """
        student = self.bundle.students[name]
        weights: dict[str, torch.Tensor] = {}
        whole = whole_copies(self._engine)
        for name, parameter in student.named_parameters(remove_duplicate=False):
            value = self._frozen.get(parameter)
            if parameter.requires_grad:
                value = whole.get(parameter)
                if value is None:
                    value = safe_get_full_fp32_param(parameter)
            if value is None:
                value = self._whole(parameter)
            if self.world.is_main:
                weights[name] = value.detach().float().cpu().clone()
        if self.world.is_main:
            state = student.state_dict()
            parameters = set(weights)
            weights.update(
                {k: v.cpu() for k, v in state.items() if k not in parameters and v.numel()}
            )
        return weights

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        with deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3):
            return parameter.detach().clone()

    def close(self) -> None:
        """End the engine; another one can be started after it. Its memory is free once nobody holds
        its bundle, and Python has collected cycles (`gc.collect`)."""
        if isinstance(self._engine, deepspeed.DeepSpeedEngine):
            self._engine.destroy()
            forget(self.bundle)


def _adamw(groups: list[WeightGroup], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, as usual for transformers."""
    return torch.optim.AdamW(
        [
            {
                "params": group.weights,
                "weight_decay": settings.weight_decay if group.decays else 0.0,
                "learns": group.learns,
            }
            for group in groups
        ],
        lr=settings.learning_rate,
        betas=(0.9, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
