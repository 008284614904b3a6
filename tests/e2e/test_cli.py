"""The commands as a user types them, and what a run leaves."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import results
from typer.testing import CliRunner

from ds_distill import __version__
from ds_distill.cli import app
from ds_distill.recipe import builtin_recipes, load_recipe

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = CliRunner().invoke(app, [command, "--help"], prog_name="ds-distill")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert f"Usage: ds-distill {command}" in text
    assert re.search(rf"Example: ds-distill {command}\b", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_use_options_that_exist(command):
    result = CliRunner().invoke(app, [command, "--help"])
    _, _, example = " ".join(result.output.split()).partition("Example: ")
    takes = "run" if command == "quickstart" else command  # whose options it has
    options = CliRunner().invoke(app, [takes, "--help"]).output
    for option in re.findall(r"--[a-z-]+", example):
        assert option in options.partition("Example: ")[0], option
    for name in re.findall(r"\b(?:quickstart|tweeteval[a-z-]*)\b", example):
        assert name in builtin_recipes()


def test_recipes_lists_and_prints(tmp_path):
    listed = CliRunner().invoke(app, ["recipes"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == list(builtin_recipes())
    printed = CliRunner().invoke(app, ["recipes", "quickstart"])
    assert printed.exit_code == 0
    (tmp_path / "mine.yaml").write_text(printed.output)
    mine = load_recipe(str(tmp_path / "mine.yaml"))
    assert mine.name == "mine", "its run is not in the built-in's folder"
    assert mine == load_recipe("quickstart", ["name=mine"])


def test_check_says_what_would_run(toy_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["check", str(toy_recipe)])
    assert result.exit_code == 0, result.output
    assert "no mistakes found" in result.output
    assert "teach-first, teach-second, expertise, cache, distil, evaluate" in result.output
    assert sorted(tmp_path.iterdir()) == before


def test_check_notes_what_is_no_mistake(toy_settings, toy_task, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(toy_task, data)
    shutil.copy(data / "validation.jsonl", data / "test.jsonl")
    lines = (data / "train.jsonl").read_text().splitlines()
    both = (data / "validation.jsonl").read_text().splitlines()[:3]
    blank = [json.dumps({"text": " \n", "label": "food"})] * 2
    (data / "train.jsonl").write_text("\n".join([*lines, *both, *blank]) + "\n")
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({**toy_settings, "padding": "never"}))
    options = ["check", str(tmp_path / "toy.yaml"), f"task.data.path={data}"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    notes = [line for line in result.output.splitlines() if line.startswith("Note: ")]
    size = len((data / "test.jsonl").read_text().splitlines())
    assert f"Note: 2 of {len(lines) + 5} texts of split 'train' are empty" in notes[0]
    outputs = " ".join(notes[1:])
    assert f"all {size} examples of split 'test' stand in 'validation', too" in outputs
    for judge in ("test", "validation"):
        assert re.search(
            rf"\d+ of the {size} examples of split '{judge}' stand in 'train'", outputs
        )
    shutil.copytree(toy_task, data, dirs_exist_ok=True)
    assert "examples of split" not in CliRunner().invoke(app, options).output


WITHOUT_MODELS = """
import sys
from ds_distill.cli import app
for arguments in (["--help"], ["--version"], ["recipes"], ["recipes", "emotion"], ["check", RECIPE],
                  ["check", RECIPE, *MASKED_LM]):
    try:
        app(arguments)
    except SystemExit as done:
        assert not done.code, arguments
    loaded = {"torch", "deepspeed", "wandb", "transformers.modeling_utils"} & {*sys.modules}
    assert not loaded, (arguments, loaded)
