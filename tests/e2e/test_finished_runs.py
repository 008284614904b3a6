"""What is done with finished runs: a checkpoint's score is that of the run that made it, runs are
compared example by example, students are exported and pushed."""

import copy
import json
import shutil

import numpy as np
import pytest
from runs import command_line as ds_distill
from runs import written

from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.scores import build_metric
from ds_distill.recipe.metrics.classes import Accuracy


@pytest.fixture(scope="module")
def place(tmp_path_factory, toy_settings, command_environment):
    """A folder with a recipe of two tasks, a short and a longer run of it, and an evaluation of the
    longer run's student, all in this process."""
    here = tmp_path_factory.mktemp("evaluate")
    settings = copy.deepcopy(toy_settings)
    settings["tasks"] = {"kind": settings["task"], "again": settings.pop("task")}
    del settings["teachers"]["second"]
    settings["phases"] = [
        {"fine-tune": {"models": "first", "task": "kind"}},
        {"distil": {"losses": {"kl": {}}, "task": "kind"}},
        {"evaluate": {"task": "kind"}},
    ]
    written(settings, here, "toy")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DS_ACCELERATOR", "HF_DATASETS_CACHE", "OMP_NUM_THREADS"):
            patch.setenv(name, command_environment[name])
        for name, epochs in {"short": 1, "long": 6}.items():
            changes = [f"training.epochs={epochs}", "training.keep=last"]
            ds_distill("run", here / "toy.yaml", "--folder", here / name, *changes)
        yield here


def evaluated(folder):
    return dict(json.loads((folder / "results.json").read_text())["phases"][-1])


def test_a_checkpoint_is_scored_as_in_its_run(place):
    arguments = ["evaluate", place / "long", place / "toy.yaml", "--task", "kind"]
    done = ds_distill(*arguments, "--output", place / "judged")
    ours, runs = evaluated(place / "judged"), evaluated(place / "long")
    checkpoint = ours["models"]["checkpoint"]
    assert checkpoint["role"] == "checkpoint", "it teaches nobody"
    student = runs["models"]["student"]
    assert student["accuracy"] > runs["baseline"]["accuracy"]
    for key in student.keys() - {"role"}:
        assert checkpoint[key] == student[key], key
    assert ours["baseline"] == runs["baseline"]
    assert ours["examples_mark"] == runs["examples_mark"]
    low, high = student["to_baseline"]["interval"]
    assert f"{100 * low:+.1f} to {100 * high:+.1f}" in done.output
    for label, share in student["per_class"].items():
        rows = (line.split() for line in done.output.splitlines() if label in line.split())
        assert any(f"{share:.1%}" in row for row in rows), label
    assert "Accuracy on test" in (place / "judged" / "report.html").read_text()
    with pytest.raises(UserError, match="exists already"):
        ds_distill(*arguments, "--output", place / "judged")


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("toy", ["--task", "kind"], r"^model .*BertModel, which is no trained classifier.*Fine-tu"),
        ("unfinished", ["--task", "kind"], "no student yet"),
        ("long", [], r"several tasks.*--task: kind, again"),
        ("long", ["--task", "kinds"], r"no such task.*Did you mean `kind`"),
        ("long", ["--task", "kind", "--split", "tset"], "--split tset: there is no such split"),
        ("long", ["tasks.kind.labels=[food, weather, plant]", "--task", "kind"], "plant"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(model, more, message, place, tiny_models):
    (place / "unfinished").mkdir(exist_ok=True)
    (place / "unfinished" / "recipe.yaml").write_text("name: unfinished\n")
    folder = tiny_models.get(model, place / model)
    with pytest.raises(UserError, match=message):
        ds_distill("evaluate", folder, place / "toy.yaml", *more)


def test_the_report_of_a_finished_run_is_written_anew(place):
    """It wrote comparison.html where one was, in the folder that one was in."""
    report = place / "short" / "report.html"
    before = report.read_text(encoding="utf-8")
    report.unlink()
    done = ds_distill("report", place / "short")
    assert done.output == f"Report   {report}\n"
    assert report.read_text(encoding="utf-8") == before


def test_runs_stand_side_by_side_with_paired_intervals(place):
    page = place / "both.html"
    done = ds_distill("report", place / "short", place / "long", "--output", page)
    [group] = json.loads(page.with_suffix(".json").read_text())
    rows = group["models"]
    assert [*rows] == [
        f"{run} {model}" for run in ("short", "long") for model in ("first", "student")
    ]
    assert group["first"] == "short student" and rows["short student"]["to_first"] is None
    saved = [
        SavedPredictions.read(place / run / "predictions" / "02-evaluate.safetensors", "classes")
        for run in ("long", "short")
    ]
    long, short = (one.models["student"] for one in saved)
    right = [np.mean(one.logits.argmax(axis=1) == one.labels) for one in (long, short)]
    found = rows["long student"]["to_first"]
    assert found["difference"] == pytest.approx(right[0] - right[1])
    judge = build_metric("classes", Accuracy.Settings(), saved[0].labels)
    low, high = paired_interval(long, short, judge)
    assert found["interval"] == pytest.approx([low, high], abs=0.02)
    assert low > 0, "six epochs are better than one"
    assert f"{found['difference'] * 100:+.1f} (" in done.output
    assert f" {rows['long student']['parameters']:,} " in done.output


def test_runs_on_other_examples_are_set_apart(place, tmp_path):
    other, fewer = tmp_path / "validation", tmp_path / "fewer"
    command = ["evaluate", place / "short", place / "toy.yaml", "--task", "kind"]
    for options in (
        ["--split", "validation", "--output", other],
        ["tasks.kind.data.limit.test=20", "--output", fewer],
    ):
        done = ds_distill(*command, *options)
    few = "split test has 20 examples"
    assert f"WARNING: {few}" in done.output and few in (fewer / "report.html").read_text()
    assert [w for w in evaluated(fewer)["warnings"] if w.startswith(few)]
    gone = tmp_path / "gone"
    shutil.copytree(place / "long", gone)
    shutil.rmtree(gone / "predictions")
    page = tmp_path / "page.html"
    done = ds_distill("report", place / "short", other, gone, fewer, "--output", page)
    test, validation, twenty = json.loads(page.with_suffix(".json").read_text())
    runs = [[one["run"] for one in each["models"].values()] for each in (test, validation, twenty)]
    assert runs == [["short", "short", "gone", "gone"], ["validation"], ["fewer"]]
    assert "on test" in done.output and "20 examples." in done.output
    assert done.output.count("not comparable") == 2
    with pytest.raises(UserError, match="named twice"):
        ds_distill("report", other, other, "--output", page)
    with pytest.raises(UserError, match="no finished run"):
        ds_distill("report", tmp_path, "--output", page)


def test_what_is_pushed_is_a_run_and_is_listed_before(place, tmp_path):
    """tests/ci pushes it to a hub of its own."""
    done = ds_distill("push", place / "long", "me/student", "--dry-run")
    assert "model.safetensors" in done.output, done.output
    with pytest.raises(UserError, match=r"^bad//name: Repo id must"):
        ds_distill("push", place / "long", "bad//name", "--dry-run")
    with pytest.raises(UserError, match="is no run's folder"):
        ds_distill("push", tmp_path, "me/student")
