"""Where a training stands, and what chose the weights that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_distill.training.setup import Job


@dataclass(frozen=True)
class Progress:
    """Where a training stands; with DeepSpeed's checkpoint it is all that a resume needs."""

    step: int = 0
    best_scores: Mapping[str, float | None] = field(default_factory=dict)
    """Of the weights that are kept, by model; empty without validation."""
    best_epoch: int | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    """What terms measured, as last reported."""
    left_out: int = 0
    """Micro-batches whose loss was not finite."""
    left_out_in_a_row: int = 0
    skipped: int = 0
    """Steps that changed no weight, because a gradient was not finite in fp16."""
    skipped_in_a_row: int = 0

    @property
    def best_score(self) -> float | None:
        return mean_score(self.best_scores)


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
        "split": job.validation.split,
        "examples": job.validation.examples,
        "keep": job.settings.keep,
        "metric": job.validation.metric.name,
        "score": progress.best_scores.get(output),
        **({"mean": progress.best_score} if len(job.outputs) > 1 else {}),
        "epoch": progress.best_epoch,
    }
