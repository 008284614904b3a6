"""The index of a cache: small, and right about keys that are there and that are not."""

from __future__ import annotations

import numpy as np

from ds_distill.cache.index import KeyIndex, write_index
from ds_distill.files import checksum


def test_the_index_is_small_and_answers(tmp_path):
    file, count = tmp_path / "index.arrow", 10_000
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, size=(count, 2), dtype=np.int64)
    write_index(file, keys, np.arange(count, dtype=np.uint32))
    assert file.stat().st_size <= 20 * count + 1024
    index = KeyIndex(tmp_path, file.name, checksum(file))
    order = np.random.default_rng(1).permutation(count)
    assert (index.find(keys[order]) == order).all()
    assert (index.find(keys + 1) == -1).all()
