"""Columns of a split as arrays, the files that they are read from, and which examples a cap keeps.

datasets' numpy format makes a Python object of each value, and every format gathers the rows of a
selection one by one: either takes about a hundred times as long as what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import AcquireReturnProxy, FileLock, Timeout

from ds_distill.errors import UserError
from ds_distill.files import new_file
from ds_distill.keys import hash_keys
from ds_distill.process.activity import mark


def build_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Create a file with `write(temporary path)` unless it exists; returns `target`.

    Of several processes one writes and the others wait. The file appears complete or not at all.

    Raises UserError when the folder cannot be written or its disk is full.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(FileLock(f"{target}.lock")):
            if not target.exists():
                with new_file(target) as temporary:
                    write(temporary)
    except OSError as error:
        raise UserError(
            f"{target.parent}: converted data cannot be written here: "
            f"{error.strerror or error}. Free some space, or set HF_DATASETS_CACHE to a folder "
            "that can be written."
        ) from error
    return target


def _locked(lock: FileLock) -> AcquireReturnProxy:
    """Take a lock that ends with the process that has it; a long wait is announced."""
    try:
        return lock.acquire(timeout=5)
    except Timeout:
        print(f"Waiting for another process that writes {lock.lock_file[:-5]} ...", flush=True)
        return lock.acquire()


# ----------------------------------------------------------------------------------------- columns


BATCH = 10_000
"""Rows that are converted at once."""


def write_columns(
    path: Path, schema: pa.Schema, batches: Iterable[list[Any]], activity: str = "reads data"
) -> int:
    """Write an Arrow stream file. Returns the number of its rows.

    batches: the columns of some rows each, arrays or lists. activity: what the watchdog says.
    """
    count = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for columns in batches:
            mark(activity)
            table = pa.table(columns, schema=schema)
            writer.write_table(table)
            count += len(table)
    return count


def as_numpy(data: datasets.Dataset, column: str) -> np.ndarray:
    """A column's values: [N], or [N, L] of lists of one length; integers are int64."""
    values = arrow_column(data, column)
    flat = flat_values(values)
    flat = np.array(flat, dtype=np.int64 if flat.dtype.kind in "iu" else flat.dtype)
    if not _is_nested(values.type):
        return flat
    return flat.reshape(len(values), len(flat) // max(len(values), 1))


def flat_lists(data: datasets.Dataset, column: str) -> tuple[np.ndarray, np.ndarray]:
    """A column of N lists: where each begins in all R elements, and R, int64 [N + 1]; the elements,
    [R]."""
    lists = arrow_column(data, column)
    lengths = pc.list_value_length(lists).to_numpy()
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), flat_values(lists)


def labels_of(data: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The labels of N units' rows, int64 or of numbers float32 [R], or int64 [R, L]; and the first
    row of each, and R: int64 [N + 1]. Units whose label is no list have one row."""
    offsets = np.arange(len(data) + 1)
    if pa.types.is_list(data.data.column("label").type):
        offsets, labels = flat_lists(data, "label")
    else:
        labels = as_numpy(data, "label")
    return labels if labels.dtype.kind == "f" else labels.astype(np.int64), offsets


def example_keys(data: datasets.Dataset) -> np.ndarray:
    """Content keys: int64 [N, 2]."""
    return np.stack([as_numpy(data, "key_hi"), as_numpy(data, "key_lo")], axis=1)


def arrow_column(data: datasets.Dataset, column: str) -> pa.ChunkedArray:
    """Of N values; None where one is missing."""
    whole = data.data.column(column)  # of all rows, also those that a selection has not
    return whole if data._indices is None else whole.take(data._indices.column(0))


def flat_values(values: pa.ChunkedArray) -> np.ndarray:
    """The values of a column, of each element of its lists."""
    nested = _is_nested(values.type)
    return np.asarray((pc.list_flatten(values) if nested else values).to_numpy())


def _is_nested(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


# ---------------------------------------------------------------------------------------- examples


EXAMPLES = pa.schema(
    [
        ("text", pa.string()),
        ("label", pa.int64()),
        ("key_hi", pa.int64()),
        ("key_lo", pa.int64()),
    ]
)
"""Columns of texts with a class id, -1 in all rows of a split without labels. Pairs have `text_b`
after `text`; see `text_schema`."""

WORDS = pa.schema(
    [
        ("words", pa.list_(pa.string())),
        ("label", pa.list_(pa.int16())),
        ("key_hi", pa.int64()),
        ("key_lo", pa.int64()),
        ("widened", pa.int32()),
    ]
)
"""Of lists of words: words; the class id of each one's tag, -1 where the split has no tags; and how
many of the text's spans have more than they say, see `spans.Tagged`."""

QUESTIONS = pa.schema(
    [
        ("text", pa.string()),
        ("text_b", pa.string()),
        ("answers", pa.list_(pa.struct([("text", pa.string()), ("start", pa.int64())]))),
        ("label", pa.int64()),
        ("key_hi", pa.int64()),
        ("key_lo", pa.int64()),
    ]
)
"""Of questions: question, context, right answers, and how many these are (-1 where the split has
none)."""

_KEEP_PER_CLASS = 0x6B656570  # stream of hash_keys: which examples a cap keeps


def text_schema(pairs: bool, label: pa.DataType | None = None) -> pa.Schema:
    """label: of what is no class id: float32, a number, NaN where a split has none; or of any
    number of labels 0 or 1 for each, int8 lists, -1 where a split has none."""
    schema = EXAMPLES.insert(1, pa.field("text_b", pa.string())) if pairs else EXAMPLES
    at = schema.get_field_index("label")
    return schema.set(at, pa.field("label", label or pa.int64()))


def keep_per_class(classes: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Positions of `count` examples of each class (all, where there are fewer), ascending.

    classes: int64 [N]. keys: int64 [N, 2], content keys. Those with the smallest hashes are
    chosen, so the choice does not depend on the order, and a smaller count gives a subset of a
    larger one.
    """
    hashes = hash_keys(keys, _KEEP_PER_CLASS)
    order = np.lexsort((hashes, classes))
    ordered = classes[order]
    starts = np.searchsorted(ordered, ordered)  # the first position of each example's class
    return np.sort(order[np.arange(len(order)) - starts < count])
