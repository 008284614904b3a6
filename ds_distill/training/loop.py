"""The training loop of fine-tuning and distilling: they differ in the bundle alone."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.data.schedule import padding_share, pinned_for, plan_epoch, prefetch, split_batch
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.engine.config import batch_shape
from ds_distill.errors import UserError, located
from ds_distill.files import new_folder
from ds_distill.models.load import save_model
from ds_distill.process.activity import mark_step
from ds_distill.process.signals import Stopped, saves_when_asked, stop_requested
from ds_distill.process.timers import Timers, timed, timed_each, timing
from ds_distill.recipe.phases import training_name
from ds_distill.records import Trained, TrainedModel
from ds_distill.run.events import Bar
from ds_distill.run.inference import damaged_weights, find_in_batches, refusal, save_examples
from ds_distill.run.run import Run
from ds_distill.training.checkpoints import Checkpoints
from ds_distill.training.meter import Meter, progress_note
from ds_distill.training.progress import Progress, choosing, mean_score, why_astray
from ds_distill.training.setup import Job, start_engine
from ds_distill.types import Batch

SAVED = 5
"""Times that a training tells, with the examples in a file, that a step is skipped."""


def train_each(
    number: int,
    trainings: Iterable[Sequence[str]],
    job_of: Callable[[Sequence[str]], Job],
    run: Run,
) -> Trained:
    """Run a phase's trainings, one after the other, without those that are done. Returns the
    phase's record.

    trainings: the names of each one's models. job_of: a training's job, made when its turn comes.
    """
    trained = []
    for outputs in trainings:
        which = number, training_name(outputs), outputs
        done = run.world.from_main(partial(run.folder.finished_training, *which))
        trained += train(job_of(outputs), run) if done is None else done
        gc.collect()  # DeepSpeed's engines are cycles, and the next model wants their memory
    return {"trained": trained}


def train(job: Job, run: Run) -> list[TrainedModel]:
    """Train a bundle's students and put them into the run's folder; continues from the last
    whole checkpoint. Returns what the phase's record says of each."""
    training = _Training(job, run)
    bar_of = run.log.bar(job.name, training.total_steps, training.progress.step)
    with closing(training.engine), saves_when_asked():
        with timing(training.timers), bar_of as bar:
            for epoch in training.epochs_left():
                training.run_epoch(epoch, bar)
        records = training.finish()
    # Since the last step: nothing that follows would look for it.
    asked = torch.tensor(float(stop_requested()), device=run.world.device)
    if run.world.sum(asked) > 0:
        raise Stopped(f"{job.name} trained")
    return records


