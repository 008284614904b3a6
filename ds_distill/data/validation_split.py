"""The two parts of a labelled split: one to fit routing, the other to choose epochs and students.

Routing that was fitted on a split (temperatures, a gate) looks too good on it, and so
does every student that follows it. So where an expertise phase reads the split by which epochs and
students are chosen, each of its examples is in one of two parts. Both have as many of each class,
and groups are whole: see `ds_distill.data.groups.assigned`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ds_distill.data.groups import Groups, assigned
from ds_distill.errors import UserError

CHOOSING_SPLIT = "validation"
"""The split by which epochs and students are chosen."""

PART = 104
"""Purpose of the hashes by which groups are assigned to the two parts."""

FEWEST_EXAMPLES = 20
"""Labelled examples that a fit needs, for five folds."""


def fitting_part(strata: np.ndarray, groups: Groups, split: str, seed: int) -> np.ndarray:
    """Indices of a split's labelled examples that may be fitted on, ascending: about half of them
    in the choosing split, all of them in any other.

    strata: int64 [N], see `strata_of`. groups: of the split's N examples.

    Raises UserError when they are too few.
    """
    chosen = labelled = strata >= 0
    part = ""
    if split == CHOOSING_SPLIT:
        chosen = labelled & _fits(strata, groups, seed)
        part = f" of which {chosen.sum()} may be fitted on (the others choose epochs and students),"
    if chosen.sum() < FEWEST_EXAMPLES:
        raise UserError(
            f"split {split!r} has {labelled.sum()} labelled examples,{part} but "
            f"fitting the routing needs at least {FEWEST_EXAMPLES}. Add examples to it, or name "
            "a larger split, e.g. phases.expertise.split=train."
        )
    return np.flatnonzero(chosen)


def choosing_part(
    strata: np.ndarray, groups: Groups, fitted: Mapping[str, Groups], seed: int
) -> np.ndarray:
    """Indices of the choosing split's examples that choose, ascending: those of whose groups
    nothing is fitted on.

    strata, groups: as in `fitting_part`, of the choosing split.
    fitted: groups of each split that an expertise phase reads, by the split's name.

    Raises UserError when there are none.
    """
    free = np.ones(len(strata), dtype=bool)
    for split, others in fitted.items():
        free &= ~(_fits(strata, groups, seed) if split == CHOOSING_SPLIT else groups.touch(others))
    if fitted and not (free & (strata >= 0)).any():
        raise UserError(
            f"split {CHOOSING_SPLIT!r}: routing is fitted on all of its {len(strata)} examples "
            f"(in split {', '.join(fitted)}), so none is left to choose epochs and students. "
            "Add examples to it, or name another split with phases.expertise.split=NAME."
        )
    return np.flatnonzero(free)


def _fits(strata: np.ndarray, groups: Groups, seed: int) -> np.ndarray:
    """Whether each example is in the fitting part: bool [N]."""
    return assigned(groups.group_keys, strata, 2, seed, PART) == 0
