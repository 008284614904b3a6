"""What a resumed run may have otherwise than it began with."""

import pytest
from runs import written

from ds_distill.errors import UserError
from ds_distill.files import read_json, write_json
from ds_distill.process.failures import Failure, record_failure
from ds_distill.recipe import load_recipe
from ds_distill.recipe.phases import PHASES
from ds_distill.run.folder import Change, RunFolder


@pytest.fixture
def recipe(tmp_path, toy_settings):
    path = written(toy_settings, tmp_path, "toy")
    return lambda *overrides: load_recipe(path, overrides)


@pytest.fixture
def folder(tmp_path, recipe):
    """Of a run whose first phase is done."""
    made = RunFolder(tmp_path / "run")
    made.path.mkdir()
    made.create(recipe(), {"ranks": 1, "date": "a"})
    done = made.record(0, "teach-first")
    done.parent.mkdir()
    write_json(done, {})
    return made


@pytest.mark.parametrize(
    "overrides",
    [
        ["timeout_minutes=3", "logging.every=1"],
        ["phases.distil.learning_rate=1e-4", "phases.distil.micro_batch_size=2"],
        ["phases.cache.batch_size=4", "phases.evaluate.batch_size=4"],
        ["phases.teach-second.save_every=7"],
        ["deepspeed=zero3_fp32", "student_resident=false"],
    ],
)
def test_what_may_change_is_in_the_record(overrides, folder, recipe):
    folder.check_new_or_same(recipe(*overrides), resume=True)
    folder.create(recipe(*overrides), {"ranks": 1, "date": "b"})
    starts = read_json(folder.environment)["starts"]
    assert [len(start["changes"]) for start in starts] == [0, len(overrides)]
    folder.check_new_or_same(recipe(*overrides), resume=True)
    folder.create(recipe(*overrides), {"ranks": 1, "date": "c"})
    again = read_json(folder.environment)["starts"]
    assert again[:2] == starts and again[2]["changes"] == []
    with pytest.raises(UserError, match="differs from the run's own"):
        folder.check_new_or_same(recipe("seed=1"), resume=True)


@pytest.mark.parametrize(
    "override", ["phases.teach-first.learning_rate=1e-4", "training.learning_rate=1e-4"]
)
def test_the_rate_of_a_phase_that_is_done_may_not_change(override, folder, recipe):
    with pytest.raises(UserError, match=r"phases\.0\.fine-tune\.learning_rate"):
        folder.check_new_or_same(recipe(override), resume=True)


def test_auto_goes_on_where_the_folder_holds_this_recipes_run(folder, recipe, tmp_path):
    folder.check_new_or_same(recipe(), resume="auto")
    RunFolder(tmp_path / "new").check_new_or_same(recipe(), resume="auto")
    with pytest.raises(UserError, match=r"seed \(was 0, now 1\)"):
        folder.check_new_or_same(recipe("seed=1"), resume="auto")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        RunFolder(tmp_path / "other").check_new_or_same(recipe(), resume="auto")


def test_a_phase_of_a_package_that_trains_keeps_its_batches(monkeypatch):
    """Only fine-tune and distil were known to train: another phase's batches could change."""
    monkeypatch.setitem(PHASES, "own", PHASES["fine-tune"])
    for name, allowed in (("batch_size", False), ("learning_rate", True)):
        change = Change(("phases", "0", "own", name), 16, 8)
        assert change.is_allowed(set()) is allowed


def test_other_phases_are_named_as_the_recipe_has_them(folder, recipe):
    """All settings of both were shown, as Python prints them."""
    without = recipe().model_copy(update={"phases": recipe().phases[:1]})
    with pytest.raises(UserError) as refused:
        folder.check_new_or_same(without, resume=True)
    assert "phases (was [teach-first (fine-tune), teach-second (fine-tune), " in str(refused.value)
    assert "now [teach-first (fine-tune)])" in str(refused.value)


def test_starts_keep_their_environments(folder, recipe):
    for date, ranks in (("b", 1), ("c", 2)):
        folder.create(recipe(), {"ranks": ranks, "date": date})
    found = read_json(folder.environment)
    assert (found["ranks"], found["date"]) == (2, "c")
    began = [(start["ranks"], start["date"], start["done"]) for start in found["starts"]]
    assert began == [(1, "a", 0), (1, "b", 1), (2, "c", 1)]


def test_without_a_run_nothing_has_changed(tmp_path, recipe):
    assert RunFolder(tmp_path / "run").changes(recipe()) == []


@pytest.mark.parametrize("name", ["checkpoints", "models", "metrics.jsonl", "lock", "failures"])
def test_a_link_out_of_the_folder_is_refused_before_anything_is_done(
    name, folder, recipe, tmp_path
):
    victim = tmp_path / "victim"
    (victim / "rank-00000.json").parent.mkdir()
    (victim / "rank-00000.json").touch()
    target = victim / "not there" if "." in name else victim
    (folder.path / name).symlink_to(target)
    for resume in (True, False):
        with pytest.raises(UserError, match=rf"{name}: is a link to .*victim.* Remove the link"):
            folder.check_new_or_same(recipe(), resume=resume)
    record_failure(folder.path, Failure(0, "host", 0.0, "mistake", "a link"))
    assert [path.name for path in victim.iterdir()] == ["rank-00000.json"]


def test_a_folder_that_is_a_link_itself_is_continued(folder, recipe, tmp_path):
    (tmp_path / "elsewhere").symlink_to(folder.path)
    RunFolder(tmp_path / "elsewhere").check_new_or_same(recipe(), resume=True)
