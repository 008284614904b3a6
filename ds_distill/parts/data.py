"""Where a task's examples come from."""

from __future__ import annotations

from pydantic import Field

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
