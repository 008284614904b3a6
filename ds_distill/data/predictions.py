"""Predictions of a teacher that is no model, from a file: what an LLM, an ensemble, a rule or a
person said of texts.

The file is converted once to an Arrow file of content keys and logits, sorted by key, which is
mapped into memory. `ds_distill.data.prediction_rows` reads its rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import xxhash

from ds_distill.data.built import build_once
from ds_distill.data.columns import BATCH, as_numpy
from ds_distill.data.prediction_rows import ExamplesById, PredictionRow, PredictionRows
from ds_distill.data.readers import open_file
from ds_distill.data.sources import Source
from ds_distill.errors import UserError
from ds_distill.keys import among_keys, find_keys, sorted_keys
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
    state = [VERSION, rows.fingerprint, rows.names, rows.column, source.task.predicts]
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
