"""Predictions of a teacher that is no model, from a file: what an LLM, an ensemble, a rule or a
person said of texts.

The file is converted once to an Arrow file of content keys and logits, sorted by key, which is
mapped into memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from ds_distill.data.examples import build_once
from ds_distill.data.labels import LabelIds, LabelSets, Numbers
from ds_distill.data.readers import BATCH, Reader, check_text, kind_of, open_file
from ds_distill.data.sources import Source, text_columns
from ds_distill.errors import UserError, did_you_mean
from ds_distill.keys import content_keys, find_keys, sorted_keys
from ds_distill.process.activity import mark

VERSION = 1
"""Part of the converted files' names: raise it when the same input gives other logits."""

LEAST = 1e-6
"""The least probability that a label has, and 1 less the most: of a label that is not named, or
said to be certain, a logarithm could not be taken."""

FORMS = ("logits", "probabilities", "predicted")
"""Columns that say what is predicted: the first of them that a file has."""

_SUM = 0.02
"""By how much probabilities that sum to 1 may be off, as rounded ones are."""


@dataclass(frozen=True)
class FilePredictions:
    """What a file has of M texts."""

    high: np.ndarray
    """int64 [M]: the first halves of their content keys, which are sorted and distinct."""
    low: np.ndarray
    """int64 [M]: the second halves."""
    logits: np.ndarray
    """float32 [M, C]: of each label; or [M, 1], numbers."""

    def __len__(self) -> int:
        """M."""
        return len(self.high)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Where texts stand among these: int64 [B, 2] -> int64 [B], -1 of one that does not."""
        return find_keys(self.high, self.low, keys)

    def has_all(self, keys: np.ndarray) -> bool:
        """Whether all of these texts are there: int64 [B, 2]."""
        return bool((self.find(keys) >= 0).all())


def open_predictions(path: Path, source: Source) -> FilePredictions:
    """A file's predictions of a task's texts.

    source: of the task's data, which has its columns and labels.

    Raises UserError for a file that cannot be read, or says something else than predictions of the
    labels, with the location.
    """
    reader, task = open_file(path), source.task
    names, form = _columns(reader, source)
    kind = task.predicts
    state = [VERSION, reader.fingerprint(), names, form, kind, source.labels]
    digest = xxhash.xxh3_128_hexdigest(json.dumps(state).encode())
    target = source.cache_folder / f"predictions-{digest}.arrow"
    rows = _Rows(reader, names, form, kind, source.labels)
    return _read(build_once(target, partial(_write, rows)))


def fingerprint(path: Path) -> str:
    """Of a file's content."""
    with open(path, "rb") as file:
        digest = xxhash.xxh3_128()
        while part := file.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()


def _columns(reader: Reader, source: Source) -> tuple[list[str], str]:
    """The columns of the text, or of the two of a pair, and the one that says what is predicted."""
    present = reader.columns()
    columns = text_columns(source.task.data.columns, present)
    names = [columns.text] + ([columns.text_b] if columns.text_b is not None else [])
    forms = FORMS if source.labels else FORMS[-1:]
    for name in names:
        if name not in present:
            raise UserError(
                f"{reader.name}: no column {name!r}, in which the task's texts are."
                f"{did_you_mean(name, present)} It has: {', '.join(present)}."
            )
    for form in forms:
        if form in present:
            return names, form
    raise UserError(
        f"{reader.name}: no column {' or '.join(map(repr, forms))}, which says what is predicted; "
        f"it has: {', '.join(present)}. Name one so."
    )


