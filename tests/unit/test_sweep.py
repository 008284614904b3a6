"""Sweeps: their settings, the phases that runs share, and what is made of several seeds."""

import json
import math
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from records import EVALUATION
from texts import check_text

from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import mean_interval
from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.process.machine import visible_gpus
from ds_distill.recipe import load_recipe
from ds_distill.run.folder import RunFolder
from ds_distill.sweep.found import drawn, run_result, summary
from ds_distill.sweep.runs import Variant, check_folder, runs_of, split, variants
from ds_distill.sweep.sweep import Child, Pool, Sweep, begin_from, launches_at_once, shared_phases
from ds_distill.sweep.tables import sweep_table

VALUE = st.text(alphabet="abc019.+", min_size=1, max_size=5)
KEYS = st.sampled_from(["seed", "a.rate", "b.rate", "c"])


# ---------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5, 2e-5", ["1e-5", "2e-5"]),
        ("it's,b's", ["it's", "b's"]),
        ("[average,gate],[gate]", ["[average,gate]", "[gate]"]),
        ("{a: 'x,y', b: [\"z,\"]},'it''s, too'", ["{a: 'x,y', b: [\"z,\"]}", "'it''s, too'"]),
        ("it's a :)", ["it's a :)"]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(text, values):
    assert split(text) == values


@given(st.dictionaries(KEYS, st.lists(VALUE, min_size=1, max_size=3, unique=True), min_size=1))
@settings(max_examples=15)
def test_every_combination_is_a_run_with_a_folder_of_its_own(values):
    arguments = [f"{key}={','.join(each)}" for key, each in values.items()]
    if all(len(each) == 1 for each in values.values()):
        assert variants(arguments) == (arguments, [Variant(())])
        return
    fixed, found = variants(arguments)
    assert (
        len(found)
        == math.prod(map(len, values.values()))
        == len({variant.name for variant in found})
    )
    for variant in found:
        assert len(fixed) + len(variant.overrides) == len(values)
        assert "/" not in variant.name and len(variant.name) < 120
        swept_seed = len(values.get("seed", [])) > 1
        assert (variant.seed is not None) == swept_seed
        assert len(variant.setting) == len(variant.overrides) - swept_seed


def test_keys_with_a_plus_have_the_same_value_in_each_run():
    fixed, found = variants(["seed=1,2", "a+b.rate=0,1", "c+d=x"])
    assert fixed == ["c=x", "d=x"]
    assert [variant.overrides for variant in found] == [
        (f"seed={seed}", f"a.rate={rate}", f"b.rate={rate}") for seed in (1, 2) for rate in (0, 1)
    ]
    assert len({variant.name for variant in found}) == 4


def sweep_of(recipe, *arguments):
    folder = recipe.parent / "sweep"
    fixed, found = variants(arguments)
    recipes = {one: load_recipe(recipe, [*fixed, *one.overrides]) for one in found}
    return Sweep(folder, runs_of(recipes, folder))


def test_what_groups_of_runs_share_is_said_once(toy_recipe):
    """It was for each seed, in the same words. Runs may learn from other examples."""
    made = sweep_of(toy_recipe, "seed=1,2", "phases.distil.epochs=1,2")
    [count, shared] = made.what_it_does()
    assert count == "4 runs"
    assert shared.startswith("4 of them share, and run once in each of 2 groups: teach-first, ")
    assert len(sweep_of(toy_recipe, "task.data.limit.train=5,10").runs) == 2


def test_runs_that_teach_alike_share_beside_others(toy_recipe):
    """Nothing was shared where an earlier setting differs, too."""
    made = sweep_of(toy_recipe, "phases.teach-first.epochs=1,2", "phases.distil.epochs=1,2")
    assert [(len(group.runs), group.phases) for group in made.shared] == [(2, 4), (2, 4)]


def test_a_run_of_a_sweep_is_read_again_from_its_file(toy_recipe):
    made = sweep_of(toy_recipe, "seed=3,1", "name=a")
    made.begin()
    found = made.runs
    assert [(run.variant.name, run.recipe.seed) for run in found] == [("seed=3", 3), ("seed=1", 1)]
    assert [load_recipe(one.file) for one in found] == [one.recipe for one in found]


def test_a_sweep_goes_on_with_the_recipe_that_it_began_with(toy_recipe, tmp_path):
    """An edited one would pool its runs with those before as seeds of one setting."""
    written = toy_recipe.read_text()
    sweep_of(toy_recipe, "seed=1,2").begin()

    def resumed(*more):
        check_folder(tmp_path / "sweep", resume=True)
        return sweep_of(toy_recipe, "seed=1,2", *more)

    resumed()
    toy_recipe.write_text(f"{written}\ntimeout_minutes: 3\n")
    resumed().begin()  # no result depends on it
    edited = yaml.safe_load(written)
    edited["phases"][0]["fine-tune"]["learning_rate"] = 0.5
    toy_recipe.write_text(yaml.safe_dump(edited))
    with pytest.raises(UserError, match=r"\.learning_rate \(was 0\.01, now 0\.5\).*same recipe"):
        resumed()
    toy_recipe.write_text(written)
    with pytest.raises(UserError, match=r"other settings.*only one of the two has a run seed=1"):
        resumed("training.epochs=1,2")


# ----------------------------------------------------------------------------- shared phases


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ("phases.distil.epochs=2", 4),  # two teachers, expertise, cache
        ("phases.distil.losses.kl.temperature=4.0", 4),
        ("phases.teach-first.epochs=2", 0),
        ("seed=1", 0),
        ("task.max_length=16", 0),
        # Which cache is built, and which examples choose, depends on later phases.
        ("phases.distil.split=train", 0),
        ("phases.distil.teachers=live", 0),
    ],
)
def test_phases_before_the_first_that_differs_are_shared(change, shared, toy_recipe):
    both = [load_recipe(toy_recipe, more).as_written() for more in ([], [change])]
    assert shared_phases(*both) == shared


