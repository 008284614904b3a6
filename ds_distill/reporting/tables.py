"""Tables of several runs: for the terminal, and as a page that opens offline."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import jinja2

Outcome = Literal["", "better", "worse"]


@dataclass(frozen=True)
class Cell:
    """A cell of a table that shows more than its text."""

    text: str
    outcome: Outcome = ""
    """Of a difference that is beyond chance."""


@dataclass(frozen=True)
class Table:
    title: str
    heads: list[str]
    rows: list[list[str | Cell]]
    notes: list[str] = field(default_factory=list)
    """Sentences below it."""


def table_text(table: Table) -> str:
    """For a terminal: the columns as wide as they need; `*` stands behind differences beyond
    chance."""
    lines = [table.heads, *([_text(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    head = [f"{table.title}:"] if table.title else []
    parts = [[*head, *text] if table.rows else [], table.notes]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _text(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell.text + ("*" if cell.outcome else "")


def page(title: str, sentences: Sequence[str], tables: Sequence[Table], figure: str = "") -> str:
    """An HTML page, with all that it needs in it.

    sentences: above the tables. figure: an SVG.
    """
    template = environment().get_template("tables.html.jinja")
    shown = [{**vars(table), "rows": [_cells(row) for row in table.rows]} for table in tables]
    inline = jinja2.utils.markupsafe.Markup(figure[max(figure.find("<svg"), 0) :])
    return template.render(title=title, sentences=sentences, tables=shown, figure=inline)


def _cells(row: Sequence[str | Cell]) -> list[Cell]:
    return [Cell(cell) if isinstance(cell, str) else cell for cell in row]


@functools.cache
def environment() -> jinja2.Environment:
    """For the pages' templates."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("ds_distill.reporting", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
