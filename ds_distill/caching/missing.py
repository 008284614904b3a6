"""What a cache lacks of a phase's splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_distill.cache.build_plan import Plan, block_rows_for
from ds_distill.cache.format import MANIFEST, Teachers
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.data.batches import Collator, Examples
from ds_distill.keys import among_keys, distinct_keys

ATTENTION = "attention"
"""Key of a fingerprint: what computed a teacher's attention. Signals are read whatever computed
them, but signals of other attention are not added to them."""


@dataclass(frozen=True)
class Missing:
    """What a cache lacks of a split."""

    examples: Examples
    collate: Collator
    indices: np.ndarray
    """int64: one example for each content key that is missing, in the plan's order."""


def missing_from(
    path: Path,
    splits: list[tuple[Examples, Collator]],
    teachers: Teachers,
) -> tuple[Plan, list[Missing]]:
    """What the cache lacks. Raises UserError when the cache that is there is of other
    teachers, or lacks something that this run's attention would compute otherwise."""
    reader = CacheReader(path) if (path / MANIFEST).is_file() else None
    if reader is not None:
        reader.check_same(
            {
                name: (
                    {key: value for key, value in its_fingerprint.items() if key != ATTENTION},
                    schema,
                )
                for name, (its_fingerprint, schema) in teachers.items()
            }
        )
    missing = _distinct(
        splits, lambda keys: np.full(len(keys), True) if reader is None else ~reader.holds(keys)
    )
    count = sum(len(part.indices) for part in missing)
    if reader is not None:
        if count:
            reader.check_same(teachers)
        block_rows, first_block = reader.manifest.block_rows, reader.manifest.blocks
    else:
        tokens = max(float(np.mean(collate.lengths)) for _, collate in splits)
        row_bytes = max(_example_bytes(schema, tokens) for _, schema in teachers.values())
        block_rows, first_block = block_rows_for(count, row_bytes), 0
    keys_by_split = [part.examples.keys.numpy()[part.indices] for part in missing]
    return Plan(first_block, block_rows, keys_by_split), missing


def added_by(
    path: Path, splits: list[tuple[Examples, Collator]], first_block: int
) -> list[Missing]:
    """What a finished build has added to the cache, as it was missing before."""
    reader = CacheReader(path)
    first_row = first_block * reader.manifest.block_rows
    return _distinct(splits, lambda keys: reader.indices(keys) >= first_row)


def _distinct(
    splits: list[tuple[Examples, Collator]], is_missing: Callable[[np.ndarray], np.ndarray]
) -> list[Missing]:
    """Of each split the examples that are missing and in no split before it.

    is_missing: int64 [n, 2], content keys -> bool [n].
    """
    missing: list[Missing] = []
    seen = np.empty((0, 2), dtype=np.int64)
    for examples, collate in splits:
        keys = examples.keys.numpy()
        first = distinct_keys(keys)  # duplicates share a row
        first = first[is_missing(keys[first])]
        first = first[~among_keys(keys[first], seen)]
        seen = np.concatenate([seen, keys[first]])
        missing.append(_in_order(examples, collate, first))
    return missing


def _in_order(examples: Examples, collate: Collator, chosen: np.ndarray) -> Missing:
    """Longest first: one that does not fit in memory fails at once. Ties by key, so that the order
    of the examples in the data does not matter."""
    keys = examples.keys.numpy()[chosen]
    order = np.lexsort((keys[:, 1], keys[:, 0], -collate.lengths[chosen]))
    return Missing(examples, collate, chosen[order])


def _example_bytes(schema: SignalSchema, tokens: float) -> int:
    """About what an example takes: of its tokens some sixth is masked in each mask variant."""
    row = sum(size if size is not None else 64 for size in schema.items.values())
    return (
        row
        if schema.mask_variants is None
        else round(row * schema.mask_variants * max(tokens / 6, 1))
    )