def test_a_run_begins_from_a_shared_one_and_neither_changes_the_other(toy_recipe, tmp_path):
    shared, run, weights = tmp_path / "shared", tmp_path / "run", "models/00-first/model"
    texts = {weights: "weights", "phases/00-teach.json": "{}", "metrics.jsonl": "one\n"}
    for name, text in {**texts, "lock": "{}", "recipe.yaml": "its own"}.items():
        (shared / name).parent.mkdir(parents=True, exist_ok=True)
        (shared / name).write_text(text)
    begin_from(shared, run, load_recipe(toy_recipe, ["phases.distil.epochs=2"]))
    assert load_recipe(run / "recipe.yaml").phases[4].epochs == 2
    assert not (run / "lock").exists() and (run / "phases" / "00-teach.json").exists()
    assert (run / weights).samefile(shared / weights)
    with open(run / "metrics.jsonl", "a") as file:
        file.write("two\n")
    assert (shared / "metrics.jsonl").read_text() == "one\n"


# ----------------------------------------------------------------------------------- results


def results(score, choosing, **more):
    """What results.json has of a run."""
    average = {
        "role": "student",
        "accuracy": score,
        "to_baseline": {"difference": score - 0.5, "interval": [score - 0.6, score - 0.4]},
    }
    judged = {
        **{"kind": "evaluate", "task": "task", "split": "test", "over": "classes"},
        **{"metric": "accuracy", "metric_settings": {}},
        "models": {"one": {"role": "teacher", "accuracy": 0.8}, "average": average},
        "baseline": {"accuracy": 0.5, "rule": "the most frequent class"},
    }
    chosen = None if choosing is None else {"score": choosing}
    trained = {"kind": "distil", "trained": [{"output": "average", "choosing": chosen}]}
    found = {"student": "average", "task": "task", "seconds": 1.0, "phases": [trained, judged]}
    return {**found, **more}


def runs(scores, choosing):
    return {
        Variant((f"rate={rate}", f"seed={seed}")): run_result(results(score, choosing[rate]))
        for rate, each in scores.items()
        for seed, score in enumerate(each)
    }


def two_students(size, seed, shipped="grown"):
    """Of a sweep over `size`, which the student `same` does not depend on."""
    found = results(0.7 + size / 10, None, student=shipped)
    trained, judged = found["phases"]
    average = judged["models"].pop("average")
    judged["models"] |= {"grown": average, "same": {**average, "accuracy": 0.6 + seed / 10}}
    trained["trained"] = [{"output": name, "choosing": None} for name in ("grown", "same")]
    return run_result(found)


def of_two_students(*shipped):
    return {
        Variant((f"size={size}", f"seed={seed}")): two_students(size, seed, name)
        for size, names in enumerate(shipped, start=1)
        for seed, name in enumerate(names)
    }


def of_settings():
    return runs({"1": [0.7, 0.72], "2": [0.8, 0.82]}, {"1": 0.75, "2": 0.74})


def with_missing_seeds():
    """One lucky seed, where the others failed, is no mean of three."""
    made = runs({"1": [0.7, 0.72, 0.71], "2": [0.9, 0.5, 0.5]}, {"1": 0.75, "2": 0.9})
    return {of: run for of, run in made.items() if of.setting == ("rate=1",) or of.seed == "0"}


def undefined():
    made = {variant: {**run, "choosing": None} for variant, run in with_missing_seeds().items()}
    made[Variant(("rate=2", "seed=0"))]["choosing"] = 0.9
    return made


