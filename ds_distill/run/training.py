"""The training loop of fine-tuning and distilling: they differ in the bundle alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ds_distill.data.batches import Collator, Examples
from ds_distill.data.plan import padding_share, plan_epoch, split_batch
from ds_distill.data.prefetch import prefetch
from ds_distill.engine.config import batch_shape
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.errors import UserError
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import load_tokenizer
from ds_distill.models.load import save_model
from ds_distill.parts.phases.base import TrainingPhase
from ds_distill.run.checkpoints import Checkpoints
from ds_distill.run.context import ModelReference, Run
from ds_distill.run.not_finite import damaged_weights, find_in_batches, refusal
from ds_distill.run.validation import Validation
from ds_distill.types import Batch

WARM_UP_STEPS = 5
"""First steps of a process, left out of throughput: caches and allocators are cold."""


@dataclass(frozen=True)
class Job:
    """One model to train."""

    number: int
    output: str
    settings: TrainingPhase
    bundle: Bundle
    start: ModelReference
    """Where the student comes from: its tokenizer goes with the trained model."""
    examples: Examples
    collate: Collator
    validation: Validation | None
    """None where the data have no validation split."""


@dataclass(frozen=True)
class Progress:
    """Where a training stands; with DeepSpeed's checkpoint it is all that a resume needs."""

    step: int = 0
    best_accuracy: float | None = None
    best_epoch: int | None = None