class _Rows:
    """A file's rows as keys and logits."""

    def __init__(
        self, reader: Reader, names: list[str], form: str, kind: str, labels: list[str]
    ) -> None:
        self._reader, self._names, self._form, self._labels = reader, names, form, labels
        self._many, self.width = kind == "labels", len(labels) or 1
        self._predicted: LabelIds | LabelSets | Numbers
        if not labels:
            self._predicted = Numbers(reader, form)
        else:
            self._predicted = (LabelSets if self._many else LabelIds)(labels, reader, form)

    def __iter__(self) -> Iterator[tuple[str, list[str], np.ndarray]]:
        """(location, texts, logits float32 [C]) of each row that says something. Raises UserError
        for the first that says something wrong."""
        for location, row in self._reader.rows([*self._names, self._form, "confidence"]):
            texts = [row.get(name) for name in self._names]
            for name, text in zip(self._names, texts, strict=True):
                check_text(text, f"{location}: {name!r}")
            value = row.get(self._form)
            if value is None or (value == "" and self._reader.numbers_are_text):
                continue
            with np.errstate(over="ignore"):  # it is refused
                logits = np.asarray(self._logits(row, value, location), dtype=np.float32)
            if not np.isfinite(logits).all():
                raise UserError(f"{location}: {self._form!r} holds what is no finite number.")
            yield location, [str(text) for text in texts], logits

    def _logits(self, row: Mapping[str, Any], value: Any, location: str) -> Any:
        if self._reader.numbers_are_text and (self._many or self._form != "predicted"):
            with suppress(ValueError):  # in CSV, the JSON of it
                value = json.loads(value)
        if self._form == "predicted":
            return self._of_predicted(value, row.get("confidence"), location)
        numbers = self._by_label(value, location)
        if self._form == "logits":
            return numbers
        if ((numbers < 0) | (numbers > 1)).any():
            raise UserError(f"{location}: 'probabilities' must be from 0 to 1, got {value}.")
        if not self._many and abs(total := numbers.sum() - 1) > _SUM:
            raise UserError(
                f"{location}: 'probabilities' sum to {total + 1:.3g}, and one label is right: they "
                "must sum to 1."
            )
        return _logits_of(numbers, self._many)

    def _by_label(self, value: Any, location: str) -> np.ndarray:
        """float64 [C], from a number by label or numbers in the labels' order."""
        if isinstance(value, dict):
            given = {str(name): number for name, number in value.items()}
            for name in given:
                if name not in self._labels:
                    raise UserError(
                        f"{location}: {self._form!r} has {name!r}, which is not one of the "
                        f"{len(self._labels)} labels: {', '.join(self._labels)}."
                        f"{did_you_mean(name, self._labels)}"
                    )
            # A column of objects, as in parquet, has null where an object has no such key.
            given = {name: number for name, number in given.items() if number is not None}
            if self._form == "logits" and len(given) < len(self._labels):
                missing = [label for label in self._labels if label not in given]
                raise UserError(
                    f"{location}: 'logits' lacks {', '.join(missing)}. Name all labels."
                )
            listed = [given.get(label, 0.0) for label in self._labels]
        elif isinstance(value, list) and len(value) == len(self._labels):
            listed = value
        else:
            raise UserError(
                f"{location}: {self._form!r} must be an object with a number by label, or a list "
                f"of {len(self._labels)} numbers in the labels' order, got {kind_of(value)}."
            )
        for number in listed:
            if type(number) not in (int, float):
                raise UserError(
                    f"{location}: {self._form!r} holds {kind_of(number)}. Write numbers."
                )
        try:
            return np.array(listed, dtype=np.float64)
        except OverflowError:
            raise UserError(f"{location}: {self._form!r} holds what is no finite number.") from None

    def _of_predicted(self, value: Any, confidence: Any, location: str) -> Any:
        found = self._predicted.of_value(value, location)
        if not self._labels:
            return [found]
        least = 1 / 2 if self._many else 1 / self.width
        sure = self._confidence(confidence, least, location)
        if self._many:
            return _logits_of(np.where(found == 1, sure, 1 - sure), many=True)
        if found == -1:
            raise UserError(f"{location}: 'predicted' is -1. Name a label, or leave it empty.")
        probabilities = np.full(self.width, (1 - sure) / (self.width - 1))
        probabilities[int(found)] = sure
        return _logits_of(probabilities, many=False)

    def _confidence(self, value: Any, least: float, location: str) -> float:
        """least: what is no more than chance."""
        if value is None or value == "":
            return 1.0
        try:
            sure = float(value) if type(value) is not bool else np.nan
        except (TypeError, ValueError):
            sure = np.nan
        if not least < sure <= 1:
            raise UserError(
                f"{location}: 'confidence' is the probability of what is predicted, above "
                f"{least:.3g} and at most 1, got {kind_of(value)}. For others give 'probabilities'."
            )
        return sure


def _logits_of(probabilities: np.ndarray, many: bool) -> np.ndarray:
    """Of probabilities [C] of one label, or of each label's presence."""
    clipped = np.clip(probabilities, LEAST, 1 - LEAST if many else 1)
    return np.log(clipped) - np.log1p(-clipped) if many else np.log(clipped)


def _write(rows: _Rows, path: Path) -> None:
    keys = [np.zeros((0, 2), dtype=np.int64)]
    logits = [np.zeros((0, rows.width), dtype=np.float32)]
    found = iter(rows)
    while batch := list(islice(found, BATCH)):
        mark("reads predictions")
        columns = zip(*(texts for _, texts, _ in batch), strict=True)
        keys.append(content_keys(*map(list, columns)))
        logits.append(np.stack([of_row for _, _, of_row in batch]))
    all_keys, all_logits = np.concatenate(keys), np.concatenate(logits)
    order, first = sorted_keys(all_keys)
    text = np.cumsum(first) - 1
    ordered = all_logits[order]
    differ = (ordered != ordered[first][text]).any(axis=1)
    if differ.any():
        one = int(np.flatnonzero(differ)[0])
        _refuse_disagreement(rows, int(order[first][text[one]]), int(order[one]))
    kept = order[first]
    numbers = pa.FixedSizeListArray.from_arrays(pa.array(all_logits[kept].ravel()), rows.width)
    halves = [pa.array(all_keys[kept, half]) for half in (0, 1)]
    batch_of_all = pa.RecordBatch.from_arrays([*halves, numbers], ["key_hi", "key_lo", "logits"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch_of_all.schema) as stream:
        stream.write_batch(batch_of_all)


def _refuse_disagreement(rows: _Rows, *numbers: int) -> None:
    """Raises UserError. numbers: of two rows that say unlike things of one text."""
    here = [location for number, (location, _, _) in enumerate(rows) if number in numbers]
    raise UserError(
        f"{here[0]} and {here[1].rpartition(':')[2]}: the same text, and other predictions. Keep "
        "one of them, or give their mean as 'probabilities'."
    )


def _read(path: Path) -> FilePredictions:
    with pa.memory_map(str(path)) as source:
        [batch] = list(pa.ipc.open_stream(source))
    high, low, logits = batch.columns
    width = logits.type.list_size
    flat = logits.values.to_numpy().reshape(-1, width)
    return FilePredictions(high.to_numpy(), low.to_numpy(), flat)