def not_learnt():
    made = runs({"1": [0.7, 0.72], "2": [0.5, 0.5], "3": [0.5, 0.7]}, dict.fromkeys("123", 0.5))
    for variant, run in made.items():
        run["choosing"] = 0.9 if variant.setting == ("rate=2",) else 0.5
    return made


def of_one_seed():
    return {Variant((f"rate={rate}",)): run_result(results(0.7, None)) for rate in (1, 2)}


def test_the_tables_of_sweeps():
    made = [of_settings, with_missing_seeds, undefined, not_learnt, of_one_seed]
    shown = {one.__name__: one() for one in made}
    shown["others shipped"] = of_two_students(("grown", "grown"), ("same", "grown"))
    shown["nothing"] = {}
    found = {name: summary(one) for name, one in shown.items()}
    text = "".join(f"## {name}\n{sweep_table(one).text()}\n" for name, one in found.items())
    check_text(Path(__file__).with_name("sweeps.txt"), text)
    chosen = {name: one["chosen"] for name, one in found.items()}
    wanted = {"of_settings": 0, "with_missing_seeds": 0, "not_learnt": 1}
    assert chosen == {**dict.fromkeys(shown), **wanted}


def test_differences_are_over_the_seeds_that_both_have():
    made = runs({"1": [0.7, 0.9], "2": [0.8, 0.8]}, {"1": 0.5, "2": 0.5})
    del made[Variant(("rate=2", "seed=0"))]
    _, second = summary(made)["settings"]
    assert second["to_first"]["values"] == pytest.approx([-0.1])


def test_every_student_of_a_setting_is_shown():
    """The shipped one alone was, and in VE-KD's figures that was the baseline, on which no setting
    had an effect."""
    made, asked = of_two_students(("grown", "grown"), ("grown", "grown")), []
    found = summary(made, lambda variant, student: asked.append((variant.name, student)))
    first, second = found["settings"]
    assert first["score"]["values"] == pytest.approx([0.8, 0.8])
    assert first["others"]["same"]["score"]["values"] == pytest.approx([0.6, 0.7])
    assert second["to_first"]["mean"] == pytest.approx(0.1)
    assert second["others"]["same"]["to_first"]["values"] == [0.0, 0.0]
    assert {*asked} == {(variant.name, one) for variant in made for one in ("grown", "same")}
    names = [(f"size={size}", one) for size in (1, 2) for one in ("grown (shipped)", "same")]
    rows = sweep_table(found).rows
    assert [tuple(row[:2]) for row in rows] == names
    assert [str(row[-1]).split(" ")[0] for row in rows] == ["", "", "+10.0", "+0.0"]
    first, second = summary(of_two_students(("grown", "grown"), ("same", "grown")))["settings"]
    assert {*first["others"]} == {"same"} and {*second["others"]} == {"grown", "same"}
    assert second["score"]["values"] == pytest.approx([0.6, 0.9])
    assert second["others"]["grown"]["to_first"]["values"] == pytest.approx([0.1, 0.1])


def test_a_student_has_the_score_of_its_own_task_by_which_it_is_chosen():
    """The last evaluation may be of another task, where it stands beside models of that."""
    found = results(0.7, 0.75)
    trained, judged = found["phases"]
    elsewhere = {**judged, "task": "other", "split": "other-test", "metric": "macro_f1"}
    elsewhere["models"] = {"average": {**judged["models"]["average"], "macro_f1": 0.2}}
    elsewhere["baseline"] = {**judged["baseline"], "macro_f1": 0.1}
    both = {**found, "phases": [trained, judged, elsewhere]}
    assert run_result(both) == run_result(found)
    alone = run_result({**both, "phases": [trained, elsewhere]})
    assert alone["models"]["average"]["score"] == 0.2
    assert alone["choosing"] is None and not alone["chooses"]


def save_run(folder, right):
    """Of a student `average` that is right there, and one that is right elsewhere; without
    predictions where it is None."""
    run = RunFolder(folder)
    folder.mkdir()
    record = {**EVALUATION, "models": {"average": EVALUATION["models"]["s"]}, "comparisons": []}
    run.results.write_text(json.dumps({"student": "average", "seconds": 1.0, "phases": [record]}))
    if right is not None:
        labels = np.zeros(len(right), dtype=np.int64)
        logits = np.stack([right, ~right], axis=1).astype(np.float64)
        other = ClassPredictions(logits[:, ::-1].copy(), labels)
        saved = {"average": ClassPredictions(logits, labels), "other": other}
        file = run.predictions(0, "evaluate")
        file.parent.mkdir()
        SavedPredictions(["x", "y"], np.arange(len(right)), saved).write(file)


