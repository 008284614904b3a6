"""Convert a reader's rows to a file of validated examples.

The fast path takes whole Arrow batches. When anything is unusual, the rows are read again one by
one, which finds the first mistake and its location. So all messages come from one path, and correct
files do not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from ds_distill.data.labels import (
    LabelIds,
    LabelSets,
    Numbers,
    Odd,
    is_labelled,
    is_text,
    label_array,
    plain,
)
from ds_distill.data.readers import BATCH, AllOrNone, Reader, text_of
from ds_distill.errors import UserError
from ds_distill.keys import content_keys, hash_keys
from ds_distill.process.activity import mark
from ds_distill.recipe.data import Columns

EXAMPLES = pa.schema(
    [
        ("text", pa.string()),
        ("label", pa.int64()),
        ("key_hi", pa.int64()),
        ("key_lo", pa.int64()),
    ]
)
"""Columns of converted examples; pairs have `text_b` after `text`."""

Labels = LabelIds | LabelSets | Numbers
"""How labels are read."""

_NO_LABEL = " -1 is none where task.labels does not name it."

_KEEP_PER_CLASS = 0x6B656570  # stream of hash_keys: which examples a cap keeps


def convert(
    reader: Reader,
    columns: Columns,
    labels: list[str],
    path: Path,
    *,
    many_labels: bool = False,
    numbers: bool = False,
    found: bool = False,
) -> None:
    """Write a reader's rows as examples to an Arrow stream file.

    Columns: those of EXAMPLES. `label` is the position in `labels`, and -1 in all rows when no
    row has a label (or `labels` is empty: the split has no such column).

    many_labels: a row has a list of labels, and `label` is one 0 or 1 for each of them: a list of
        int8. Without labels it is as above.
    numbers: a row's label is a number, and `label` is float32. `labels` is empty then. Where no row
        has one it is NaN in all, and without such a column as above.

    found: as of `LabelIds`.

    Raises UserError with the location of the first invalid row.
    """
    names = [columns.text] + ([columns.text_b] if columns.text_b is not None else [])
    ids: Labels | None = None
    if labels:
        kind = LabelSets if many_labels else LabelIds
        ids = kind(labels, reader, columns.label, found=found)
    elif numbers and columns.label in reader.columns():
        ids = Numbers(reader, columns.label)
    try:
        count = write_examples(path, names, _fast_batches(reader, names, columns.label, ids))
    except (Odd, pa.ArrowException, OSError, ValueError):
        count = write_examples(path, names, _exact_batches(reader, names, columns.label, ids))
    if count == 0:
        raise UserError(f"{reader.name}: no rows. Put at least one example there.")


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


def _fast_batches(
    reader: Reader, names: list[str], label: str, ids: Labels | None
) -> Iterator[tuple[list[pa.ChunkedArray], np.ndarray]]:
    """(text columns, class ids) in batches. Raises Odd, ArrowException, OSError, ValueError."""
    labelled: set[bool] = set()
    for table in reader.tables([*names, label] if ids else names):
        table.validate(full=True)  # Arrow silently reads JSON that is not UTF-8
        texts = [plain(table[name]) for name in names]
        if any(not is_text(column.type) or column.null_count for column in texts):
            raise Odd
        if ids is None:
            classes = np.full(len(table), -1, dtype=np.int64)
        else:
            if label not in table.column_names:
                raise Odd
            classes = ids.of_column(table[label])
            labelled.update(np.unique(is_labelled(classes)).tolist())
            if len(labelled) > 1:
                raise Odd
        yield [column.cast(pa.string()) for column in texts], classes


def _exact_batches(
    reader: Reader, names: list[str], label: str, ids: Labels | None
) -> Iterator[tuple[list[pa.ChunkedArray], np.ndarray]]:
    """The same, row by row. Raises UserError with the location of the first mistake."""
    advice = _NO_LABEL if isinstance(ids, LabelIds) else ""
    all_or_none = AllOrNone(label, "label", "one", advice)

    def checked() -> Iterator[tuple[list[str], int | np.ndarray | np.float32]]:
        for location, row in reader.rows([*names, label] if ids else names):
            texts = [text_of(row, name, location) for name in names]
            number = -1 if ids is None else ids.of_value(row.get(label), location)
            all_or_none.see(bool(is_labelled(np.array([number]))[0]), location)
            yield texts, number

    rows = checked()
    while batch := list(islice(rows, BATCH)):
        columns = zip(*(texts for texts, _ in batch), strict=True)
        texts = [pa.chunked_array([pa.array(column, pa.string())]) for column in columns]
        yield texts, np.array([number for _, number in batch])


def write_examples(
    path: Path,
    names: list[str],
    batches: Iterable[tuple[list[pa.ChunkedArray], np.ndarray]],
) -> int:
    """Write examples to an Arrow stream file. Returns their number.

    names: of the text columns, one or two. batches: these columns, and the class ids, int64 [n], or
        of each label whether a row has it, int64 [n, L]; or the numbers, float32 [n].
    """
    schema = EXAMPLES
    if len(names) > 1:
        schema = schema.insert(1, pa.field("text_b", pa.string()))
    count = 0
    writer: pa.RecordBatchStreamWriter | None = None
    with pa.OSFile(str(path), "wb") as sink:
        for texts, classes in batches:
            mark("reads data")
            keys = content_keys(*(column.to_pylist() for column in texts))
            labels = label_array(classes)
            if writer is None:
                field = pa.field("label", labels.type)
                schema = schema.set(schema.get_field_index("label"), field)
                writer = pa.ipc.new_stream(sink, schema)
            table = pa.table([*texts, labels, keys[:, 0], keys[:, 1]], schema=schema)
            writer.write_table(table, max_chunksize=BATCH)
            count += len(table)
        if writer is not None:
            writer.close()
    return count
