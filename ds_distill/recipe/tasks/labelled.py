"""What the settings of tasks with labels have."""

from __future__ import annotations

from typing import ClassVar

from pydantic import field_validator

from ds_distill.recipe.tasks.base import Predicts, Rows, TaskSettings


class LabelledTask(TaskSettings):
    """A task of texts, or pairs of texts, with labels."""

    rows: ClassVar[Rows] = "text"
    predicts: ClassVar[Predicts] = "class"

    labels: list[str] | None = None
    """Label names in the order of the class ids. Default: what the data declare
    (labels.json in the folder, the hub's features), else the sorted names in train."""

    @property
    def given_labels(self) -> list[str] | None:
        return self.labels or super().given_labels

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: list[str] | None) -> list[str] | None:
        if labels is not None:
            if len(labels) < 2:
                raise ValueError("needs at least two labels")
            repeated = {label for label in labels if labels.count(label) > 1}
            if repeated:
                raise ValueError(f"label {sorted(repeated)[0]!r} stands twice")
        return labels


def classifier_usage(task: LabelledTask, pairs: bool, *, all_scores: bool = False) -> list[str]:
    """Lines of Python that classify a text with a student in its folder.

    pairs: two texts instead.
    all_scores: of all labels, instead of the likeliest.
    """
    scores = "top_k=None, " if all_scores else ""
    return [
        'classify = pipeline("text-classification", model=".")',
        f"classify({example_text(pairs)}, {scores}truncation=True, max_length={task.max_length})",
    ]


def example_text(pairs: bool) -> str:
    """Python for a long text as transformers' pipeline takes it, or for a pair with one."""
    text = '"a text of any length " * 1000'
    return f'{{"text": {text}, "text_pair": "the second text"}}' if pairs else text
