"""`ds-distill sweep`: shared phases run once, every run is what it would be alone, a stopped sweep
goes on, and a run that fails leaves the others be; over several recipes there are means."""

import copy
import shutil
import signal
import subprocess
import sys

import pytest
from processes import prepare, within
from runs import command_line, curves, evaluation, results, written
from toys import break_word, toy_vocabulary

from ds_distill.check.check import check_all, open_sources
from ds_distill.errors import UserError
from ds_distill.recipe import load_recipe
from ds_distill.sweep.runs import builtin_suites, recipes_of

SETTINGS = ["seed=1,2", "phases.distil.learning_rate=1e-2,1e30"]
"""Under the second rate the loss is not finite."""
GOOD = ["seed=1,learning_rate=1e-2", "seed=2,learning_rate=1e-2"]


@pytest.fixture
def recipe(toy_settings, tmp_path):
    settings = copy.deepcopy(toy_settings)
    settings["training"]["dropout"] = 0.0  # ranks draw their own
    del settings["teachers"]["second"]
    distil = {"split": "transfer", "teachers": "cached", "losses": {"kl": {}}, "epochs": 2}
    teach = {"models": "first", "epochs": 2}
    phases = [{"fine-tune": teach}, {"cache": {"splits": "transfer"}}, {"distil": distil}]
    settings |= {"phases": [*phases, {"evaluate": {"split": "test"}}], "logging": {"every": 1}}
    return written(settings, tmp_path, "toy")


def test_a_sweep_is_stopped_and_continued_and_tells_what_failed(
    recipe, tmp_path, ds_distill, command_environment, in_this_process
):
    folder = tmp_path / "sweep"
    command = ["sweep", str(recipe), *SETTINGS, "--folder", str(folder), "--jobs", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "ds_distill", *command],
        env=command_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,  # it heeds SIGINT, also where the tests run in the background
        text=True,
    ) as stopped:
        within(120, lambda: list(folder.glob("shared/*/models/*")))
        stopped.send_signal(signal.SIGINT)
        _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, errors
    assert "Continue with: " in errors and "--resume" in errors
    assert not list(folder.glob("*/*/lock")), "a run goes on"

    done = ds_distill(*command, "--resume", code=1)
    shared = "4 of them share, and run once in each of 2 groups: fine-tune, cache"
    assert done.stdout.count(shared) == 1
    assert done.stdout.count("failed with exit code 2") == 2
    found = results(folder)
    assert found["missing"] == [name.replace("1e-2", "1e30") for name in GOOD]
    [row] = found["settings"]
    assert row["seeds"] == ["1", "2"] and row["score"]["interval"] is not None
    assert row["score"]["over"] == ["seeds", "examples"]
    for name in GOOD:
        # Of shared phases nothing ran again; weights are gone, the rest of a run is there.
        assert "fine-tune: done before" in (folder / "logs" / f"{name}.txt").read_text()
        run = folder / "runs" / name
        assert (run / "report.html").is_file() and not (run / "models").exists()

    assert "Not finished, and not counted" in (folder / "report.html").read_text()

    with pytest.raises(UserError, match="other settings"):
        command_line("sweep", recipe, "seed=1,2", "--folder", folder, "--resume")
    # The recipe's own rate is the good one, and nothing is shared here.
    seeds = tmp_path / "seeds"
    alone = command_line("sweep", recipe, "seed=1,2", "--folder", seeds, "--keep")
    for name, seed in zip(GOOD, row["seeds"], strict=True):
        ours, its = folder / "runs" / name, seeds / "runs" / f"seed={seed}"
        assert evaluation(ours)["models"] == evaluation(its)["models"]
        assert (its / "student" / "config.json").is_file()
        assert curves(ours) == curves(its)
    [again] = results(seeds)["settings"]
    assert again["score"] == row["score"]
    low, high = row["score"]["interval"]
    values = " ".join(f"{value:.1%}" for value in row["score"]["values"])
    shown = " ".join(alone.output.split())
    assert f"{row['score']['mean']:.1%} ({low:.1%} to {high:.1%}) {values}" in shown


def test_models_are_compared_over_recipes_and_a_broken_one_is_named(
    toy_task, tiny_models, tmp_path, in_this_process
):
    from transformers import BertModel

    assert "the" in toy_vocabulary()
    broken = tmp_path / "broken"
    shutil.copytree(tiny_models["toy"], broken)
    break_word(broken, BertModel, "the")
    for name, metric in (("one", "accuracy"), ("two", "macro_f1")):
        about = {"data": {"path": str(toy_task)}, "max_length": 32, "metric": metric}
        training = {"epochs": 3, "dropout": 0.0, "batch_size": 16}
        phases = [{"fine-tune": {"models": "student"}}, {"evaluate": {"split": "test"}}]
        made = {"task": about, "student": {"model": "x"}, "training": training, "phases": phases}
        written({**made, "deepspeed": "zero0_fp32"}, tmp_path, name)
    folder, rates = tmp_path / "sweep", "training.learning_rate=1e-6,1e-2"
    models = f"student.model={tiny_models['toy']},{broken}"
    words = ["sweep", tmp_path / "one.yaml", tmp_path / "two.yaml", models, rates]
    done = command_line(*words, "--folder", folder, "--jobs", "2", code=1)
    assert "4 of the runs failed" in done.output
    found = results(folder)
    assert len(found["missing"]) == 4 and all("broken" in run for run in found["missing"])
    of = found["recipes"]["one"]
    grid, [toy] = of["grids"][str(tiny_models["toy"])], of["settings"]
    # A rate of 1e-6 learns nothing: the examples that choose say so, too.
    slow, fast = grid["settings"]
    assert toy["setting"] == fast["setting"] and grid["chosen"] == 1
    assert fast["choosing"]["mean"] > slow["choosing"]["mean"] + 0.2
    [run] = (
        one
        for one in (folder / "runs").glob("one,*learning_rate=1e-2*")
        if "broken" not in one.name
    )
    record = evaluation(run)
    judged = record["models"]["student"]
    assert toy["score"]["values"] == [judged["accuracy"]] and judged["accuracy"] > 0.6
    assert toy["majority"] == [record["baseline"]["accuracy"]]
    assert not (run / "models").exists() and (run / "predictions").is_dir()
    first, second = found["means"]
    both = [found["recipes"][name]["settings"][0]["score"]["mean"] for name in ("one", "two")]
    assert first["mean"]["score"]["mean"] == pytest.approx(sum(both) / 2)
    assert second["mean"]["score"] is None
    page = (folder / "report.html").read_text()
    assert "Not finished, and not counted" in page and "Scores" in page


@pytest.mark.parametrize("name", builtin_suites())
def test_built_in_suites_find_the_shared_data(name, shared_data, tiny_models):
    more = [
        f"data_folder={shared_data}",
        "task.max_length=64",
        f"student.model={tiny_models['bert']}",
    ]
    for file, _ in recipes_of([name]).values():
        recipe = load_recipe(file, more)  # of a tiny model's length
        check_all(recipe)
        assert all("validation" in one.splits for one in open_sources(recipe).values())
