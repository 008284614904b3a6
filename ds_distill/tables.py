"""A table as text for a terminal or a log, and as Markdown; `ds_distill.reporting.page` has it in
HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Outcome = Literal["", "better", "worse"]

_NUMBER = re.compile(r"[+-]?\d|$")
"""What a cell of a column of numbers begins with, or is empty."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table that shows more than its text."""

    text: str
    outcome: Outcome = ""
    """Of a difference that is beyond chance."""
    share: float | None = None
    """Of the whole, which a page draws."""
    warning: str = ""
    """A sentence behind it."""

    def __str__(self) -> str:
        """`*` stands behind a difference beyond chance."""
        marked = self.text + ("*" if self.outcome else "")
        return f"{marked} {self.warning}" if self.warning else marked


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    title: str
    heads: Sequence[str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    """Sentences below it."""
    folded: Sequence[Row] = field(default=())
    """More rows, which a page shows when asked to, and text not at all."""
    shipped: str = ""
    """The rows, or the column, that a page sets off, by their first cell or its head."""
    narrow: bool = False
    """Whether a page has it in small print, few columns at once."""

    def parts(self, most: int) -> Iterator[Table]:
        """Tables of the same rows with so many columns at most beside the first: a page can be long
        but not wide."""
        for start in range(1, len(self.heads), most):
            heads, *rows = (
                [row[0], *row[start : start + most]]
                for row in (self.heads, *self.rows, *self.folded)
            )
            shown, folded = rows[: len(self.rows)], rows[len(self.rows) :]
            yield replace(self, heads=list(map(str, heads)), rows=shown, folded=folded)

    def numbers(self) -> list[bool]:
        """Whether each column is of numbers, which are set to the right."""
        columns = ([str(row[at]) for row in self.rows] for at in range(len(self.heads)))
        return [all(map(_NUMBER.match, cells)) and any(cells) for cells in columns]

    def text(self) -> str:
        """The title, the rows and the notes, an empty line between them. Columns are as wide as
        they need."""
        lines = list(self._lines()) if self.rows else []
        lines = [f"{self.title}:", *lines] if self.title and lines else lines
        parts = ["\n".join(part) for part in (lines, self.notes) if part]
        return "\n\n".join(parts)

    def _lines(self) -> Iterator[str]:
        aligned = []
        columns = zip(self.heads, *self.rows, strict=True)
        for column, right in zip(columns, self.numbers(), strict=True):
            texts = list(map(str, column))
            align, width = (str.rjust if right else str.ljust), max(map(len, texts))
            aligned.append([align(text, width) for text in texts])
        yield from ("  ".join(line).rstrip() for line in zip(*aligned, strict=True))
        if self.folded:
            yield f"and {len(self.folded):,} more"

    def markdown(self, escape: Callable[[str], str] = str) -> str:
        """The rows. escape: makes Markdown of a cell's text, in which a `|` is escaped."""
        cells = ([escape(str(cell)) for cell in row] for row in [self.heads, *self.rows])
        head, *rows = (f"| {' | '.join(row)} |" for row in cells)
        return "\n".join([head, "|" + "---|" * len(self.heads), *rows])
