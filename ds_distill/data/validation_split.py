"""The two parts of a labelled split: one to fit routing, the other to choose epochs and students.

Routing that was fitted on a split (temperatures, confusions, a gate) looks too good on it, and so
does every student that follows it. So where an expertise phase reads the split by which epochs and
students are chosen, each of its examples is in one of two parts. The part depends only on the seed
and the example's key (or its group, see `Examples.group_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping

import datasets
import numpy as np

from ds_distill.data.keys import hash_keys
from ds_distill.errors import UserError

CHOOSING_SPLIT = "validation"
"""The split by which epochs and students are chosen."""

PART = 104
"""Purpose of the hashes that assign examples to the two parts."""

FEWEST_EXAMPLES = 20
"""Labelled examples that a fit needs, for five folds."""


def fitting_part(labelled: np.ndarray, group_keys: np.ndarray, split: str, seed: int) -> np.ndarray:
    """Indices of a split's labelled examples that may be fitted on, ascending: about half of them
    in the choosing split, all of them in any other.

    labelled: bool [N]. group_keys: int64 [N, 2], see `Examples.group_keys`.

    Raises UserError when they are too few.
    """
    chosen = known = labelled
    part = ""
    if split == CHOOSING_SPLIT:
        chosen = known & _fits(group_keys, seed)
        part = f" of which {chosen.sum()} may be fitted on (the others choose epochs and students),"
    if chosen.sum() < FEWEST_EXAMPLES:
        raise UserError(
            f"split {split!r} has {known.sum()} labelled examples,{part} but "
            f"fitting the routing needs at least {FEWEST_EXAMPLES}. Add examples to it, or name "
            "a larger split, e.g. phases.expertise.split=train."
        )
    return np.flatnonzero(chosen)


def choosing_part(
    labelled: np.ndarray, group_keys: np.ndarray, fitted: Mapping[str, np.ndarray], seed: int
) -> np.ndarray:
    """Indices of the choosing split's examples that choose, ascending: those that nothing is fitted
    on.

    labelled, group_keys: as in `fitting_part`, of the choosing split.
    fitted: group keys of each split that an expertise phase reads, by the split's name.

    Raises UserError when there are none.
    """
    free = np.ones(len(labelled), dtype=bool)
    for split, others in fitted.items():
        if split == CHOOSING_SPLIT:
            free &= ~_fits(group_keys, seed)
        else:
            free &= ~np.isin(_one_value(group_keys), _one_value(others))
    if fitted and not (free & labelled).any():
        raise UserError(
            f"split {CHOOSING_SPLIT!r}: routing is fitted on all of its {len(labelled)} examples "
            f"(in split {', '.join(fitted)}), so none is left to choose epochs and students. "
            "Add examples to it, or name another split with phases.expertise.split=NAME."
        )
    return np.flatnonzero(free)


def groups_of(data: datasets.Dataset) -> np.ndarray:
    """A split's group keys: int64 [N, 2]."""
    columns = data.with_format("numpy")  # not `.data`, which also has what a cap left out
    if "group" in data.column_names:
        groups = columns["group"][:]
        return np.stack([groups, np.zeros_like(groups)], axis=1)
    return np.stack([columns["key_hi"][:], columns["key_lo"][:]], axis=1)


def _fits(group_keys: np.ndarray, seed: int) -> np.ndarray:
    """Whether each example is in the fitting part: bool [N]."""
    return hash_keys(group_keys, seed, PART) >= 0


def _one_value(keys: np.ndarray) -> np.ndarray:
    """int64 [N, 2] as N values that can be compared."""
    pairs = np.ascontiguousarray(keys)
    return pairs.view([("high", np.int64), ("low", np.int64)])[:, 0]