def test_intervals_are_over_seeds_and_test_examples(tmp_path):
    """Of predictions on disk, the same draws for all; where some are gone, over seeds alone."""
    generator = np.random.default_rng(0)
    made = runs({"1": [0.7, 0.72, 0.71], "2": [0.75, 0.72, 0.78]}, {"1": 0.5, "2": 0.5})
    folders = {variant: tmp_path / variant.name for variant in made}
    for number, folder in enumerate(folders.values()):
        save_run(folder, None if number == 5 else generator.random(200) < 0.7)
    first_folder, *_ = folders.values()
    ours, theirs = (drawn(first_folder, name) for name in ("average", "other"))
    assert ours.scores + theirs.scores == pytest.approx(1), "each student's own"
    assert drawn(first_folder, "nobody") is None
    found = summary(made, lambda variant, student: drawn(folders[variant], student))
    first, second = (row["score"] for row in found["settings"])
    assert first["over"] == ["seeds", "examples"] and second["over"] == ["seeds"]
    assert second["interval"] == mean_interval([0.75, 0.72, 0.78])
    low, high = mean_interval([0.7, 0.72, 0.71])
    assert first["interval"][0] < low and first["interval"][1] > high
    assert found["settings"][1]["to_first"]["over"] == ["seeds"]
    text = sweep_table(found).text()
    assert "over seeds and test examples" in text and "over seeds alone, and too narrow" in text


# --------------------------------------------------------------------------------- processes

SAVES = """
import os, pathlib, signal, sys, time
folder, own = pathlib.Path(sys.argv[1]), sys.argv[2]
def save(*_):
    (folder / f"asked-{own}").touch()
    while len([*folder.glob("asked-*")]) < 4:
        time.sleep(0.01)
    (folder / f"saved-{own}").touch()
    os._exit(75)
signal.signal(signal.SIGTERM, save)
(folder / f"ready-{own}").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("at_once", [False, True])
def test_runs_that_are_stopped_save_at_the_same_time(at_once, tmp_path):
    """Each as a training that saves at its next report. One after the other the last ones would
    still train when a cluster's grace is over."""
    pool = Pool(4)
    for number in range(4):
        process = subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path), str(number)])
        child = Child(str(number), (), tmp_path / "log.txt")
        pool._running[number] = child, process
    while len([*tmp_path.glob("ready-*")]) < 4:
        time.sleep(0.01)
    assert pool.end(at_once) is not at_once, "whether one has saved: the sweep's exit code is 75"
    assert len([*tmp_path.glob("saved-*")]) == (0 if at_once else 4)


@pytest.mark.parametrize(
    ("jobs", "ranks", "gpus", "cores", "expected"),
    [(4, 2, 8, 1, 4), (4, 3, 8, 64, 2), (1, 4, 8, 64, 1), (4, 2, 0, 5, 2), (4, 2, 0, 1, 1)],
)
def test_launches_at_once_have_a_gpu_or_a_core_for_each_rank(
    jobs, ranks, gpus, cores, expected, monkeypatch
):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    assert launches_at_once(jobs, ranks, list(map(str, range(gpus)))) == expected


@pytest.mark.parametrize(
    ("named", "accelerator", "seen"),
    [
        ("3,GPU-a", None, ["3", "GPU-a"]),
        ("0,-1,1", None, ["0"]),
        ("", None, []),
        ("0,1", "cpu", []),
        (None, "cpu", []),
    ],
)
def test_the_gpus_of_a_sweep_are_those_that_its_runs_see(named, accelerator, seen, monkeypatch):
    for name, value in (("CUDA_VISIBLE_DEVICES", named), ("DS_ACCELERATOR", accelerator)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert visible_gpus() == seen


def test_each_launch_has_gpus_of_its_own():
    pool = Pool(2, ["4", "5", "6", "7"], 2)
    given = [pool.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(2)]
    assert given == ["4,5", "6,7"]
    with pytest.raises(UserError, match=r"--num-gpus 3: .*has 2 GPUs"):
        launches_at_once(1, 3, ["0", "1"])
    alone = Pool(3, ["0", "1"])
    assert [alone.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == list("010")


def test_files_of_the_working_folder_are_no_libraries(tmp_path, monkeypatch):
    """Of a sweep's runs: data are called random.py, too."""
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    child = Child("one", ("--version",), tmp_path / "log.txt")
    [(_, code, _)] = Pool(1).run([child], lambda running: None)
    assert code == 0, child.log.read_text()


def test_a_mistake_of_ours_ends_the_runs(tmp_path, monkeypatch):
    """The threads would wait for them, and begin the others."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$4" = short ] || exec sleep 600\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    names = ["short", "long", "longer", "longest"]
    children = [Child(name, (name,), tmp_path / f"{name}.txt") for name in names]
    pool = Pool(2)

    def fails(ended):
        with closing(ended):
            assert next(ended)[0].name == "short"
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fails(pool.run(children, lambda running: None))
    assert not pool._running