class _Training:
    """A job's engine, its checkpoints, and where it stands."""

    def __init__(self, job: Job, run: Run) -> None:
        """Continues from the last whole checkpoint, where there is one."""
        settings = job.settings
        self.job, self.run = job, run
        run.peak_memory.begin_training()
        self.steps_per_epoch = -(-len(job.examples) // settings.batch_size)
        self.total_steps = settings.steps or self.steps_per_epoch * settings.epochs
        _, self._micro_steps = batch_shape(settings, run.world.size)
        self.engine = start_engine(job, run, self.total_steps)
        self._checkpoints = Checkpoints(
            run.folder.checkpoints(job.number, job.name), run.world, settings.save_minutes
        )
        saved = self._checkpoints.load(self.engine, Progress)
        self.progress = saved or Progress()
        self._forget_models()
        self._say_where_it_begins()
        if run.observer is None:
            self.timers = Timers(run.world.device)
        else:
            self.timers = run.observer.start(job.key, run.world.device)
        self._meter = Meter(self.timers)
        self._unreported: list[tuple[int, np.ndarray]] = []
        """Steps and their global batches since the last reading of the meter, all of one epoch."""

    def _say_where_it_begins(self) -> None:
        """Of a training that had begun before, whose events after that it drops."""
        job, step = self.job, self.progress.step
        names = {job.name, *job.outputs.values()}
        dropped = [at for name in names for at in self.run.log.forget_after(name, step)]
        last = max(dropped, default=-1)
        if (ahead := self.engine.steps_ahead) > 1:
            self.run.log.info(f"  teachers read the texts of {ahead} steps at once")
        if step:
            begins = f"{job.name}: continues at step {step} of {self.total_steps}"
            again = f"; it had come to step {last}" if last > step else ""
            self.run.log.info(f"  {begins}{again}")
        elif dropped:
            self.run.log.info(
                f"  {job.name}: starts anew, because it was stopped before its first checkpoint, "
                f"at step {last} or soon after. save_every makes them more often."
            )

    def epochs_left(self) -> Iterator[int]:
        """The epochs that are still to do, the last of which may be a part; fewer where patience
        ends first."""
        patience = self.job.settings.patience
        epochs = -(-self.total_steps // self.steps_per_epoch)
        for epoch in range(self.progress.step // self.steps_per_epoch, epochs):
            best = self.progress.best_epoch
            if patience is not None and best is not None and epoch - 1 - best >= patience:
                self.run.log.info(
                    f"  {self.job.name}: ends at step {self.progress.step} of "
                    f"{self.total_steps}, after {patience} epochs without a better score"
                )
                return
            yield epoch

    def run_epoch(self, epoch: int, bar: Bar) -> None:
        """The steps of an epoch that are still to do. Of a window in which a stop was, teachers
        read the texts of all steps again: what they say depends, in the last digits, on what they
        read together."""
        done = self.progress.step
        windows = [window for window in self._windows(epoch) if window[-1][0] >= done]
        ready = prefetch(lambda window: [self._collate(epoch, step) for step in window], windows)
        for window, batches in zip(windows, timed_each("data", ready), strict=True):
            mark_step(max(window[0][0], done))
            of_steps = zip(window, self.engine.read_ahead(batches), strict=True)
            for step, micro_batches in of_steps:
                if step[0] >= done:
                    self._train_step(epoch, step, micro_batches, bar)

    def _train_step(
        self, epoch: int, step: tuple[int, np.ndarray], micro_batches: list[Batch], bar: Bar
    ) -> None:
        number, batch = step
        mark_step(number)
        wishes = stop_requested(), self._checkpoints.is_due()
        losses = self.engine.train_step(micro_batches, wishes)
        self.progress = replace(self.progress, step=number + 1)
        self._count_skipped(step)
        self._meter.add(losses, self.job.collate.lengths[batch])
        self._unreported.append(step)
        self._after_step(epoch, bar)
        if self.run.observer is not None:
            self.run.observer.after_step()

    def _windows(self, epoch: int) -> list[list[tuple[int, np.ndarray]]]:
        """An epoch's steps, by number and global batch, in windows whose texts live teachers read
        at once; they begin at the same steps whatever is done of them."""
        windows: list[list[tuple[int, np.ndarray]]] = []
        needed = None
        for step in enumerate(self._batches(epoch), epoch * self.steps_per_epoch):
            needs = self.job.bundle.needs_teachers(step[0] / self.total_steps)
            if needs != needed or len(windows[-1]) == self.engine.steps_ahead:
                windows.append([])
            windows[-1].append(step)
            needed = needs
        return windows

    def _batches(self, epoch: int) -> list[np.ndarray]:
        """Global batches of an epoch; announces one that begins."""
        job, step = self.job, self.progress.step
        lengths, seed = job.collate.lengths, self.run.recipe.seed
        plan = plan_epoch(lengths, job.examples.keys, job.settings.batch_size, seed, epoch)
        first = epoch * self.steps_per_epoch
        plan = plan[: self.total_steps - first]
        # An epoch that a kill interrupted is announced once.
        if step == first and self.run.world.is_main:
            share = padding_share(lengths, plan, self._micro_steps * self.run.world.size)
            share = round(share, 4)
            self.run.log.event("epoch", phase=job.name, step=step, epoch=epoch, padding_share=share)
        return plan

    def _collate(self, epoch: int, step: tuple[int, np.ndarray]) -> list[Batch]:
        """This rank's micro-batches of a step's global batch."""
        world, (number, batch) = self.run.world, step
        progress = number / self.total_steps
        signals = self.job.bundle.needs_teachers(progress)
        shares = split_batch(batch, self._micro_steps, world.size, world.rank)
        micro_batches = [
            pinned_for(world.device, self.job.collate(share, epoch, progress, signals=signals))
            for share in shares
        ]
        if self.run.observer is not None:
            self.run.observer.batches(self.job.key, number, micro_batches)
        return micro_batches

    def _after_step(self, epoch: int, bar: Bar) -> None:
        """Report, validate and save where a step is one for it."""
        step, every = self.progress.step, self.job.settings.save_every
        epoch_ends = step in ((epoch + 1) * self.steps_per_epoch, self.total_steps)
        stops, is_due = self.engine.wished()
        stops = stops and step < self.total_steps
        saves = (epoch_ends and step < self.total_steps) or (
            every is not None and step % every == 0
        )
        saves = saves or stops or is_due
        bar.advance()
        # Also before a checkpoint: a resumed run then takes its means over the same steps.
        if step % self.run.recipe.logging.every == 0 or epoch_ends or saves:
            with timed("report"):
                self._report(epoch, bar)
        if epoch_ends:
            with timed("validation"):
                self._validate(epoch)
        if saves:
            with timed("checkpoint"):
                self._checkpoints.save(self.engine, step, asdict(self.progress))
                self._forget_models()
        if stops:
            raise Stopped(f"a checkpoint of {self.job.name} at step {step}")

    def _report(self, epoch: int, bar: Bar) -> None:
        """Means since the last report. Raises UserError where the loss is not finite."""
        values, timing = self._meter.read(self.run.world)
        if not math.isfinite(values["loss"]):
            raise self._astray(epoch, values["loss"])
        self._unreported.clear()
        measured = {name: value for name, value in values.items() if "." in name}
        measures = {**self.progress.measures, **measured}
        self.progress = replace(self.progress, measures=measures)
        step, rate = self.progress.step, self.engine.learning_rate
        about: dict[str, Any] = {**values, **timing}
        if scale := self.engine.loss_scale:
            about["loss_scale"] = scale.value
        if scale or self.progress.skipped:
            about["skipped"] = self.progress.skipped
            about["schedule"] = "planned steps"  # skipped ones among them
        self.run.log.event("train", phase=self.job.name, step=step, learning_rate=rate, **about)
        bar.advance(0, progress_note(values, rate, self.run.world))

    def _astray(self, epoch: int, loss: float) -> UserError:
        """Why a loss is not finite: looks at the batches since the last one that was."""
        job, run = self.job, self.run
        batches = (micro for step in self._unreported for micro in self._collate(epoch, step))
        if found := find_in_batches(self.engine, batches):
            return refusal(run, [job.settings.split], found)
        for start in job.starts.values():
            if damaged := damaged_weights(run, start):
                return damaged
        at, terms = self._meter.first_not_finite(run.world)
        number, batch = self._unreported[at]
        file = self._save_examples(number, batch)
        return UserError(
            f"{job.name}: the loss is {loss} at step {number + 1} ({', '.join(terms)}). {file} "
            "has the examples of that step. Training went astray: set a lower learning_rate than "
            f"{job.settings.learning_rate}, or a longer warmup"
            + (", or compute in bf16 or fp32 (deepspeed)." if self.engine.loss_scale else ".")
        )

    def _count_skipped(self, step: tuple[int, np.ndarray]) -> None:
        """Raises UserError where DeepSpeed skips every step: a gradient is not finite. In fp16 that
        finds the loss scale; otherwise the first ones are told, with their examples."""
        number, batch = step
        scale, progress = self.engine.loss_scale, self.progress
        if not self.engine.was_step_skipped:
            self.progress = replace(progress, skipped_in_a_row=0)
            return
        self.progress = progress = replace(
            progress,
            skipped=progress.skipped + 1,
            skipped_in_a_row=progress.skipped_in_a_row + 1,
        )
        what = f"{self.job.name}: gradients are not finite"
        if scale is None and progress.skipped <= SAVED:
            file = self._save_examples(number, batch)
            self.run.log.info(
                f"  {what} at step {number + 1}, where the loss is, and the step is skipped. "
                f"{file} has its examples."
            )
        if why := why_astray(progress, scale):
            rate = self.job.settings.learning_rate
            raise UserError(f"{what} {why}set a lower learning_rate than {rate}.")

    def _save_examples(self, number: int, batch: np.ndarray) -> Path:
        """Write the examples of a step's global batch into a file. Every rank may call it."""
        job, run = self.job, self.run
        file = run.folder.path / f"not-finite-{job.name}-step-{number + 1}.jsonl"
        save_examples(run, job.settings.split, job.examples.keys[torch.from_numpy(batch)], file)
        return file

    def _validate(self, epoch: int) -> None:
        """Validation at the end of an epoch; the weights of the epoch with the best score in the
        task's metric are kept, of several models those with the best mean."""
        job, run, progress = self.job, self.run, self.progress
        if job.validation is None:
            return
        phase = run.recipe.phase_names()[job.number]
        with located(f"phase {phase}, split {CHOOSING_SPLIT}"):
            of_all = job.validation.score(self.engine)
        metric, best = job.validation.metric, progress.best_score
        found = {}
        for name, scores in of_all.items():
            output = job.outputs[name]
            run.log.event("validation", phase=output, step=progress.step, epoch=epoch, **scores)
            found[output] = scores[metric.name]
        is_best = best is None or metric.is_better(mean_score(found), best)
        keeps_best = job.settings.keep != "last"
        for output, score in found.items():
            of_kept = ", the best so far" if keeps_best and is_best and best is not None else ""
            run.log.info(
                f"  {output}: {metric.title} {metric.shown_as(score)} on {CHOOSING_SPLIT} "
                f"after epoch {epoch + 1}{of_kept}"
            )
        if keeps_best:
            if not is_best:
                return
            self._keep_weights(epoch)
        self.progress = replace(progress, best_scores=found, best_epoch=epoch)

    def _forget_models(self) -> None:
        """Remove kept models that no checkpoint names: of epochs that were bettered, or that a kill
        cut off."""
        if self.run.world.is_main:
            named = [one.best_epoch for one in self._checkpoints.progress_of_each(Progress)]
            best = [epoch for epoch in named if epoch is not None]
            self.run.folder.forget_models(self.job.number, self.job.name, best)

    def _keep_weights(self, epoch: int) -> None:
        """Write the students as transformers would, aside, to be published when training ends."""
        job, run = self.job, self.run
        for name, output in job.outputs.items():
            weights = self.engine.student_weights(name)
            if not run.world.is_main:
                continue
            with new_folder(run.folder.kept(job.number, job.name, epoch) / output) as folder:
                save_model(job.bundle.students[name], weights, folder)
                start, of_words = job.starts[name], run.task.of_words
                tokenizer = load_tokenizer(start.model, start.revision, of_words=of_words)
                tokenizer.save_pretrained(folder)
        run.world.barrier()

    def _memory(self) -> dict[str, int]:
        """The most bytes that torch had allocated on the GPU of this rank, since it began, and how
        many were planned."""
        run, found = self.run, {"planned_bytes": self.run.planned_bytes.get(self.job.key)}
        if run.world.device.type == "cuda":
            found["peak_bytes"] = run.peak_memory.of_training() or 0
        return {key: value for key, value in found.items() if value is not None}

    def finish(self) -> list[TrainedModel]:
        """Publish the trained models. Returns the phase's record of each."""
        job, run = self.job, self.run
        epoch = self.progress.best_epoch
        if epoch is None or job.settings.keep == "last":
            epoch = (self.progress.step - 1) // self.steps_per_epoch
            self._keep_weights(epoch)
        together, memory = list(job.outputs.values()), self._memory()
        records: dict[str, Any] = {
            output: {
                "output": output,
                **({"together": together} if len(together) > 1 else {}),
                "split": job.settings.split,
                **job.examples.counts,
                **({"pairs": True} if job.examples.pairs else {}),
                "steps": self.progress.step,
                "choosing": choosing(job, self.progress, output),
                **({"measures": self.progress.measures} if self.progress.measures else {}),
                **({"skipped": self.progress.skipped} if self.progress.skipped else {}),
                **memory,
            }
            for output in together
        }
        if run.world.is_main:
            run.folder.publish_models(job.number, job.name, epoch, records)
        run.world.barrier()
        if run.observer is not None:
            run.observer.end()
        mark_step(None)
        return list(records.values())
