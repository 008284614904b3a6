"""Every built-in recipe, whole: its tasks, phases, losses and policies as its file has them, with
toy models, generated data and a few steps in place of its own. A new recipe is run without being
named here."""

import pytest
from e2e.test_recipes import check_run, runs


@pytest.mark.parametrize(("name", "small"), list(runs(later=True)))
def test_a_builtin_recipe_runs_whole(name, small, tmp_path):
    check_run(name, small, tmp_path)
