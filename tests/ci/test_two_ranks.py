"""Two ranks whose weights are sharded have the losses of one whose are not: with each kind of rows,
student, head and order of phases. They start once for all recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ci.test_expand_vocabulary import settings as expanded  # noqa: F401
from ci.test_follow import adapt_and_distil, trained  # noqa: F401
from ci.test_masked_lm_heads import distilled, models  # noqa: F401
from ci.test_shared_head import TOGETHER, head
from ci.test_students import narrow  # noqa: F401
from runs import alone_and_on_two_ranks, check_same_losses, recipe_of, results

TRAININGS = {
    "token-classification": ["first", "second", "average", "gate", "live"],
    "multi-label": ["first", "average", "expertise", "live"],
    "narrow": ["student"],
    "expanded": ["student"],
    "followed": ["live", "from-cache"],
    "heads": ["student"],
    "together": [TOGETHER, "student"],
    "tasks": ["base", "first", "student"],
}
"""Recipe -> its trainings that are compared."""


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest,
    materials: Path,
    toy_task: Path,
    tiny_models: dict[str, Path],
    command_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    asked = request.getfixturevalue
    masked_lm, of_heads = asked("masked_lm_settings"), asked("models")
    heads = distilled(masked_lm, of_heads["mobilebert"], of_heads["eurobert"])
    places = {"materials": materials, "task": toy_task, "toy": tiny_models["toy"]}
    of_file = ("token-classification", "multi-label", "together", "tasks")
    recipes: dict[str, Any] = {
        **{name: recipe_of(name, **places) for name in of_file},
        **{name: asked(name) for name in ("narrow", "expanded")},
        "followed": adapt_and_distil(asked("trained")),
        "heads": {**heads, "student_resident": False},
    }
    root = tmp_path_factory.mktemp("ranks")
    return alone_and_on_two_ranks(recipes, command_environment, root)


@pytest.mark.parametrize(
    ("name", "training"), [(name, one) for name, all_ in TRAININGS.items() for one in all_]
)
def test_losses_on_two_ranks_at_stage_3_are_those_on_one_at_stage_0(
    folders: dict[str, Path], name: str, training: str
) -> None:
    check_same_losses(folders[name], training)


def test_two_ranks_fit_what_one_does(folders: dict[str, Path]) -> None:
    one, two = (
        next(r for r in results(folders["multi-label"] / run)["phases"] if r["kind"] == "expertise")
        for run in ("run", "3")
    )
    assert one["experts"] == two["experts"]


def test_teachers_that_are_trained_together_on_two_ranks_have_one_head(
    folders: dict[str, Path],
) -> None:
    reads, spells = (head(folders["together"] / "3", name) for name in ("reads", "spells"))
    assert all(torch.equal(weight, spells[name]) for name, weight in reads.items())
    assert reads["prediction.weight"].any()


def test_one_rank_resamples(folders: dict[str, Path]) -> None:
    """The others would only take its memory bandwidth, and as long."""
    found = folders["tasks"].parent.glob("resampled-by-*")
    assert [path.name for path in found] == ["resampled-by-0"]
