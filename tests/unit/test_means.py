"""Sweeps over several recipes and models: their runs, how a setting is chosen, the means."""

import re
import shlex
import statistics
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import command_line, written

from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import mean_interval
from ds_distill.recipe import load_recipe
from ds_distill.recipe.tasks import metric_of
from ds_distill.sweep.found import Drawn, of_model, results
from ds_distill.sweep.runs import SweepRun, Variant, builtin_suites, recipes_of, runs_of, variants
from ds_distill.sweep.sweep import check_runs
from ds_distill.sweep.tables import sweep_tables

TWO = ("first", "second")
GRID = ["student.model=first,second", "rate=0.01,1e-06", "seed=1,2"]
PLAIN = {"one": "one", "two": "two"}


def planned(groups=PLAIN, *arguments):
    """Runs of recipes, by name the group of each; arguments: by default GRID."""
    _, found = variants(arguments or GRID)
    return [
        SweepRun(Variant(one.overrides, recipe), None, Path("."), group)
        for recipe, group in groups.items()
        for one in found
    ]


def results_of(runs, score, choosing=None, **more):
    """What is found of runs. score, choosing: of a run; a score of None: it failed. more: keys of
    their `run_result` by run, or `draws`."""
    draws = {"draws": more.pop("draws")} if "draws" in more else {}
    ended = {
        run.variant: {
            "student": "student",
            **{"over": "classes", "metric_settings": {}, "split": "test"},
            "metric": "accuracy" if run.variant.recipe == "one" else "macro_f1",
            "models": {"student": {"role": "control", "score": score(run.variant)}},
            **{"majority": 0.3, "rule": "the most frequent class", "chooses": True},
            **{"learnt": True, "choosing": (choosing or score)(run.variant), "seconds": 1.0},
            **{key: of(run.variant) for key, of in more.items()},
        }
        for run in runs
        if score(run.variant) is not None
    }
    return results(runs, ended, **draws)


def mean_of(found, model, kind="mean"):
    return next(of for of in found["means"] if of["model"] == model)[kind]


# -------------------------------------------------------------------------------------- runs


