"""Formats of lines: JSON Lines, plain text, CSV, TSV; plain or gzip."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import IO, Any, cast

from ds_distill.data.columns import BATCH
from ds_distill.data.readers.base import FileReader, kind_of
from ds_distill.errors import UserError
from ds_distill.recipe.tags import OUTSIDE

LONGEST_LINE = 1 << 24
"""Bytes, 16 MiB: what is read at once. A file may be one line, and be meant as one."""

_SQUAD = re.compile(r'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[.*"paragraphs"', re.S)
"""How SQuAD's files begin, which are one object."""

_SEPARATOR = re.compile(r"sep=(.)\s*")
"""The line on top of a CSV file that tells Excel what separates its values."""

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How files in UTF-16 begin."""


def lines_of(file: IO[bytes], name: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of a text file, counted from 1.

    Raises UserError on a damaged gzip file, and on a line that is too long or not UTF-8.
    """
    number, beyond_ascii = 0, False
    try:
        while raw := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise UserError(
                    f"{name}:{number}: the line is longer than {LONGEST_LINE:,} bytes. Write one "
                    "example on a line."
                )
            if number == 1 and raw.startswith(b"PK\3\4"):
                raise UserError(
                    f"{name}: is a ZIP archive, as a spreadsheet (.xlsx) is. Unpack it, or save "
                    "the sheet as CSV in UTF-8."
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                # Not Latin-1: where Windows-1252 has quotes, dashes and the euro, it has none.
                other = "utf-16" if number == 1 and raw.startswith(_UTF_16) else "windows-1252"
                advice = f"Save the file as UTF-8, e.g. with `iconv -f {other} -t utf-8`."
                if beyond_ascii:
                    advice = "Lines before it are UTF-8, so convert the others alone, with `iconv`."
                raise UserError(
                    f"{name}:{number}: not UTF-8: byte {raw[error.start]:#04x} at position "
                    f"{error.start + 1} of the line. {advice}"
                ) from error
            beyond_ascii = beyond_ascii or not line.isascii()
            yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: cannot be read: {error}. Copy or make the file again.") from error


def objects_of(
    lines: Iterable[tuple[int, str]], name: str, once: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line of a text file that is not blank. once: keys that no row may
    have twice. Raises UserError on a line that is no object."""

    def refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        for key in once:
            if keys.count(key) > 1:
                raise ValueError(f"key {key!r} stands twice")

    decoder, quoted = json.JSONDecoder(), [f'"{key}"' for key in once]
    strict = json.JSONDecoder(object_pairs_hook=refuse_repeated)  # four times as slow
    for number, raw in lines:
        if not (line := raw.strip(" \t\r\n")):
            continue
        location = f"{name}:{number}"
        try:
            row, end = decoder.raw_decode(line)
            if end < len(line):
                raise json.JSONDecodeError("Extra data", line, end)
            for key in quoted:
                if line.count(key) > 1:
                    strict.decode(line)
        except (ValueError, RecursionError) as error:
            if number == 1 and line.startswith("["):
                row = []
            else:
                several = "; `jq -c .` writes it so, and `jq -c '.KEY[]'` those of a list"
                raise UserError(
                    f"{location}: not readable as JSON: {error}. Each line must be one whole "
                    'object, e.g. {"text": "...", "label": "..."}'
                    f"{several if line == '{' else ''}."
                ) from error
        if not isinstance(row, dict):
            kind = "an array" if isinstance(row, list) else kind_of(row)
            raise UserError(
                f"{location}: holds {kind}, not an object. Write one object per line, e.g. "
                '{"text": "...", "label": "..."}; `jq -c .[]` turns an array into lines.'
            )
        yield location, row


class LinesFile(FileReader):
    def lines(self) -> Iterator[tuple[int, str]]:
        """See `lines_of`."""
        with self.open() as file:
            yield from lines_of(file, self.name)

    def open(self) -> IO[bytes]:
        """Its bytes, of a gzip file those that were compressed."""
        compressed = self.path.suffix.lower() == ".gz"
        return cast(IO[bytes], gzip.open(self.path) if compressed else self.path.open("rb"))


class JsonLines(LinesFile):
    """One JSON object a line, plain or gzip. Its columns are the keys of the first `BATCH` rows;
    any row may lack one."""

    def columns(self) -> list[str]:
        return list(self._columns)

    @cached_property
    def _columns(self) -> dict[str, None]:
        first = [row for _, row in islice(self._objects(), BATCH)]
        if not first:
            raise self.no_rows()
        return dict.fromkeys(name for row in first for name in row)

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        rows, late = self._objects(columns), set(columns).difference(self._columns)
        if not late:
            yield from rows
        for location, row in rows:
            if name := next(iter(late.intersection(row)), None):
                raise UserError(
                    f"{location}: has {name!r}, and none of the first {BATCH:,} rows has. Write "
                    "the key into one of these too, with null where there is nothing."
                )
            yield location, row

    def _objects(self, once: Collection[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        self._refuse_squad()
        yield from objects_of(self.lines(), self.name, once)

    def _refuse_squad(self) -> None:
        head = ""
        with suppress(OSError, EOFError, zlib.error), self.open() as file:  # told by `lines`
            head = file.read(1 << 12).decode("utf-8-sig", errors="replace")
        if _SQUAD.match(head):
            raise UserError(
                f"{self.name}: is one object, in SQuAD's nested form (data, paragraphs, qas). "
                "Write a line for each question, with the keys question, context and answers, a "
                "list of {text, start}: `jq -c '.data[].paragraphs[] | .context as $c | .qas[] | "
                "{question, context: $c, answers: [.answers[] | {text, start: .answer_start}]}' "
                f"{self.path.name} > train.jsonl`."
            )


class TextLines(LinesFile):
    """One text a line, plain or gzip: the column `text`. Blank lines are left out, and white
    space around a text."""

    def columns(self) -> list[str]:
        return ["text"]

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, line in self.lines():
            if text := line.strip():
                yield f"{self.name}:{number}", {"text": text}


class Csv(LinesFile):
    """Comma-separated values with a header, plain or gzip; all values are text. Where the header
    has semicolons and no comma, as of spreadsheets in many countries, they are what separates."""

    numbers_are_text = True
    quoted = True
    advice = (
        "Put a text that holds commas, quotes or line breaks in double quotes, and double each "
        "quote inside."
    )

    @cached_property
    def delimiter(self) -> str:
        header = next((line for _, line in self.lines() if line.strip()), "")
        if separator := _SEPARATOR.fullmatch(header):
            return separator[1]
        return ";" if ";" in header and "," not in header else ","

    @property
    def read_as(self) -> str | None:
        return "values between semicolons" if self.delimiter == ";" else None

    def columns(self) -> list[str]:
        for _, names in self._records():
            return names
        raise self.no_rows()

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        header: list[str] | None = None
        for number, record in self._records():
            location = f"{self.name}:{number}"
            if header is None:
                header = record
                for name in columns:
                    if header.count(name) > 1:
                        raise UserError(
                            f"{location}: the header has column {name!r} twice. Rename one of them."
                        )
            elif len(record) != len(header):
                raise UserError(
                    f"{location}: the row has {len(record)} values and the header {len(header)}. "
                    f"{self.advice}"
                )
            else:
                yield location, dict(zip(header, record, strict=True))

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """(line number, values) of the records, the header first; empty lines left out."""
        number = size = 0
        start = 1
        lines = self.lines()

        def text() -> Iterator[str]:
            nonlocal number, size, start
            for number, line in lines:
                if number == 1 and _SEPARATOR.fullmatch(line):
                    start = 2
                    continue
                size += len(line)
                if size > LONGEST_LINE:
                    raise csv.Error(f"the row is longer than {LONGEST_LINE:,} characters")
                yield line

        # Its default of 128 KiB is short for a text. It is the process's: other readers are open.
        csv.field_size_limit(2**31 - 1)
        try:
            for record in csv.reader(
                text(),
                strict=True,
                delimiter=self.delimiter,
                quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE,
            ):
                if record:
                    yield start, record
                start, size = number + 1, 0
        except csv.Error as error:
            raise UserError(
                f"{self.name}:{start}: not readable as separated values: {error}. {self.advice}"
            ) from error


class Tsv(Csv):
    """Tab-separated values with a header, plain or gzip: one row a line, and a quote is a letter
    like others (the media type text/tab-separated-values), so that no lone quote joins rows."""

    delimiter = "\t"
    quoted = False
    advice = "Take tabs and line breaks out of the texts; quotes do not hide them here."


# ------------------------------------------------------------------------------------------- CoNLL


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
