"""Where a training stands, and what chose the weights that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.engine.engine import LossScale
from ds_distill.training.setup import Job

IN_A_ROW = 10
"""Steps skipped in bf16 and fp32, one after the other at which a training has gone astray."""
SKIPPED_IN_A_ROW = 50
"""Likewise of steps skipped in fp16. From the largest loss scale, 2^32, DeepSpeed finds one that
fits within 34."""


@dataclass(frozen=True)
class Progress:
    """Where a training stands; with DeepSpeed's checkpoint it is all that a resume needs."""

    step: int = 0
    best_scores: Mapping[str, float | None] = field(default_factory=dict)
    """Of the weights that are kept, by model; empty without validation."""
    best_epoch: int | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    """What terms measured, as last reported."""
    skipped: int = 0
    """Steps that changed no weight, because a gradient was not finite."""
    skipped_in_a_row: int = 0

    @property
    def best_score(self) -> float | None:
        return mean_score(self.best_scores)


def why_astray(progress: Progress, scale: LossScale | None) -> str | None:
    """Why a training whose gradients are not finite has gone astray, before what to do; None where
    it may go on. scale: in fp16."""
    count, most = progress.skipped_in_a_row, SKIPPED_IN_A_ROW if scale else IN_A_ROW
    # At its least DeepSpeed would raise an error of its own in the next such step.
    if count < most and (scale is None or scale.value > (scale.least or 0.0)):
        return None
    why = ", where the loss is. A loss of your own may divide by 0 or take its root; otherwise "
    if scale is not None:
        why = f", with a loss scale of {scale.value:g}. Compute in bf16 or fp32 (deepspeed), or "
    return f"in {count} steps one after the other, the last of them step {progress.step}{why}"


def mean_score(scores: Mapping[str, float | None]) -> float | None:
    """By which the epoch of models that are trained together is chosen; None where a score is not
    defined, or there is none."""
    known = [score for score in scores.values() if score is not None]
    return sum(known) / len(known) if known and len(known) == len(scores) else None


def choosing(job: Job, progress: Progress, output: str) -> dict[str, Any] | None:
    """The examples that chose the epoch, and will choose the student to ship, with the score on
    them: of what was chosen by it, so no measure of the model."""
    if job.validation is None:
        return None
    return {
        "split": CHOOSING_SPLIT,
        **job.validation.counts,
        "keep": job.settings.keep,
        "metric": job.validation.metric.name,
        "score": progress.best_scores.get(output),
        **({"mean": progress.best_score} if len(job.outputs) > 1 else {}),
        "epoch": progress.best_epoch,
    }
