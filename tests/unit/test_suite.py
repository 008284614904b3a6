"""Suites: the runs that they are made of, how a setting is chosen, and what is compared."""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.cli.sweep import checkpoints_and_overrides
from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import mean_interval
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.tasks import metric_of
from ds_distill.sweep.found import Drawn, of_checkpoint, suite_results
from ds_distill.sweep.runs import Variant
from ds_distill.sweep.suite import Suite, builtin_suites, checkpoints_of, load_suite, suite_runs
from ds_distill.sweep.sweep import check_runs
from ds_distill.sweep.tables import suite_tables

TWO = {"first": "a/first", "second": "b/second"}


def toy_suite(task: Path, **changes: Any) -> dict[str, Any]:
    each = {"data": {"path": str(task)}, "max_length": 32}
    return {
        "seeds": [1, 2],
        "grid": {"learning_rate": [1.0e-2, 1.0e-6], "batch_size": [16]},
        "training": {"epochs": 2, "dropout": 0.0},
        "tasks": {"one": each, "two": {**each, "metric": "macro_f1"}},
        "deepspeed": "zero0_fp32",
        **changes,
    }


def made(task: Path, **changes: Any) -> Suite:
    return Suite.model_validate({"name": "toy", **toy_suite(task, **changes)})


def task_of(run: Variant) -> str:
    return run.overrides[0].removeprefix("task=")


def checkpoint_of(run: Variant) -> str:
    return run.overrides[1].removeprefix("checkpoint=")


@pytest.fixture
def suite(toy_task):
    return made(toy_task)


# -------------------------------------------------------------------------------------- runs


