"""Predict with a model for the texts of a file. What is wrong with it is told before torch is
imported."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ds_distill.data.readers import open_file
from ds_distill.data.readers.base import check_text, text_of
from ds_distill.data.readers.text import lines_of, objects_of
from ds_distill.errors import UserError, did_you_mean
from ds_distill.planning.units import rate
from ds_distill.process.terminal import escaped
from ds_distill.recipe.references import resolve_model
from ds_distill.run.folder import student_folder

if TYPE_CHECKING:
    from ds_distill.predictors.prediction import Predictor

SECONDS = 10.0
"""Between two lines of progress."""


def predict_file(
    model: str | Path,
    file: Path,
    output: IO[str],
    *,
    text: str | None = None,
    text_b: str | None = None,
    batch_size: int = 32,
    progress: Callable[[str], None],
) -> None:
    """Write a line of JSON per row of a data file: the row, and what `predict` gives of it.

    file: jsonl, csv, tsv, parquet, conll or txt, plain or gzip; `-` is standard input, with an
        object of JSON or else a text on each line.
    text, text_b: columns of the text and of the second one of a pair. Default: of a run's student
        those of its recipe, else the predictor's `columns`.
    progress: gets a sentence every ten seconds, and at the end.

    Raises UserError for rows that cannot be read.
    """
    resolve_model(str(student_folder(model) or model))
    rows, columns = _rows(file)
    for name in filter(None, (text, text_b)):
        _check_column(file, name, columns)
    # Behind what can be told at once: these imports take many seconds.
    from ds_distill.predictors.prediction import CHUNK, load_predictor

    predictor = load_predictor(model)
    names = _columns(file, columns, predictor, text, text_b)
    of_words = predictor.of_words
    done, started, shown = 0, time.monotonic(), time.monotonic()
    while chunk := list(islice(rows, CHUNK)):
        texts = [_text(location, row, names, of_words) for location, row in chunk]
        found = predictor.predictions(texts, batch_size)
        if done == 0 and (replaced := [name for name in columns if name in found[0]]):
            progress(f"Note: what {file} has as {', '.join(replaced)} is replaced")
        for (_, row), prediction in zip(chunk, found, strict=True):
            made = _as_json({**row, **prediction})
            output.write(escaped(json.dumps(made, ensure_ascii=False, default=str)) + "\n")
        output.flush()
        done += len(chunk)
        if time.monotonic() - shown > SECONDS:
            shown = time.monotonic()
            progress(f"{done:,} texts, {rate(done / (shown - started))} a second")
    seconds = max(time.monotonic() - started, 1e-9)
    if done == 0:
        raise UserError(f"{file}: no rows. Put at least one text there.")
    cut = f"; {predictor.cut:,} were cut at {predictor.max_length} tokens"
    progress(f"{done:,} texts in {seconds:.1f} s{cut if predictor.cut else ''}")


def _as_json(value: Any) -> Any:
    """A value of a row; parquet has numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [*map(_as_json, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------- rows


def _rows(file: Path) -> tuple[Iterator[tuple[str, dict[str, Any]]], list[str]]:
    """(location, row) for each row of a file, and the names of its columns."""
    if str(file) != "-":
        reader = open_file(file)
        columns = reader.columns()
        return reader.rows(columns), columns
    rows = _standard_input()
    first = list(islice(rows, 1))
    return chain(first, rows), [*first[0][1]] if first else ["text"]


def _standard_input() -> Iterator[tuple[str, dict[str, Any]]]:
    """An object of each line, or where the first is none a text."""
    name = "standard input"
    lines = ((number, line) for number, line in lines_of(sys.stdin.buffer, name) if line.strip())
    first = list(islice(lines, 1))
    if first and first[0][1].lstrip().startswith("{"):
        yield from objects_of(chain(first, lines), name)
    else:
        for number, line in chain(first, lines):
            yield f"{name}:{number}", {"text": line.strip()}


def _columns(
    file: Path, present: list[str], predictor: Predictor, text: str | None, text_b: str | None
) -> tuple[str, ...]:
    """The columns of a text, or of the two of a pair. Raises UserError where they are not there, or
    are not as many as the model reads."""
    usual = predictor.columns
    chosen: tuple[str, ...]
    if text is None and text_b is None:
        chosen = next((names for names in usual if set(names) <= set(present)), usual[0])
    else:
        chosen = (text or usual[0][0], *filter(None, [text_b]))
    for name in chosen:
        _check_column(file, name, present)
    if len(chosen) not in map(len, usual):
        reads = "single texts" if len(usual[0]) == 1 else "pairs of a question and its context"
        raise UserError(
            f"{file}: columns {', '.join(map(repr, chosen))}, but this model reads {reads}. Name "
            + ("one column, --text COLUMN." if len(usual[0]) == 1 else "both, --text and --text-b.")
        )
    return chosen


def _check_column(file: Path, name: str, present: list[str]) -> None:
    if name not in present:
        raise UserError(
            f"{file}: no column {name!r}; it has: {', '.join(present)}."
            f"{did_you_mean(name, present)} Name the text's column: --text COLUMN."
        )


def _text(location: str, row: dict[str, Any], names: tuple[str, ...], of_words: bool) -> Any:
    """A text, a pair of two, or a list of words."""
    words = row.get(names[0])
    if of_words and isinstance(words, list):
        for word in words:
            check_text(word, f"{location}: a word of {names[0]!r}")
        return words
    first, *others = (text_of(row, name, location) for name in names)
    return (first, others[0]) if others else first
