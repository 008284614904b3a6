"""The kinds of task, and where a task's examples come from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from ds_distill.parts.one_of import OneOf
from ds_distill.parts.section import Count, Name, Section


class Columns(Section):
    """The names of the columns that hold an example."""

    text: str = "text"
    """The text, or the first of two."""
    text_b: str | None = None
    """The second text of a pair."""
    label: str = "label"
    """The label: a name, or for hub data sets the class id. Absent in unlabelled splits."""


class Data(Section):
    """Where the examples come from."""

    path: str
    """A folder, a file, a data set of the hub, or `docstrings:PACKAGE,PACKAGE` (see
    `ds_distill.data.docstrings`). Folders hold one file per split: jsonl, csv, parquet, or txt
    with one text per line; also gzipped."""
    config: str | None = None
    """The configuration of a hub data set."""
    splits: dict[Name, str] = Field(default_factory=dict)
    """Our split's name to the file's name in the folder, or to the hub's split. Without it
    train, validation, test (and what else is there) are found by their usual names."""
    columns: Columns = Columns()
    per_class: dict[Name, Count] = Field(default_factory=dict)
    """Split to the number of examples kept of each class (of docstrings: each package), chosen
    by the examples' own keys: the same ones on every machine."""


class _Task(Section):
    has_classes: ClassVar[bool]
    """Whether each example has a class: expertise tables, experts and class logits make sense."""

    type: str
    data: Data
    """Where the examples come from."""
    max_length: Annotated[int, Field(ge=8, le=4096)] = 128
    """Longest input in tokens of each model; what is longer is cut."""


class SingleLabel(_Task):
    """Classify texts, or pairs of texts; each has one label."""

    has_classes: ClassVar[bool] = True

    type: Literal["single-label"] = "single-label"
    labels: list[str] | None = None
    """Label names in the order of the class ids. Default: what the data declare
    (labels.json in the folder, the hub's features), else the sorted names in train."""

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


class MaskSettings(Section):
    """Which tokens are masked. Of those, 80% are shown as the mask token, 10% as a random token
    and 10% as they are (BERT)."""

    renamed: ClassVar[dict[str, str]] = {"draws": "variants"}

    rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Share of the tokens that are masked, special tokens apart."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """A seed of its own, so that runs with different `seed`s can share a cache."""
    variants: Count | None = None
    """How many masked variants of each example there are: epoch e takes number e mod variants. A
    cache needs it, and stores them all. Default: every epoch has its own."""


class MaskedLM(_Task):
    """Predict the masked tokens of a text. Needs no labels; the cross_entropy term's label is the
    token that was masked. All models must have the same vocabulary."""

    has_classes: ClassVar[bool] = False

    type: Literal["masked-lm"] = "masked-lm"
    masking: MaskSettings = MaskSettings()


TASKS: dict[str, type[_Task]] = {"single-label": SingleLabel, "masked-lm": MaskedLM}
"""A recipe's `task.type` -> the section of that kind of task."""

Task = Annotated[
    SingleLabel | MaskedLM,
    OneOf("task", "type", lambda: TASKS, default="single-label"),
]
