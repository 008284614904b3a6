"""The form of CoNLL: a word and its tag on each line, with tabs or spaces between, a blank line
between sentences, no header. Other white space, such as a no-break space, is part of a word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ds_distill.data.readers.text import LinesFile, Tsv
from ds_distill.errors import UserError
from ds_distill.recipe.tags import OUTSIDE

LINES = 1000
"""Of a file, that tell whether it has this form."""

_TAG = re.compile(rf"{OUTSIDE}|[BI]-[^ \t]+")
_BLANK = " \t"
_DOCUMENT = "-DOCSTART-"
_COMMENT = "# id "
"""Of MultiCoNER's files, before a sentence."""


def is_conll(file: Tsv) -> bool:
    """Whether every line, the first one too, has a tag behind its last tab, and blank lines are
    between: a header, or a table with a column of such labels, has not."""
    lines = [line.strip("\r\n") for _, line in islice(file.lines(), LINES)]
    words = [line for line in lines if line.strip(_BLANK)]
    return 0 < len(words) < len(lines) and all(
        "\t" in line and _TAG.fullmatch(line.rpartition("\t")[2]) for line in words
    )


class Conll(LinesFile):
    """Sentences as rows: the list of words in column `tokens`, of their tags in `tags`. Of other
    columns between a word and its tag, such as parts of speech, nothing is read."""

    @property
    def read_as(self) -> str:
        return "a word and its tag on each line, as CoNLL has them"

    def columns(self) -> list[str]:
        return ["tokens", "tags"]

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        tokens: list[str] = []
        tags: list[str] = []
        start = 1
        tabs: bool | None = None  # between a word and its tag, as in the first line
        for number, raw in self.lines():
            line = raw.strip("\r\n")
            if line.startswith(_COMMENT):
                continue
            if not line.strip(_BLANK) or line.strip(_BLANK) == _DOCUMENT:
                if tokens:
                    yield f"{self.path}:{start}", {"tokens": tokens, "tags": tags}
                tokens, tags = [], []
                continue
            tabs = "\t" in line if tabs is None else tabs
            fields = line.split("\t") if tabs else re.split("[ \t]+", line.strip(_BLANK))
            word, tag = fields[0], fields[-1] if len(fields) > 1 else ""
            if not _TAG.fullmatch(tag) or "\r" in line:
                what = "a tab" if tabs else "a space"
                raise UserError(
                    f"{self.path}:{number}: not a word, {what} and a tag ({OUTSIDE}, B-TYPE or "
                    "I-TYPE). Correct the line."
                )
            if word == _DOCUMENT:
                continue
            start = start if tokens else number
            tokens.append(word)
            tags.append(tag)
        if tokens:
            yield f"{self.path}:{start}", {"tokens": tokens, "tags": tags}
