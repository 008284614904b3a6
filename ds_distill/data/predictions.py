"""Predictions of a teacher that is no model, from a file: what an LLM, an ensemble, a rule or a
person said of texts.

The file is converted once to an Arrow file of content keys and logits, sorted by key, which is
mapped into memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ds_distill.data.columns import BATCH, arrow_column, as_numpy, build_once
from ds_distill.data.groups import ID
from ds_distill.data.labels import LabelIds, LabelNames, LabelSets, Numbers
from ds_distill.data.readers import Reader, open_file
from ds_distill.data.readers.base import check_text, kind_of
from ds_distill.data.row_forms import ROW_FORMS, WordRows
from ds_distill.data.sources import ContentKey, Source
from ds_distill.errors import UserError, did_you_mean
from ds_distill.keys import among_keys, content_keys, find_keys, sorted_keys
from ds_distill.process.activity import mark

VERSION = 4
"""Part of the converted files' names: raise it when the same input gives other logits."""


@dataclass(frozen=True)
class FilePredictions:
    """What a file has of M examples, R rows in all: of lists of words a row for each word."""

    high: np.ndarray
    """int64 [M]: the first halves of their content keys, which are sorted and distinct."""
    low: np.ndarray
    """int64 [M]: the second halves."""
    first: np.ndarray
    """int64 [M]: the number of each one's first row."""
    logits: np.ndarray
    """float32 [R, C]: of each label; or [R, 1], numbers."""
    unknown: str | None = None
    """Of a file that names its examples by ids: how many are of none, and the first of them."""

    def __len__(self) -> int:
        """M."""
        return len(self.high)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Where examples stand among these: int64 [B, 2] -> int64 [B], -1 of one that does not."""
        return find_keys(self.high, self.low, keys)

    def with_windows(self, splits: Iterable[datasets.Dataset]) -> FilePredictions:
        """Those of the windows, too, in which long lists of words are read.

        splits: as `word_windows` makes them.
        """
        keys, first = [np.stack([self.high, self.low], axis=1)], [self.first]
        names = ("whole_hi", "whole_lo", "key_hi", "key_lo", "first")
        for split in splits:
            table = np.stack([as_numpy(split, name) for name in names], axis=1)
            whole = self.find(table[:, :2])
            keys.append(table[whole >= 0, 2:4])
            first.append(self.first[whole[whole >= 0]] + table[whole >= 0, 4])
        every, rows = np.concatenate(keys), np.concatenate(first)
        order, distinct = sorted_keys(every)  # a list that is whole comes before a like window
        kept = order[distinct]
        return replace(self, high=every[kept, 0], low=every[kept, 1], first=rows[kept])


def open_predictions(path: Path, source: Source, splits: Collection[str] = ()) -> FilePredictions:
    """A file's predictions of a task's examples.

    source: of the task's data, which has its columns and labels. splits: in which examples are
        looked for, where the file names them by ids.

    Raises UserError for a file that cannot be read, or says something else than predictions of the
    labels, with the location.
    """
    rows = _rows(path, source, splits)
    state = [VERSION, rows.fingerprint, rows.names, rows.column, source.task.type]
    state += [source.found_labels]
    if rows.by_id is not None:
        state += [rows.by_id.fingerprint()]
    digest = xxhash.xxh3_128_hexdigest(json.dumps([*state, source.labels]).encode())
    target = source.cache_folder / f"predictions-{digest}.arrow"
    return _read(build_once(target, partial(_write, rows)))


def first_other(
    path: Path, source: Source, splits: Collection[str], keys: np.ndarray
) -> str | None:
    """Where the first row stands that is of none of some examples, by their content keys int64
    [N, 2]; None without one. path, source, splits: as of `open_predictions`."""
    rows = _rows(path, source, splits)
    for batch in _batches(rows):
        of_batch, there = rows.keys(batch)
        others = np.flatnonzero(there & ~among_keys(of_batch, keys))
        if others.size:
            return batch[int(others[0])].location
    return None


def _batches(rows: PredictionRows) -> Iterator[list[PredictionRow]]:
    found = iter(rows)
    while batch := list(islice(found, BATCH)):
        mark("reads predictions")
        yield batch


def _rows(path: Path, source: Source, splits: Collection[str]) -> PredictionRows:
    reader = open_file(path)
    named = source.task.data.columns.id in reader.columns()
    return PredictionRows(reader, source, ExamplesById.of(source, splits) if named else None)


def _write(rows: PredictionRows, path: Path) -> None:
    keys, known = [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0, dtype=bool)]
    logits, first_unknown = list[np.ndarray](), ""
    for batch in _batches(rows):
        of_batch, there = rows.keys(batch)
        if not there.all():
            first_unknown = first_unknown or batch[int(np.argmin(there))].location
        keys.append(of_batch)
        known.append(there)
        logits += [row.logits + np.float32(0) for row in batch]  # no -0
    all_keys = np.concatenate(keys)
    numbers = np.flatnonzero(np.concatenate(known))
    order, first = sorted_keys(all_keys[numbers])
    numbers = numbers[order]
    digests = np.array(
        [xxhash.xxh3_64_intdigest(logits[number].tobytes()) for number in numbers], dtype=np.uint64
    )
    same = np.flatnonzero(first)[np.cumsum(first) - 1]
    if (differ := np.flatnonzero(digests != digests[same])).size:
        _refuse_disagreement(rows, int(numbers[same[differ[0]]]), int(numbers[differ[0]]))
    kept = numbers[first]
    offsets = np.concatenate([[0], np.cumsum([len(logits[number]) for number in kept], dtype=int)])
    every = np.concatenate([np.zeros((0, rows.width), np.float32), *(logits[at] for at in kept)])
    of_labels = pa.FixedSizeListArray.from_arrays(pa.array(every.ravel()), rows.width)
    columns = [pa.array(all_keys[kept, half]) for half in (0, 1)]
    columns.append(pa.LargeListArray.from_arrays(pa.array(offsets), of_labels))
    unknown = f"{len(all_keys) - len(order):,} (such as {first_unknown})" if first_unknown else ""
    names = ("key_hi", "key_lo", "logits")
    fields = [pa.field(name, of.type) for name, of in zip(names, columns, strict=True)]
    schema = pa.schema(fields, {"unknown": unknown})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _refuse_disagreement(rows: PredictionRows, *numbers: int) -> None:
    """Raises UserError. numbers: of two rows that say unlike things of one example."""
    here = [row.location for number, row in enumerate(rows) if number in numbers]
    what = "text" if rows.by_id is None else "example"
    raise UserError(
        f"{here[0]} and {here[1].rpartition(':')[2]}: the same {what}, and other predictions. Keep "
        "one of them, or give their mean as 'probabilities'."
    )


def _read(path: Path) -> FilePredictions:
    with pa.memory_map(str(path)) as source:
        [batch] = list(stream := pa.ipc.open_stream(source))
    high, low, logits = batch.columns
    flat = logits.values.values.to_numpy().reshape(-1, logits.type.value_type.list_size)
    first = logits.offsets.to_numpy()[:-1]
    unknown = (stream.schema.metadata or {}).get(b"unknown", b"").decode()
    return FilePredictions(high.to_numpy(), low.to_numpy(), first, flat, unknown or None)


# ------------------------------------------------------------------------------------------- rows

LEAST = 1e-6
"""The least probability that a label has, and 1 less the most: of a label that is not named, or
said to be certain, a logarithm could not be taken."""

FORMS = ("logits", "probabilities", "predicted")
"""Columns that say what is predicted: the first of them that a file has."""

_SUM = 0.02
"""By how much probabilities that sum to 1 may be off, as rounded ones are."""


@dataclass(frozen=True)
class ExamplesById:
    """M examples by their ids, in ascending order of these."""

    ids: np.ndarray
    """int64 [M, 2]: hashes of the ids, distinct."""
    keys: np.ndarray
    """int64 [M, 2]: content keys."""
    rows: np.ndarray
    """int64 [M]: how many rows an example is: its words, or 1."""

    @staticmethod
    def of(source: Source, splits: Collection[str]) -> ExamplesById:
        """Of some splits, those whose examples have ids. Raises UserError where two that are not
        the same have one id."""
        read = map(source.read, splits)
        parts = [_of_split(data) for data in read if ID[0] in data.column_names]
        table = np.concatenate([np.zeros((0, 5), dtype=np.int64), *parts])
        order, first = sorted_keys(table[:, :2])
        ordered = table[order]
        same = ordered[first][np.cumsum(first) - 1]
        if (unlike := np.flatnonzero((ordered != same).any(axis=1))).size:
            both = same[unlike[0]], ordered[unlike[0]]
            keys, places = (
                {(int(row[2]), int(row[3])) for row in both},
                dict[ContentKey, str](),
            )
            for split in splits:
                places = source.locations(split, keys) | places
            raise UserError(
                f"{' and '.join(places.values())}: these are not the same, and have one id (column "
                f"{source.task.data.columns.id!r}). Give each its own."
            )
        kept = ordered[first]
        return ExamplesById(kept[:, :2], kept[:, 2:4], kept[:, 4])

    def fingerprint(self) -> str:
        """Of which examples have which ids."""
        table = np.concatenate([self.ids, self.keys, self.rows[:, None]], axis=1)
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(table).tobytes())

    def find(self, names: list[str]) -> np.ndarray:
        """Where examples with these ids stand: int64 [B], -1 of one that does not."""
        return find_keys(self.ids[:, 0], self.ids[:, 1], content_keys(names))


def _of_split(data: datasets.Dataset) -> np.ndarray:
    """int64 [n, 5]: id, key and number of rows, of those of its examples that have an id."""
    there = arrow_column(data, ID[0]).is_valid()
    columns = [
        arrow_column(data, name).filter(there).to_numpy() for name in (*ID, "key_hi", "key_lo")
    ]
    known = there.to_numpy()
    rows = np.ones(len(data), dtype=np.int64)
    if "words" in data.column_names:
        rows = pc.list_value_length(arrow_column(data, "words")).to_numpy()
    return np.stack([*columns, rows[known]], axis=1).astype(np.int64)


@dataclass(frozen=True)
class PredictionRow:
    location: str
    example: list[Any]
    """Its text, or the two of a pair; its words, as one; or its id."""
    logits: np.ndarray
    """float32 [k, C]: of its one row, or of each word."""


class PredictionRows:
    """A file's rows that say something. Raises UserError for a file without the columns."""

    def __init__(self, reader: Reader, source: Source, by_id: ExamplesById | None) -> None:
        """source: of the task's data, which has its columns and labels. by_id: its examples, where
        the file has the column of their ids."""
        task, present, labels = source.task, reader.columns(), source.labels
        self._reader, self._labels, self.by_id = reader, labels, by_id
        self.fingerprint = reader.fingerprint()
        self._names = LabelNames(labels)
        self._many, self.width = task.many_labels, len(labels) or 1
        self._form = ROW_FORMS[task.rows](task, reader)
        self._of_words = isinstance(self._form, WordRows)
        self.names = self._columns(source, present)
        columns = FORMS if labels else FORMS[-1:]
        self.column = next((column for column in columns if column in present), "")
        """The one that says what is predicted."""
        if not self.column:
            raise UserError(
                f"{reader.name}: no column {' or '.join(map(repr, columns))}, which says what is "
                f"predicted; it has: {', '.join(present)}. Name one so."
            )
        self._predicted: LabelIds | LabelSets | Numbers
        if labels:
            kind = LabelSets if self._many else LabelIds
            self._predicted = kind(task, labels, reader, self.column, unordered=source.found_labels)
        else:
            self._predicted = Numbers(task, reader, self.column)

    def _columns(self, source: Source, present: list[str]) -> list[str]:
        """Those that say of which example a row is."""
        named = source.task.data.columns.id
        if self.by_id is not None:
            return [str(named)]
        names, what = [*self._form.key_columns.values()], "words" if self._of_words else "texts"
        for name in names:
            if name not in present:
                or_ids = "" if named is None else f", and no {named!r}, in which their ids are"
                raise UserError(
                    f"{self._reader.name}: no column {name!r}, in which the task's {what} are"
                    f"{or_ids}.{did_you_mean(name, present)} It has: {', '.join(present)}."
                )
        return names

    def keys(self, rows: list[PredictionRow]) -> tuple[np.ndarray, np.ndarray]:
        """The content keys of the examples of some rows, int64 [B, 2]; and of which the task has
        one, bool [B]: of those that are named by ids. Raises UserError for a row that is not of as
        many words."""
        examples = [row.example for row in rows]
        if self.by_id is None:
            return self._form.keys(examples), np.ones(len(rows), dtype=bool)
        at = self.by_id.find([name for [name] in examples])
        keys = np.zeros((len(rows), 2), dtype=np.int64)
        keys[at >= 0] = self.by_id.keys[at[at >= 0]]
        for row, number in zip(rows, at, strict=True):
            if number >= 0 and len(row.logits) != (words := int(self.by_id.rows[number])):
                raise _other_length(row.location, self.column, len(row.logits), words)
        return keys, at >= 0

    def __iter__(self) -> Iterator[PredictionRow]:
        """Raises UserError for the first row that says something wrong."""
        for location, row in self._reader.rows([*self.names, self.column, "confidence"]):
            if self.by_id is None:
                example = self._form.fields(row, location)
            else:
                example = [self._id(row.get(self.names[0]), location)]
            value = row.get(self.column)
            if value is None or (value == "" and self._reader.numbers_are_text):
                continue
            with np.errstate(over="ignore"):  # it is refused
                logits = np.asarray(self._logits(row, value, example, location), dtype=np.float32)
            if not np.isfinite(logits).all():
                raise UserError(f"{location}: {self.column!r} holds what is no finite number.")
            yield PredictionRow(location, example, logits.reshape(-1, self.width))

    def _id(self, value: Any, location: str) -> str:
        check_text(str(value) if type(value) is int else value, f"{location}: {self.names[0]!r}")
        return str(value)

    def _logits(self, row: dict[str, Any], value: Any, example: list[Any], location: str) -> Any:
        """[C], or of words [W, C]."""
        confidence = row.get("confidence")
        if not self._of_words:
            value = value if self.column == "predicted" else self._parsed(value)
            return self._of_one(value, confidence, location)
        values, confidence = self._by_word(row, location), self._parsed(confidence)
        if self.by_id is None and len(values) != len(example[0]):
            raise _other_length(location, self.column, len(values), len(example[0]))
        shares = confidence if isinstance(confidence, list) else [confidence] * len(values)
        if len(shares) != len(values):
            raise _other_length(location, "confidence", len(shares), len(values))
        of_word = enumerate(zip(values, shares, strict=True))
        return [self._of_one(*one, f"{location}: word {number}") for number, one in of_word]

    def _parsed(self, value: Any) -> Any:
        """A row's value; in CSV, that of its JSON."""
        if self._reader.numbers_are_text and isinstance(value, str):
            with suppress(ValueError):
                return json.loads(value)
        return value

    def _by_word(self, row: dict[str, Any], location: str) -> list[Any]:
        """What is said of each word."""
        form, value = self._form, self._parsed(row[self.column])
        if not isinstance(value, list):
            raise UserError(
                f"{location}: {self.column!r} must be a list of what is predicted of each word, "
                f"got {kind_of(value)}."
            )
        spans = self.column == "predicted" and all(isinstance(one, dict) for one in value)
        if spans and isinstance(form, WordRows) and form.in_text:
            return form.tags_of_spans({**row, self.column: value}, self.column, location)
        return value

    def _of_one(self, value: Any, confidence: Any, location: str) -> Any:
        """[C], of what is said of a row."""
        if self.column == "predicted":
            return self._of_predicted(value, confidence, location)
        numbers = self._by_label(value, location)
        if self.column == "logits":
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
        listed = self._listed(value, location) if isinstance(value, dict) else value
        if not isinstance(listed, list) or len(listed) != len(self._labels):
            raise UserError(
                f"{location}: {self.column!r} must be an object with a number by label, or a list "
                f"of {len(self._labels)} numbers in the labels' order, got {kind_of(value)}."
            )
        for number in listed:
            if type(number) not in (int, float):
                raise UserError(
                    f"{location}: {self.column!r} holds {kind_of(number)}. Write numbers."
                )
        try:
            return np.array(listed, dtype=np.float64)
        except OverflowError:
            raise UserError(
                f"{location}: {self.column!r} holds what is no finite number."
            ) from None

    def _listed(self, value: dict[str, Any], location: str) -> list[Any]:
        """Numbers by label in the labels' order, 0 where none is given."""
        given: dict[int, Any] = {}
        # A column of objects, as in parquet, has null where an object has no such key.
        for name, number in value.items():
            if (label := self._names.find(str(name))) is None:
                raise UserError(
                    f"{location}: {self.column!r} has {name!r}, which is not one of the "
                    f"{len(self._labels)} labels: {', '.join(self._labels)}."
                    f"{did_you_mean(name, self._labels)}"
                )
            if number is not None:
                given[label] = number
        if self.column == "logits" and len(given) < len(self._labels):
            missing = [label for at, label in enumerate(self._labels) if at not in given]
            raise UserError(f"{location}: 'logits' lacks {', '.join(missing)}. Name all labels.")
        return [given.get(label, 0.0) for label in range(len(self._labels))]

    def _of_predicted(self, value: Any, confidence: Any, location: str) -> Any:
        found = self._predicted.of_value(value, location)
        if not self._labels:
            return [found]
        least = 1 / 2 if self._many else 1 / self.width
        sure = self._confidence(confidence, least, location)
        if self._many:
            return _logits_of(np.where(found == 1, sure, 1 - sure), many=True)
        if found == -1:
            raise UserError(f"{location}: 'predicted' names no label. Name one, or leave it empty.")
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


def _other_length(location: str, form: str, given: int, words: int) -> UserError:
    return UserError(
        f"{location}: {form!r} is of {given} words, and there are {words}. Give one for each."
    )


def _logits_of(probabilities: np.ndarray, many: bool) -> np.ndarray:
    """Of probabilities [C] of one label, or of each label's presence."""
    clipped = np.clip(probabilities, LEAST, 1 - LEAST if many else 1)
    return np.log(clipped) - np.log1p(-clipped) if many else np.log(clipped)
