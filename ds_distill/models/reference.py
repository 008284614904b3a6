"""Which model, by name and files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from ds_distill.models.labels import LabelMap


@dataclass(frozen=True)
class ModelReference:
    """A model's name and files at the start of a phase."""

    name: str
    model: str
    """Local folder or hub id."""
    revision: str | None = None
    layers: list[int] | None = None
    config: PreTrainedConfig | None = None
    """Of a model with sizes of its own; `model` has its tokenizer."""
    truncated: bool = False
    """Whether one with a `config` begins with parts of `model`'s weights; else at random."""
    head: str | None = None
    """The task whose head its files have, where an earlier phase of this run trained it."""
    label_map: LabelMap | None = None
    """Its outputs that are the task's labels, where they are not all, in the same order."""

    predictions: Path | None = None
    """The file of what a teacher predicts that is no model. `model` is the student's then, as whose
    tokens its batches come."""
    new_head: bool = False
    """Whether it may get a new head, though it will not be trained."""

    @property
    def trained(self) -> bool:
        """Whether an earlier phase of this run trained it."""
        return self.head is not None


def label_maps_of(references: Iterable[ModelReference]) -> dict[str, LabelMap]:
    """The label maps of the models that have one, as `Bundle` takes them."""
    return {
        reference.name: reference.label_map
        for reference in references
        if reference.label_map is not None
    }
