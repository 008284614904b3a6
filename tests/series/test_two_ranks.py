"""Two ranks at stage 3 have the losses of one at stage 0, with each kind of rows; in `make test-ci`
words and many labels have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ci.test_character_spans import settings as spans  # noqa: F401
from ci.test_extractive_qa import settings as questions  # noqa: F401
from ci.test_regression import settings as numbers  # noqa: F401
from runs import check_same_losses_on_two_ranks

TRAININGS = {
    "numbers": ["first", "second", "cached", "live", "control"],
    "questions": ["first", "student", "live"],
    "spans": ["reads", "spells", "average", "expertise", "live"],
}


@pytest.fixture(scope="module", params=TRAININGS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def settings(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(kind)


def test_losses_on_two_ranks_at_stage_3_are_those_on_one_at_stage_0(
    short_runs: dict[int, Path], kind: str
) -> None:
    for training in TRAININGS[kind]:
        check_same_losses_on_two_ranks(short_runs, training)
