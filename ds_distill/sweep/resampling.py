"""What the test examples add to chance: the scores of runs' students on the same draws of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import resampled
from ds_distill.evaluation.seeds import variance_of_examples
from ds_distill.sweep.grid import Variant
from ds_distill.sweep.side_by_side import evaluations


@dataclass(frozen=True)
class Drawn:
    """The score of a run's student on draws of the test examples."""

    mark: str
    """The same for runs that were judged on the same examples, in the same groups."""
    scores: np.ndarray
    """float64 [R], see `resampled`."""


Draws = Callable[[Variant, str], Drawn | None]
"""Of a student of a run; None where its predictions are not there."""


def drawn(folder: Path, student: str) -> Drawn | None:
    """Of a student of a run, where the shipped one was judged, see `evaluation_of_student`; None
    where an earlier version has made the run, or its predictions are gone."""
    try:
        one = next((one for one in evaluations(folder, "") if one.stands_for_run), None)
    except UserError:
        return None
    if one is None or (saved := one.saved) is None or student not in saved.models:
        return None
    scores = resampled(saved.models[student], one.metric, groups=saved.groups)
    groups = np.unique(saved.groups, return_inverse=True)[1]
    return Drawn(f"{one.examples} {xxhash.xxh3_64_hexdigest(groups.tobytes())}", scores)


def examples_of(
    ours: Sequence[Drawn | None], theirs: Sequence[Drawn | None] | None = None
) -> float | None:
    """The `variance_of_examples` of runs that differ in their seeds, or of their differences to
    others, one by one; None where they are not all over the same draws."""
    every = [*ours, *(theirs or ())]
    known = [one for one in every if one is not None]
    if not known or len(known) < len(every) or len({one.mark for one in known}) > 1:
        return None
    scores = np.stack([one.scores for one in known], axis=1)
    if theirs is not None:
        scores = scores[:, : len(ours)] - scores[:, len(ours) :]
    return variance_of_examples(scores)