def test_recipes_are_files_or_folders_of_which_those_below_are_groups(tmp_path):
    for name in ("s/a/one", "s/a/two", "s/b/three", "s/four", "s/small/four", "t/four", "n/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).with_suffix(".yaml" * (name[0] != "n")).write_text("")
    found = recipes_of([str(tmp_path / "s"), "quickstart"])
    assert [*found] == ["one", "two", "three", "four", "quickstart"]
    groups = {name: Path(group).name for name, (_, group) in found.items()}
    assert groups == dict.fromkeys(["one", "two"], "a") | {"three": "b", "four": "four.yaml"} | {
        "quickstart": "quickstart"
    }
    for words, why in ((["s", "t"], "two recipes have the same name"), (["n"], "without recipes")):
        with pytest.raises(UserError, match=why):
            recipes_of([str(tmp_path / word) for word in words])


def test_the_command_makes_runs_of_each_recipe_in_its_group(recipe, tmp_path, monkeypatch):
    (tmp_path / "pair").mkdir()
    for name in ("one", "two"):
        Path(recipe(name)).rename(tmp_path / "pair" / f"{name}.yaml")
    asked = []
    monkeypatch.setattr("ds_distill.cli.sweep.run_sweep", lambda *given: asked.append(given))
    monkeypatch.setattr("ds_distill.sweep.sweep.check_runs", lambda *given: [])
    words = ["sweep", tmp_path, recipe("three"), "student.model=./a,./b", "training.epochs=3"]
    with pytest.raises(UserError, match="two recipes have the same name"):
        command_line(*words)
    words[1] = tmp_path / "pair"
    command_line(*words, "--folder", tmp_path / "sweep", "--jobs", "3", "--keep")
    [(sweep, *options)] = asked
    assert options == [3, None, True] and sweep.path == tmp_path / "sweep"
    found = {(run.variant.recipe, run.recipe.student.model) for run in sweep.runs}
    assert found == {*product(("one", "two", "three"), ("./a", "./b"))}
    assert {run.recipe.phases[0].epochs for run in sweep.runs} == {3}
    groups = {run.variant.recipe: Path(run.group).name for run in sweep.runs}
    assert groups == {"one": "one.yaml", "two": "two.yaml", "three": "three.yaml"}


def commands():
    """By suite the arguments that docs/comparing.md shows."""
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text()
    lines = re.findall(r"^ds-distill sweep (.*)$", page, re.MULTILINE)
    return {(words := shlex.split(line))[0]: words[1:] for line in lines}


def test_built_in_suites_are_recipes_with_the_published_grids():
    grids = {
        "blurb-like": (8, {"1.0e-5", "2.0e-5", "3.0e-5", "5.0e-5", "6.0e-5"}, 15),
        "compact-biomedical": (8, {"3.0e-5", "5.0e-5"}, 4),
        "general": (3, {"2.0e-5", "3.0e-5", "5.0e-5"}, 18),
    }
    assert {*commands()} == {*builtin_suites()} == {*grids}
    for suite, (recipes, rates, number) in grids.items():
        arguments = [word for word in commands()[suite] if not word.startswith("data_folder")]
        fixed, found = variants(arguments)
        assert not fixed and {one.model for one in found} == {"ONE", "OTHER"}
        assert len(found) == 2 * number * 3
        given = {word for one in found for word in one.setting}
        assert {f"training.learning_rate={rate}" for rate in rates} < given
        files = recipes_of([suite])
        assert len(files) == recipes
        for file, _ in files.values():
            recipe = load_recipe(file, found[0].overrides)
            assert metric_of(recipe.task).is_share(), "there is a mean"
            tune, judge = recipe.phases
            assert judge.split == "test" and "test" not in tune.learns_from


@pytest.fixture
def recipe(toy_task, tmp_path):
    """Writes a recipe that fine-tunes; gives its file."""

    def write(name, data=toy_task, **task):
        phases = [{"fine-tune": {"models": "student"}}, {"evaluate": {"split": "test"}}]
        training = {"epochs": 1, "keep": "last"}
        about = {"data": {"path": str(data)}, "max_length": 32, **task}
        made = {"task": about, "student": {"model": "x"}, "training": training, "phases": phases}
        return str(written(made, tmp_path, name))

    return write


def runs_in(files, arguments):
    _, found = variants(arguments)
    recipes = {
        Variant(one.overrides, name): load_recipe(file, one.overrides)
        for name, (file, _) in recipes_of(files).items()
        for one in found
    }
    return runs_of(recipes, Path("sweep"))


def test_mistakes_in_data_and_models_are_found_before_anything_runs(
    recipe, toy_task, tiny_models, tmp_path
):
    bad = tmp_path / "data"
    bad.mkdir()
    for split in ("train", "test"):
        (bad / f"{split}.jsonl").write_text((toy_task / f"{split}.jsonl").read_text())
    files = [recipe("good"), recipe("bad", bad), recipe("long", max_length=512)]
    rates = "training.learning_rate=1,2"
    runs = runs_in(files, [f"student.model={tiny_models['toy']},./gone", rates])
    with pytest.raises(UserError) as failure:
        check_runs(runs)
    lines = [*map(str, failure.value.mistakes)]
    for start, what in (
        ("good student.model=./gone training.learning_rate=1: ", "no such folder"),
        ("bad student.model=", "no split 'validation'"),
        ("long student.model=", "at most 128 tokens"),
    ):
        assert any(line.startswith(start) and what in line for line in lines), lines
    # Nothing is chosen where there is one setting; other recipes may judge by another metric.
    runs = runs_in([files[0], recipe("other", metric="macro_f1")], ["seed=1,2"])
    assert len({run.variant.name for run in runs}) == 4
    check_runs(runs_in(files[:2], [f"student.model={tiny_models['toy']},{tiny_models['toy']}/."]))


# ----------------------------------------------------------------------------------- results


SHARES = st.floats(0.01, 0.99)


def test_the_macro_mean_is_over_groups_of_recipes():
    """BLURB's: by hand, of three recipes in two groups."""
    arguments = ("student.model=first,second", "seed=1,2")
    runs = planned({"one": "pair", "two": "alone", "three": "pair"}, *arguments)
    scores = {("one", "1"): 0.2, ("one", "2"): 0.4, ("two", "1"): 0.9, ("two", "2"): 0.7}
    scores |= {("three", "1"): 0.6, ("three", "2"): 0.5}

    def score(run):
        of = scores[run.recipe, str(run.seed)]
        return of if run.model == "first" else of / 2

    found = results_of(runs, score)
    assert mean_of(found, "first")["score"]["values"] == pytest.approx([1.7 / 3, 1.6 / 3])
    macro = [(0.4 + 0.9) / 2, (0.45 + 0.7) / 2]
    assert mean_of(found, "first", "macro mean")["score"]["values"] == pytest.approx(macro)
    second = mean_of(found, "second", "macro mean")
    assert second["retention"] == pytest.approx(0.5)
    assert second["to_first"]["values"] == pytest.approx([-0.325, -0.2875])
    scored, *_ = sweep_tables(found)
    [[_, *ours], [_, *theirs]] = ([str(cell).split(" ")[0] for cell in row] for row in scored.rows)
    assert ours == ["30.0%", "80.0%", "55.0%", "55.0%", "100.0%", "", "61.3%", "100.0%", ""]
    assert theirs[3:] == ["27.5%", "50.0%", "-27.5", "30.6%", "50.0%", "-30.6"]
    # Of one model, and of recipes that are each a group.
    alone = results_of(planned(PLAIN, "rate=1,2"), lambda run: 0.5)
    assert alone["means"] == [{"model": None, "mean": alone["means"][0]["mean"]}]
    scored, *_ = sweep_tables(alone)
    assert scored.heads[-1] == "mean" and [row[0] for row in scored.rows] == ["the recipe's"]


@given(data=st.data())
@settings(max_examples=10)
def test_what_chooses_chooses_and_the_rest_follows(data):
    """Against loops over the runs."""
    runs = planned(PLAIN, "student.model=second,first", *GRID[1:])
    scores = {run.variant: data.draw(SHARES) for run in runs}
    chooses = {run.variant: data.draw(SHARES) for run in runs}
    found = results_of(runs, scores.__getitem__, chooses.__getitem__)
    by_seed = {"first": [], "second": []}
    for recipe, name in product(PLAIN, ["second", "first"]):
        own = [v for v in scores if (v.recipe, v.model) == (recipe, name)]
        of_settings = {}
        for run in own:
            of_settings.setdefault(run.setting, []).append(run)
        means = {s: sum(chooses[r] for r in each) for s, each in of_settings.items()}
        best = max(means, key=means.__getitem__)
        values = [scores[run] for run in of_settings[best]]
        of = of_model(found["recipes"][recipe], name)
        assert tuple(of["setting"]) == best
        assert of["score"]["values"] == values
        assert of["score"]["interval"] == mean_interval(values)
        by_seed[name].append(values)
        reference = by_seed["second"][len(by_seed[name]) - 1]
        if name == "first":
            apart = [a - b for a, b in zip(values, reference, strict=True)]
            assert of["to_first"]["values"] == pytest.approx(apart)
            assert of["to_first"]["interval"] == pytest.approx(mean_interval(apart))
    of_all = {name: statistics.fmean(map(statistics.fmean, of)) for name, of in by_seed.items()}
    for name, recipes in by_seed.items():
        of_seeds = [statistics.fmean(of_seed) for of_seed in zip(*recipes, strict=True)]
        mean = mean_of(found, name)
        assert mean["score"]["values"] == pytest.approx(of_seeds)
        assert mean["retention"] == pytest.approx(of_all[name] / of_all["second"])


def test_scores_differences_and_means_are_over_test_examples_too():
    """Of two seeds the examples add the covariance of their draws; a mean of two recipes, whose
    examples are drawn apart, has a quarter of the sum of both."""
    runs, generator = planned(), np.random.default_rng(0)
    shared = {recipe: generator.normal(0, 0.02, 4000) for recipe in PLAIN}

    def score(run):
        return 0.6 + 0.01 * float(run.seed or 0) + 0.1 * (run.model == "first")

    def is_chosen(run):
        return "rate=0.01" in run.setting

    draws = {}
    for run in (run.variant for run in runs):
        moved = shared[run.recipe] * (1 if run.model == "first" else 2)
        own = score(run) + moved + generator.normal(0, 0.005, 4000)
        draws[run] = Drawn(run.recipe, own)
    found = results_of(runs, score, is_chosen, draws=lambda variant, student: draws[variant])
    added = {"first": [], "second": [], "apart": []}
    for recipe, of in found["recipes"].items():
        drawn = {"first": [], "second": []}
        for run in filter(is_chosen, draws):
            if run.recipe == recipe:
                drawn[run.model].append(draws[run].scores)
        drawn["apart"] = [a - b for a, b in zip(drawn["second"], drawn["first"], strict=True)]
        first, second = (of_model(of, name) for name in TWO)
        rows = {"first": first["score"], "second": second["score"], "apart": second["to_first"]}
        for name, row in rows.items():
            variance = float(np.cov(*drawn[name])[0, 1])
            assert row["over"] == ["seeds", "examples"]
            assert row["variance_of_examples"] == pytest.approx(variance)
            assert row["interval"] == pytest.approx(mean_interval(row["values"], variance))
            added[name].append(variance)
    mean = mean_of(found, "second")
    assert mean["score"]["variance_of_examples"] == pytest.approx(sum(added["second"]) / 4)
    assert mean["to_first"]["variance_of_examples"] == pytest.approx(sum(added["apart"]) / 4)
    assert not any("too narrow" in table.text() for table in sweep_tables(found))
    assert "too narrow" in sweep_tables(results_of(runs, score, is_chosen))[1].text()


def test_what_was_not_learnt_is_said_and_no_mean_adds_errors_to_accuracies():
    runs = planned()
    learnt = lambda run: (run.recipe, run.model) != ("one", "second")  # noqa: E731
    found = results_of(runs, lambda run: 0.3, learnt=learnt)
    said = "no better than the baseline beyond chance: student.model=second, "
    assert [said in table.text() for table in sweep_tables(found)] == [False, True, False]
    assert mean_of(found, "second")["score"] is not None
    metric = lambda run: "accuracy" if run.recipe == "one" else "ece"  # noqa: E731  (less is better)
    assert mean_of(results_of(runs, lambda run: 0.3, metric=metric), "second")["score"] is None


def test_what_failed_is_left_out_and_no_mean_hides_it():
    def score(run):
        if (run.recipe, run.model) == ("two", "second"):
            return None
        # The better setting lacks a seed.
        fast = "rate=0.01" in run.setting
        if fast and run.seed == "2" and run.recipe == "one" and run.model == "first":
            return None
        return 0.9 if fast else 0.6 + 0.01 * float(run.seed or 0)

    found = results_of(planned(), score)
    one, two = (found["recipes"][recipe] for recipe in PLAIN)
    first, second = (of_model(one, name) for name in TWO)
    assert first["score"]["values"] == pytest.approx([0.61, 0.62])
    assert second["score"]["values"] == [0.9, 0.9]
    assert of_model(two, "first") and not of_model(two, "second")
    assert mean_of(found, "second")["score"] is None
    scores, of_one, of_two = sweep_tables(found)
    same = "90.0% (not known: every resample gives the same)"
    assert scores.rows[1] == ["second", same, "-", "-", "-", ""]
    assert of_one.rows[0][0] == "student.model=first, rate=1e-06"
    assert str(of_one.rows[1][-1]) == "+28.5 (+22.1 to +34.9)*"
    assert len(of_two.rows) == 1
    assert "hosen" not in of_one.text() and "student: " not in of_one.text()
    others = planned(PLAIN, "student.model=second,first,third", *GRID[1:])
    mean = mean_of(results_of(others, score), "third")
    assert mean["score"] and mean["to_first"] is mean["retention"] is None
    nothing = results_of(planned(), lambda run: None)
    assert mean_of(nothing, "first")["score"] is None
    assert sweep_tables(nothing)[0].rows[0] == ["first", "-", "-", ""]
    # A recipe of which a seed has failed has no mean with another.
    short = results_of(planned(PLAIN, "seed=1,2"), lambda v: None if v == LOST else 0.5)
    assert mean_of(short, None)["score"] is None


LOST = Variant(("seed=2",), "two")
