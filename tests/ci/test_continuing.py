"""A training that was stopped goes on with the weights and scores that belong together, and says
where."""

import pytest
from unit.test_continuing import (
    recipe,  # noqa: F401
    stop_before,
)

from ds_distill import load_recipe, run_recipe

pytestmark = pytest.mark.usefixtures("in_this_process")


def test_a_training_without_a_checkpoint_starts_anew_and_says_so(
    recipe, tmp_path, command_environment, capsys
):
    folder = tmp_path / "run"
    stop_before(13, recipe, folder, command_environment)
    run_recipe(load_recipe(recipe), folder, resume=True)
    said = capsys.readouterr().out
    assert "student: starts anew, because it was stopped before its first checkpoint, at" in said
    assert "step 13 or soon after. save_every makes them more often." in said
    assert "accuracy" in said and "after epoch 2, the best so far\n" in said
