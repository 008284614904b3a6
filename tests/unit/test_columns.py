"""Columns of splits as arrays, beside what datasets gives row by row."""

from itertools import pairwise

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_distill.data.columns import arrow_column, as_numpy, flat_lists

COLUMNS = {
    "key_hi": (st.integers(-(2**63), 2**63 - 1), pa.int64()),
    "tokens": (st.integers(-(2**31), 2**31 - 1), pa.int32()),
    "number": (st.floats(width=32, allow_nan=True), pa.float32()),
    "several": (st.lists(st.integers(-1, 1), min_size=3, max_size=3), pa.list_(pa.int8())),
    "tags": (st.lists(st.integers(-1, 300), max_size=4), pa.list_(pa.int16())),
    "counted": (st.lists(st.booleans(), max_size=4), pa.list_(pa.bool_())),
}


@st.composite
def splits(draw):
    """A split of some chunks, whole, a part of it, or a selection of a selection."""
    parts = []
    for rows in draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)):
        values = {
            name: pa.array([draw(value) for _ in range(rows)], kind)
            for name, (value, kind) in COLUMNS.items()
        }
        parts.append(pa.table(values))
    data = datasets.Dataset(pa.concat_tables(parts))
    for _ in range(draw(st.integers(0, 2))):
        if len(data):
            data = data.select(draw(st.lists(st.integers(0, len(data) - 1), max_size=9)))
    if draw(st.booleans()):
        data = data.select(range(len(data) // 2, len(data)))
    return data


@given(splits())
def test_columns_are_those_of_the_rows(data):
    rows = [data[number] for number in range(len(data))]
    for name, kind in (("key_hi", "int64"), ("tokens", "int64"), ("number", "float32")):
        found = as_numpy(data, name)
        assert found.dtype == kind and found.flags.writeable
        np.testing.assert_array_equal(found, np.array([row[name] for row in rows], kind))
        assert arrow_column(data, name).to_pylist() == pytest.approx(
            [row[name] for row in rows], nan_ok=True
        )
    several = as_numpy(data, "several")
    assert several.dtype == np.int64 and several.tolist() == [row["several"] for row in rows]
    for name in ("tags", "counted"):
        offsets, values = flat_lists(data, name)
        assert [len(rows) + 1, offsets[-1]] == [len(offsets), len(values)]
        lists = [values[a:b].tolist() for a, b in pairwise(offsets)]
        assert lists == [row[name] for row in rows]
