"""Finished runs side by side, by what they have written."""

import json

import numpy as np
import pytest
from records import EVALUATION

from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.run.folder import RunFolder
from ds_distill.sweep.found import drawn, examples_of
from ds_distill.sweep.side_by_side import side_by_side, side_table

ONE = EVALUATION["models"]["s"]


def run(folder, *models, groups=range(4)):
    """A finished run with an evaluate phase for each of `models`, all on the same examples."""
    made = RunFolder(folder)
    folder.mkdir()
    phases = [
        {**EVALUATION, "phase": f"evaluate-{number}", "models": each, "comparisons": []}
        for number, each in enumerate(models)
    ]
    made.results.write_text(json.dumps({"student": "s", "seconds": 1.0, "phases": phases}))
    labels = np.array([0, 1, 0, 1])
    for number, each in enumerate(models):
        file = made.predictions(number, f"evaluate-{number}")
        file.parent.mkdir(exist_ok=True)
        whole = [name for name, numbers in each.items() if "not_given" not in numbers]
        saved = {name: ClassPredictions(np.eye(2)[[0, 0, 0, number]], labels) for name in whole}
        SavedPredictions(["cat", "dog"], np.array(groups), saved).write(file)
    return folder


def shown(*folders):
    [group] = side_by_side(folders)
    return group, side_table(group).text()


def test_of_a_run_that_evaluates_twice_the_last_evaluation_is_shown(tmp_path):
    """As after each of two phases that distil."""
    later = {"s": {**ONE, "accuracy": 0.75}, "second": ONE}
    first, other = run(tmp_path / "first", {"s": ONE}, later), run(tmp_path / "other", {"s": ONE})
    group, text = shown(other, first)
    rows = {name: one["accuracy"] for name, one in group["models"].items()}
    assert rows == {"other s": 0.5, "first s": 0.75, "first second": 0.5}
    apart = [row["to_first"] and row["to_first"]["difference"] for row in group["models"].values()]
    assert apart == [None, 0.25, 0.25]
    assert " +25.0 (" in text
    own = [row["to_first"] for row in shown(first)[0]["models"].values()]
    assert own[0] is None and own[1]["difference"] == 0.0


def test_what_no_resample_tells_is_not_within_chance(tmp_path):
    """Two equal models: an interval of no width."""
    _, text = shown(run(tmp_path / "one", {"s": ONE}), run(tmp_path / "two", {"s": ONE}))
    assert " +0.0 (not known: every resample gives the same) " in text


@pytest.mark.parametrize(
    ("groups", "alike"), [([0, 1, 2, 3], True), ([3, 5, 7, 9], True), ([0, 0, 1, 1], False)]
)
def test_runs_that_were_judged_in_other_groups_have_no_draws_in_common(tmp_path, groups, alike):
    """Whatever the groups are called."""
    one, other = run(tmp_path / "one", {"s": ONE}), run(tmp_path / "o", {"s": ONE}, groups=groups)
    assert (examples_of([drawn(one, "s"), drawn(other, "s")]) is not None) == alike


def test_a_teacher_that_was_judged_on_some_of_the_examples_says_so(tmp_path):
    """As one by a file of predictions, which has no weights."""
    file = {**ONE, "role": "teacher", "examples": 3, "not_given": 1, "parameters": 0}
    folder = run(tmp_path / "one", {"f": file, "s": ONE})
    group, text = shown(folder)
    assert group["models"]["one f"]["not_given"] == 1
    [line] = [line for line in text.splitlines() if "one f (on 3 examples) " in line]
    assert "not comparable" in line and " - " in line and "0.0 M" not in line
    assert "Not comparable: judged on some of the examples alone, as (on N examples) says." in text
    assert "is gone" not in text
    gone = run(tmp_path / "gone", {"f": file, "s": ONE})
    for saved in gone.glob("predictions/*"):
        saved.unlink()
    text = shown(folder, gone)[1]
    assert "judged on some" in text and "the folder `predictions` of a run is gone" in text
