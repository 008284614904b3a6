"""The columns of examples, and which of them a cap keeps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ds_distill.keys import hash_keys

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