def train(job: Job, run: Run) -> dict[str, Any]:
    """Train a bundle's student and put it into the run's folder; continues from the last
    whole checkpoint. Returns what the phase's record says of it."""
    settings, world, log = job.settings, run.world, run.log
    epochs = settings.epochs
    steps_per_epoch = -(-len(job.examples) // settings.batch_size)
    total_steps = steps_per_epoch * epochs
    _, micro_steps = batch_shape(settings, world.size)
    engine = start_engine(job, run, total_steps)
    checkpoints = Checkpoints(run.folder.checkpoints(job.number, job.output), world)
    saved = checkpoints.load(engine)
    progress = Progress(**saved) if saved else Progress()
    log.forget_after(job.output, progress.step)
    if saved:
        log.info(f"  {job.output}: continues at step {progress.step} of {total_steps}")
    meter = _Meter()

    def collated(epoch: int, batch: np.ndarray) -> list[Batch]:
        shares = split_batch(batch, micro_steps, world.size, world.rank)
        return [job.collate(share, epoch) for share in shares]

    with log.bar(job.output, total_steps) as bar:
        bar.advance(progress.step)
        for epoch in range(progress.step // steps_per_epoch, epochs):
            plan = plan_epoch(
                job.collate.lengths,
                job.examples.keys,
                settings.batch_size,
                run.recipe.seed,
                epoch,
            )
            todo = plan[progress.step - epoch * steps_per_epoch :]
            if len(todo) == len(plan):  # an epoch that a kill interrupted is announced once
                share = padding_share(job.collate.lengths, plan, micro_steps * world.size)
                log.event(
                    "epoch",
                    phase=job.output,
                    step=progress.step,
                    epoch=epoch,
                    padding_share=round(share, 4),
                )
            ready = prefetch(partial(collated, epoch), todo)
            since: list[np.ndarray] = []
            for batch, micro_batches in zip(todo, ready, strict=True):
                since.append(batch)
                losses = engine.train_step(micro_batches)
                progress = replace(progress, step=progress.step + 1)
                meter.add(losses, job.collate.lengths[batch])
                epoch_ends = progress.step == (epoch + 1) * steps_per_epoch
                saves = (epoch_ends and progress.step < total_steps) or (
                    settings.save_every is not None and progress.step % settings.save_every == 0
                )
                # Also before a checkpoint: a resumed run then takes its means over the same steps.
                if progress.step % run.recipe.logging.every == 0 or epoch_ends or saves:
                    values = meter.read(world)
                    if not math.isfinite(values["loss"]):
                        again = (micro for step in since for micro in collated(epoch, step))
                        raise _astray(job, run, engine, progress.step, values["loss"], again)
                    since.clear()
                    log.event(
                        "train",
                        phase=job.output,
                        step=progress.step,
                        learning_rate=engine.learning_rate,
                        **values,
                    )
                    bar.advance(0, f"loss {values['loss']:.4f}")
                bar.advance()
                if epoch_ends:
                    progress = _validate(job, run, engine, progress, epoch)
                if saves:
                    checkpoints.save(engine, progress.step, asdict(progress))
    if job.validation is None or settings.keep == "last":
        _keep_weights(job, run, engine)
    record = {
        "output": job.output,
        "split": settings.split,
        "examples": len(job.examples),
        "steps": total_steps,
        "choosing": _choosing(job, progress),
    }
    if world.is_main:
        run.folder.publish_model(job.number, job.output, record)
    world.barrier()
    engine.close()
    return record


def _astray(
    job: Job, run: Run, engine: Engine, step: int, loss: float, batches: Iterable[Batch]
) -> UserError:
    """Why a loss is not finite. batches: this rank's since the last one that was."""
    if found := find_in_batches(engine, batches):
        return refusal(run, [job.settings.split], found)
    return damaged_weights(run, job.start) or UserError(
        f"{job.output}: the loss is {loss} by step {step}. Training went astray: set a lower "
        f"learning_rate than {job.settings.learning_rate}, or a longer warmup."
    )


def start_engine(job: Job, run: Run, total_steps: int) -> Engine:
    """A job's engine at its first step."""
    settings = job.settings
    torch.manual_seed(run.recipe.seed + run.world.rank)  # dropout differs between ranks
    return Engine(
        job.bundle,
        run.deepspeed(settings),
        run.world,
        OptimizerSettings(
            settings.learning_rate,
            settings.weight_decay,
            total_steps,
            round(settings.warmup * total_steps),
        ),
        student_resident=run.recipe.student_resident,
    )


def _validate(job: Job, run: Run, engine: Engine, progress: Progress, epoch: int) -> Progress:
    """Validation at the end of an epoch; the weights of the epoch with the best accuracy are
    kept."""
    if job.validation is None:
        return progress
    scores = job.validation.score(engine)
    run.log.event("validation", phase=job.output, step=progress.step, epoch=epoch, **scores)
    result = scores["accuracy"]
    keep_last = job.settings.keep == "last"
    if not keep_last and (progress.best_accuracy is None or result > progress.best_accuracy):
        _keep_weights(job, run, engine)
    elif not keep_last:
        return progress
    return replace(progress, best_accuracy=result, best_epoch=epoch)


def _choosing(job: Job, progress: Progress) -> dict[str, Any] | None:
    """The examples that chose the epoch, and will choose the student to ship, with the accuracy on
    them: of what was chosen by it, so no measure of the model."""
    if job.validation is None:
        return None
    return {
        "split": job.validation.split,
        "examples": job.validation.examples,
        "keep": job.settings.keep,
        "accuracy": progress.best_accuracy,
        "epoch": progress.best_epoch,
    }


def _keep_weights(job: Job, run: Run, engine: Engine) -> None:
    """Write the student as transformers would, aside, to be published when training ends."""
    weights = engine.student_weights()
    if run.world.is_main:
        assert job.bundle.student is not None
        with run.folder.new_model(job.number, job.output) as folder:
            save_model(job.bundle.student, weights, folder)
            load_tokenizer(job.start.model, job.start.revision).save_pretrained(folder)
    run.world.barrier()


class _Meter:
    """Losses and speed between two events."""

    def __init__(self) -> None:
        self._steps = 0
        self._reset()

    def _reset(self) -> None:
        self._losses: dict[str, torch.Tensor] = {}
        self._counted = self._examples = self._tokens = 0
        self._started = time.perf_counter()
        self._since = 0

    def add(self, losses: dict[str, torch.Tensor], lengths: np.ndarray) -> None:
        """losses: this rank's shares of one step; lengths: of the global batch's examples."""
        self._steps += 1
        self._since += 1
        for name, loss in losses.items():
            self._losses[name] = self._losses.get(name, torch.zeros_like(loss)) + loss
        if self._steps == WARM_UP_STEPS:
            self._started, self._examples, self._tokens = time.perf_counter(), 0, 0
        elif self._steps > WARM_UP_STEPS:
            self._examples += len(lengths)
            self._tokens += int(lengths.sum())

    def read(self, world: Any) -> dict[str, float]:
        """Means since the last reading: the only place that waits for the device."""
        names = list(self._losses)
        totals = world.sum(torch.stack([self._losses[name] for name in names])) / self._since
        values = dict(zip(names, totals.tolist(), strict=True))
        seconds = time.perf_counter() - self._started
        if self._examples:
            values["examples_per_second"] = round(self._examples / seconds, 1)
            values["tokens_per_second"] = round(self._tokens / seconds, 1)
        self._reset()
        return values