def test_every_run_is_an_ordinary_recipe(suite, tmp_path):
    found = suite_runs(suite, TWO, tmp_path)
    wanted = list(product(["one", "two"], TWO, [1.0e-2, 1.0e-6], [1, 2]))
    assert len({run.variant.name for run in found}) == len(found) == len(wanted)
    for run, (task, checkpoint, rate, seed) in zip(found, wanted, strict=True):
        recipe = run.recipe
        setting = (f"learning_rate={rate:g}", "batch_size=16")
        assert run.variant.setting == (f"task={task}", f"checkpoint={checkpoint}", *setting)
        assert run.variant.seed == str(seed)
        assert recipe.student.model == TWO[checkpoint] and recipe.seed == seed
        assert recipe.task.model_dump() == suite.tasks[task].model_dump()
        tune, judge = recipe.phases
        assert (tune.kind, judge.kind) == ("fine-tune", "evaluate")
        assert (tune.learning_rate, tune.batch_size, tune.epochs) == (rate, 16, 2)
        assert judge.split == "test" and "test" not in tune.learns_from
        (tmp_path / "written.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(tmp_path / "written.yaml") == recipe


def test_a_task_may_train_otherwise_and_epochs_may_be_tried(toy_task, tmp_path):
    training = {"epochs": 2, "warmup": 0.0, "keep": "last"}
    two = {"two": {"warmup": 0.5, "epochs": 5}}
    runs = suite_runs(made(toy_task, task_training=two, training=training), TWO, tmp_path)
    tuned = {task_of(run.variant): run.recipe.phases[0] for run in runs}
    assert (tuned["one"].epochs, tuned["one"].warmup, tuned["one"].keep) == (2, 0.0, "last")
    assert (tuned["two"].epochs, tuned["two"].warmup, tuned["two"].keep) == (5, 0.5, "last")
    grid = {"learning_rate": [1.0], "batch_size": [8, 16], "epochs": [1, 2, 3]}
    suite = made(toy_task, grid=grid, training={})
    assert len(suite_runs(suite, TWO, tmp_path)) == 2 * 2 * 6 * 2


def test_built_in_suites_say_what_they_lack(tmp_path):
    suites = {name: load_suite(name) for name in builtin_suites()}
    assert set(suites) == {"compact-biomedical", "blurb-like", "general"}
    for name, suite in suites.items():
        assert suite.name == name and suite.description and suite.lacks
        assert all(metric_of(task).is_share() for task in suite.tasks.values()), "there is a mean"
        runs = suite_runs(suite, TWO, tmp_path)
        each = 2 * len(list(suite.grid.settings())) * len(suite.seeds)
        assert len(runs) == len(suite.tasks) * each
        if name != "general":
            assert {task for group in suite.groups.values() for task in group} == set(suite.tasks)
            assert "named entities" in suite.lacks
            entities = [t for t in suite.tasks.values() if t.type == "token-classification"]
            assert len(entities) >= 4
        if name == "compact-biomedical":
            trained = {task_of(run.variant): run.recipe.phases[0].epochs for run in runs}
            assert trained == {task: 3 if task in ("gad", "ddi") else 5 for task in trained}


def test_checkpoints_have_names(tmp_path):
    for name in ("runs/a/student", "runs/b/student", "runs/seed=1,temperature=2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "runs/a/recipe.yaml").write_text("name: a")
    one, two = str(tmp_path / "runs/a/student"), str(tmp_path / "runs/b/student")
    assert [*checkpoints_of([one, two])] == ["a-student", "b-student"]
    found = checkpoints_of([str(tmp_path / "runs/a"), "org/bert-base"])
    assert found == {"a": one, "bert-base": "org/bert-base"}
    with pytest.raises(UserError, match="two have the same name"):
        checkpoints_of([one, one])
    # The name of a sweep's run has a `=`, as changes to the suite have.
    given = [str(tmp_path / "runs/seed=1,temperature=2"), "org/bert", "seeds=[1]", "tasks.one=null"]
    assert checkpoints_and_overrides(given) == (given[:2], given[2:])


def test_mistakes_in_data_and_models_are_found_before_anything_runs(
    toy_task, tiny_models, tmp_path
):
    bad = tmp_path / "data"
    bad.mkdir()
    for split in ("train", "test"):
        (bad / f"{split}.jsonl").write_text((toy_task / f"{split}.jsonl").read_text())
    tasks = {
        "good": {"data": {"path": str(toy_task)}, "max_length": 32},
        "bad": {"data": {"path": str(bad)}, "max_length": 32},
        "long": {"data": {"path": str(toy_task)}, "max_length": 512},
    }
    changes = {"tasks": tasks, "training": {"epochs": 1, "keep": "last"}}
    given = {"toy": str(tiny_models["toy"]), "gone": "./gone"}
    runs = suite_runs(made(toy_task, **changes), given, tmp_path)
    with pytest.raises(UserError) as failure:
        check_runs(runs, of_suite=True)
    lines = [*map(str, failure.value.mistakes)]
    for start, what in (
        ("task=good checkpoint=gone, ", "no such folder"),
        ("task=bad checkpoint=toy", "no split 'validation'"),
        ("task=long checkpoint=toy", "at most 128 tokens"),
    ):
        assert any(line.startswith(start) and what in line for line in lines), lines


# ----------------------------------------------------------------------------------- results


def ended(runs: list[Variant], score: Any, choosing: Any) -> dict[Any, dict[str, Any]]:
    """`run_result` of each run; score, choosing: functions of a run. A score of None: it failed."""
    metric = {"one": "accuracy", "two": "macro_f1", "three": "macro_f1"}
    return {
        run: {
            "student": "student",
            **{"over": "classes", "metric": metric[task_of(run)], "metric_settings": {}},
            "split": "test",
            "models": {"student": {"role": "control", "score": score(run)}},
            "majority": 0.3,
            "rule": "the most frequent class",
            "chooses": True,
            "learnt": True,
            "choosing": choosing(run),
            "seconds": 1.0,
        }
        for run in runs
        if score(run) is not None
    }


def variants_of(suite: Suite) -> list[Variant]:
    return [run.variant for run in suite_runs(suite, TWO, Path("."))]


def found_of(suite: Suite, done: Any, reference: str = "first", **more: Any) -> dict[str, Any]:
    return suite_results(variants_of(suite), done, reference, suite.weights(), **more)


SHARES = st.floats(0.01, 0.99)


def test_the_macro_mean_is_over_groups_of_tasks(toy_task):
    """BLURB's: by hand, of three tasks in two groups."""
    given = toy_suite(toy_task, groups={"pair": ["one", "three"], "alone": ["two"]})
    given["tasks"]["three"] = given["tasks"]["two"]
    given["grid"]["learning_rate"] = [1.0e-2]
    suite = Suite.model_validate({"name": "toy", **given})
    runs = variants_of(suite)
    scores = {("one", "1"): 0.2, ("one", "2"): 0.4, ("two", "1"): 0.9, ("two", "2"): 0.7}
    scores |= {("three", "1"): 0.6, ("three", "2"): 0.5}

    def score(run: Variant) -> float:
        of = scores[task_of(run), str(run.seed)]
        return of if checkpoint_of(run) == "first" else of / 2

    assert suite.weights()["macro mean"] == {"one": 0.25, "three": 0.25, "two": 0.5}
    found = found_of(suite, ended(runs, score, score))
    first, second = (found["checkpoints"][name] for name in ("first", "second"))
    assert first["mean"]["score"]["values"] == pytest.approx([1.7 / 3, 1.6 / 3])
    macro = [(0.4 + 0.9) / 2, (0.45 + 0.7) / 2]
    assert first["macro mean"]["score"]["values"] == pytest.approx(macro)
    assert second["macro mean"]["retention"] == pytest.approx(0.5)
    assert second["macro mean"]["to_reference"]["values"] == pytest.approx([-0.325, -0.2875])
    scored, *_ = suite_tables(found)
    [[_, *ours], [_, *theirs]] = ([str(cell).split(" ")[0] for cell in row] for row in scored.rows)
    assert ours == ["30.0%", "80.0%", "55.0%", "55.0%", "100.0%", "", "61.3%", "100.0%", ""]
    assert theirs[3:] == ["27.5%", "50.0%", "-27.5", "30.6%", "50.0%", "-30.6"]
    plain = found_of(suite.model_copy(update={"groups": {}}), ended(runs, score, score))
    assert "macro mean" not in plain["checkpoints"]["first"]
    assert "macro mean" not in suite_tables(plain)[0].heads


@given(data=st.data())
@settings(max_examples=10)
def test_what_chooses_chooses_and_the_rest_follows(data, toy_task):
    """Against loops over the runs. A macro mean of groups of one is the mean."""
    suite = made(toy_task, groups={"b": ["two"], "a": ["one"]})
    runs = variants_of(suite)
    scores = {run: data.draw(SHARES) for run in runs}
    chooses = {run: data.draw(SHARES) for run in runs}
    done = ended(runs, lambda run: scores[run], lambda run: chooses[run])
    found = found_of(suite, done, "second")
    by_seed: dict[str, list[list[float]]] = {"first": [], "second": []}
    for task, name in product(suite.tasks, ["second", "first"]):
        own = [run for run in runs if (task_of(run), checkpoint_of(run)) == (task, name)]
        of_settings: dict[tuple[str, ...], list[Variant]] = {}
        for run in own:
            of_settings.setdefault(run.setting, []).append(run)
        means = {s: sum(chooses[r] for r in each) for s, each in of_settings.items()}
        best = max(means, key=means.__getitem__)
        values = [scores[run] for run in of_settings[best]]
        of = of_checkpoint(found["tasks"][task], name)
        assert tuple(of["setting"]) == best[1:]
        assert of["score"]["values"] == values
        assert of["score"]["interval"] == mean_interval(values)
        by_seed[name].append(values)
        reference = by_seed["second"][len(by_seed[name]) - 1]
        if name == "first":
            apart = [a - b for a, b in zip(values, reference, strict=True)]
            assert of["to_first"]["values"] == pytest.approx(apart)
            assert of["to_first"]["interval"] == pytest.approx(mean_interval(apart))
    of_all = {name: statistics.fmean(map(statistics.fmean, of)) for name, of in by_seed.items()}
    for name, tasks in by_seed.items():
        of_seeds = [statistics.fmean(of_seed) for of_seed in zip(*tasks, strict=True)]
        means = found["checkpoints"][name]
        assert means["mean"]["score"]["values"] == pytest.approx(of_seeds)
        assert means["macro mean"]["score"]["values"] == pytest.approx(of_seeds)
        assert means["mean"]["retention"] == pytest.approx(of_all[name] / of_all["second"])


def test_scores_differences_and_means_are_over_test_examples_too(suite):
    """Of two seeds the examples add the covariance of their draws; a mean of two tasks, whose
    examples are drawn apart, has a quarter of the sum of both."""
    runs, generator = variants_of(suite), np.random.default_rng(0)
    shared = {task: generator.normal(0, 0.02, 4000) for task in suite.tasks}

    def score(run: Variant) -> float:
        return 0.6 + 0.01 * float(run.seed or 0) + 0.1 * (checkpoint_of(run) == "first")

    def is_chosen(run: Variant) -> bool:
        return "learning_rate=0.01" in run.setting

    draws = {}
    for run in runs:
        moved = shared[task_of(run)] * (1 if checkpoint_of(run) == "first" else 2)
        own = score(run) + moved + generator.normal(0, 0.005, 4000)
        draws[run] = Drawn(task_of(run), own)
    done = ended(runs, score, is_chosen)
    found = found_of(suite, done, draws=lambda variant, student: draws[variant])
    added: dict[str, list[float]] = {"first": [], "second": [], "apart": []}
    for task, of in found["tasks"].items():
        drawn: dict[str, list[Any]] = {"first": [], "second": []}
        for run in filter(is_chosen, runs):
            if task_of(run) == task:
                drawn[checkpoint_of(run)].append(draws[run].scores)
        drawn["apart"] = [a - b for a, b in zip(drawn["second"], drawn["first"], strict=True)]
        first, second = (of_checkpoint(of, name) for name in ("first", "second"))
        rows = {"first": first["score"], "second": second["score"], "apart": second["to_first"]}
        for name, row in rows.items():
            variance = float(np.cov(*drawn[name])[0, 1])
            assert row["over"] == ["seeds", "examples"]
            assert row["variance_of_examples"] == pytest.approx(variance)
            assert row["interval"] == pytest.approx(mean_interval(row["values"], variance))
            added[name].append(variance)
    mean = found["checkpoints"]["second"]["mean"]
    assert mean["score"]["variance_of_examples"] == pytest.approx(sum(added["second"]) / 4)
    assert mean["to_reference"]["variance_of_examples"] == pytest.approx(sum(added["apart"]) / 4)
    assert not any("too narrow" in table.text() for table in suite_tables(found))
    assert "too narrow" in suite_tables(found_of(suite, done))[1].text()


def test_what_was_not_learnt_is_said_and_no_mean_adds_errors_to_accuracies(suite):
    runs = variants_of(suite)
    done = ended(runs, lambda run: 0.3, lambda run: 0.3)
    for run in runs:
        done[run]["learnt"] = (task_of(run), checkpoint_of(run)) != ("one", "second")
    found = found_of(suite, done)
    said = "no better than the baseline beyond chance: checkpoint=second, "
    assert [said in table.text() for table in suite_tables(found)] == [False, True, False]
    assert found["checkpoints"]["second"]["mean"]["score"] is not None
    for run in runs:
        if task_of(run) == "two":
            done[run]["metric"] = "ece"  # a share, of which less is better
    assert found_of(suite, done)["checkpoints"]["second"]["mean"]["score"] is None


def test_what_failed_is_left_out_and_no_mean_hides_it(suite):
    runs = variants_of(suite)

    def score(run: Variant) -> float | None:
        if (task_of(run), checkpoint_of(run)) == ("two", "second"):
            return None
        # The better setting lacks a seed.
        fast = "learning_rate=0.01" in run.setting
        if fast and run.seed == "2" and task_of(run) == "one" and checkpoint_of(run) == "first":
            return None
        return 0.9 if fast else 0.6 + 0.01 * float(run.seed or 0)

    found = found_of(suite, ended(runs, score, lambda run: score(run) or 0.0))
    one, two = (found["tasks"][task] for task in ("one", "two"))
    first, second = (of_checkpoint(one, name) for name in TWO)
    assert first["score"]["values"] == pytest.approx([0.61, 0.62])
    assert second["score"]["values"] == [0.9, 0.9]
    assert of_checkpoint(two, "first") and not of_checkpoint(two, "second")
    assert found["checkpoints"]["second"]["mean"]["score"] is None
    scores, of_one, of_two = suite_tables(found)
    same = "90.0% (not known: every resample gives the same)"
    assert scores.rows[1] == ["second", same, "-", "-", "-", ""]
    assert of_one.rows[0][0] == "checkpoint=first, learning_rate=1e-06, batch_size=16"
    assert str(of_one.rows[1][-1]) == "+28.5 (+22.1 to +34.9)*"
    assert len(of_two.rows) == 1
    assert "hosen" not in of_one.text() and "student: " not in of_one.text()
    three = [one.variant for one in suite_runs(suite, {**TWO, "third": "c"}, Path("."))]
    done = ended(three, score, lambda run: score(run) or 0.0)
    means = suite_results(three, done, "second", suite.weights())["checkpoints"]["third"]["mean"]
    assert means["score"] and means["to_reference"] is means["retention"] is None
    nothing = found_of(suite, {})
    assert nothing["checkpoints"]["first"]["mean"]["score"] is None
    assert suite_tables(nothing)[0].rows[0] == ["first", "-", "-", ""]


# ------------------------------------------------------------------------------------- files


def test_a_suite_is_read_with_its_overrides(toy_task, tmp_path):
    file = tmp_path / "my suite.yaml"

    def read(*overrides: str, **changes: Any) -> Suite:
        file.write_text(yaml.safe_dump(toy_suite(toy_task, **changes)))
        return load_suite(str(file), overrides)

    suite = read("seeds=[7]", "tasks.two=null", "grid.batch_size=[4, 8]")
    assert suite.name == "my-suite" and list(suite.tasks) == ["one"] and suite.seeds == [7]
    assert suite.grid.batch_size == [4, 8]
    assert read().tasks["two"].metric.name == "macro_f1" and read("name=b").name == "b"
    changes = {"groups": {"a": ["one"], "b": ["two"]}, "task_training": {"two": {"epochs": 5}}}
    less = read("tasks.two=null", **changes)
    assert less.groups == {"a": ["one"]} and not less.task_training
