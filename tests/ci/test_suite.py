"""`ds-distill suite`: every fine-tuning is a run; the setting is chosen on validation; a checkpoint
that cannot be trained leaves the others' results."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from runs import command_line, evaluation, results, written
from toys import break_word, toy_vocabulary

from ds_distill.errors import UserError
from ds_distill.sweep.suite import builtin_suites, load_suite, suite_runs
from ds_distill.sweep.sweep import check_runs


def test_checkpoints_are_compared_and_a_broken_one_is_named(
    toy_task, tiny_models, tmp_path, in_this_process
):
    from transformers import BertModel

    assert "the" in toy_vocabulary()
    broken = tmp_path / "broken"
    shutil.copytree(tiny_models["toy"], broken)
    break_word(broken, BertModel, "the")
    tasks = {"kinds": {"data": {"path": str(toy_task)}, "max_length": 32}}
    suite = {
        "seeds": [1],
        "grid": {"learning_rate": [1.0e-6, 1.0e-2], "batch_size": [16]},
        "training": {"epochs": 3, "dropout": 0.0},
        "tasks": tasks,
        "lacks": "Everything else.",
        "deepspeed": "zero0_fp32",
    }
    written(suite, tmp_path, "toy")
    folder = tmp_path / "suite"
    command = ["suite", tmp_path / "toy.yaml", tiny_models["toy"], broken, "--folder", folder]

    def run(*options: str, **code: int) -> Any:
        return command_line(*command, *options, **code)

    with pytest.raises(UserError, match=r"no checkpoint is called so.*They are toy, broken"):
        run("--reference", "tay")
    assert not folder.exists()
    done = run("--jobs", "2", code=1)
    assert "The suite lacks: Everything else." in done.output
    assert "2 of the runs failed" in done.output
    found = results(folder)
    assert len(found["missing"]) == 2 and all("checkpoint=broken" in m for m in found["missing"])
    [task] = found["tasks"].values()
    grid, [toy] = task["grids"]["toy"], task["settings"]
    # A rate of 1e-6 learns nothing: the examples that choose say so, too.
    slow, fast = grid["settings"]
    assert toy["setting"][0] == "checkpoint=toy" and grid["chosen"] == 1
    assert fast["choosing"]["mean"] > slow["choosing"]["mean"] + 0.2
    run_of = folder / "runs" / "task=kinds,checkpoint=toy,learning_rate=0.01,batch_size=16,seed=1"
    record = evaluation(run_of)
    judged = record["models"]["student"]
    assert toy["score"]["values"] == [judged["accuracy"]] and judged["accuracy"] > 0.6
    assert toy["majority"] == [record["baseline"]["accuracy"]]
    assert not (run_of / "models").exists() and (run_of / "predictions").is_dir()
    page = (folder / "report.html").read_text()
    assert "Not finished, and not counted" in page and "Everything else." in page
    with pytest.raises(UserError, match="other settings"):
        run("--resume", "seeds=[2]")
    with pytest.raises(UserError, match="holds a sweep"):
        run()


@pytest.mark.parametrize("name", builtin_suites())
def test_built_in_suites_find_the_shared_data(name, shared_data, tiny_models, tmp_path):
    short = [f"tasks.{task}.max_length=64" for task in load_suite(name).tasks]  # a tiny model's
    suite = load_suite(name, [f"data_folder={shared_data}", *short])
    runs = suite_runs(suite, {"bert": str(tiny_models["bert"])}, tmp_path)
    check_runs(runs, of_suite=True)