import torch  # is there all the same
"""


def test_commands_that_run_no_model_import_no_model_code(toy_recipe, masked_lm_settings, tmp_path):
    (tmp_path / "mlm.yaml").write_text(yaml.safe_dump(masked_lm_settings))
    code = WITHOUT_MODELS.replace("*MASKED_LM", "'deepspeed=zero1_auto'")
    for name in (toy_recipe, tmp_path / "mlm.yaml"):
        code = code.replace("RECIPE", repr(str(name)), 1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"ds-distill {__version__}" in done.stdout
    assert done.stdout.count("no mistakes found") == 2


def test_the_shell_can_complete_commands():
    environment = {"_DS_DISTILL_COMPLETE": "complete_bash", "COMP_WORDS": "ds-distill ca"}
    found = CliRunner().invoke(
        app, [], prog_name="ds-distill", env={**environment, "COMP_CWORD": "1"}
    )
    assert found.output.split() == ["cache"]


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, toy_settings: dict[str, Any], ds_distill: Any
) -> Path:
    """A finished run in its usual place, runs/NAME."""
    here = tmp_path_factory.mktemp("here")
    (here / "toy.yaml").write_text(yaml.safe_dump(toy_settings, sort_keys=False))
    done = ds_distill("run", "toy.yaml", cwd=here)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in here.iterdir()) == ["runs", "toy.yaml"]
    return here / "runs" / "toy"


def test_a_run_leaves_what_is_promised(finished, toy_settings):
    for name in ("recipe.yaml", "environment.json", "metrics.jsonl", "results.json", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    assert not (finished / "checkpoints").exists()
    odd = [path for path in finished.rglob("*") if path.name.startswith((".", "tmp"))]
    assert {path.name for path in odd} <= {".lock"}, "of the cache: builds begin and end under it"
    [cached] = (finished / "cache").iterdir()
    done = CliRunner().invoke(app, ["cache", "verify", str(cached)])
    assert done.exit_code == 0, done.output
    resolved = load_recipe(str(finished / "recipe.yaml"))
    assert resolved.task.data.path == toy_settings["task"]["data"]["path"]
    environment = json.loads((finished / "environment.json").read_text())
    assert {"ds_distill", "commit", "python", "packages", "gpus", "ranks"} <= environment.keys()
    page = (finished / "report.html").read_text(encoding="utf-8")
    shown = html.unescape(re.sub("<[^>]+>", "", page))
    assert results(finished)["verdict"].replace("`", "") in shown
    assert page.count("<figure") >= 2
    tokenizer = json.loads((finished / "student" / "tokenizer.json").read_text())
    assert tokenizer["truncation"] is tokenizer["padding"] is None, "as the model came with it"


def test_the_models_of_a_finished_run_are_profiled(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("ds_distill.profiling.models.SECONDS", 0.02)
    files = [tmp_path / "profile.json", tmp_path / "quality.svg"]
    arguments = ["profile", str(finished), "--json", str(files[0]), "--figure", str(files[1])]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(files[0].read_text())["models"]
    evaluated = results(finished)["phases"][-1]["models"]
    assert [model["name"] for model in found] == list(evaluated)
    for model in found:
        assert model["score"] == evaluated[model["name"]]["accuracy"]
        assert [(case["batch"], case["length"]) for case in model["cases"]] == [(1, 32), (32, 32)]
        for case in model["cases"]:
            assert len(case["seconds"]) >= 5 and case["peak"] is None
            p50, p90, p99 = case["percentiles"]
            assert min(case["seconds"]) <= p50
            assert [p90 is None, p99 is None] == [len(case["seconds"]) < n for n in (10, 100)]
        assert f"{model['parameters'] / 1e6:.1f} M" in done.output
        assert model["name"].encode() in files[1].read_bytes()
    students = [model for model in found if model["role"] == "student"]
    largest = max(found, key=lambda model: model["parameters"])
    assert students and all(model["parameters"] < largest["parameters"] for model in students)


def test_the_better_student_is_shipped(finished):
    distilled = {model["output"]: model for model in results(finished)["phases"][4]["trained"]}
    best = max(distilled.values(), key=lambda model: model["choosing"]["score"])
    assert results(finished)["student"] == best["output"]


def test_the_argument_that_deepspeeds_launcher_adds_is_taken(ds_distill):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = ds_distill("--local_rank=0", "recipes", env=rank)
    assert done.returncode == 0 and "quickstart" in done.stdout, done.stderr
    assert ds_distill("--local_rank=0", "recipes").returncode == 2, "nobody else's option"
