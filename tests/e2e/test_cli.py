"""The commands as a user types them, and what a run leaves."""

import json
import re
import shutil

import pytest
from processes import python
from runs import command_line, written
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
    result = command_line(command, "--help")
    _, _, example = " ".join(result.output.split()).partition("Example: ")
    takes = "run" if command == "quickstart" else command  # whose options it has
    options = command_line(takes, "--help").output
    for option in re.findall(r"--[a-z-]+", example):
        assert option in options.partition("Example: ")[0], option
    for name in re.findall(r"\b(?:quickstart|tweeteval[a-z-]*)\b", example):
        assert name in builtin_recipes()


def test_recipes_lists_and_prints(tmp_path):
    listed, printed = command_line("recipes"), command_line("recipes", "quickstart")
    assert [line.split()[0] for line in listed.output.splitlines()] == list(builtin_recipes())
    (tmp_path / "mine.yaml").write_text(printed.output)
    mine = load_recipe(str(tmp_path / "mine.yaml"))
    assert mine.name == "mine", "its run is not in the built-in's folder"
    assert mine == load_recipe("quickstart", ["name=mine"])


def test_check_says_what_would_run(toy_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = command_line("check", toy_recipe)
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
    recipe = written({**toy_settings, "padding": "never"}, tmp_path)
    options = ["check", recipe, f"task.data.path={data}"]
    result = command_line(*options)
    notes = [line for line in result.output.splitlines() if line.startswith("Note: ")]
    size = len((data / "test.jsonl").read_text().splitlines())
    assert f"Note: 2 of {len(lines) + 5} texts of split 'train' are empty" in notes[0]
    outputs = " ".join(notes[1:])
    assert f"all {size} examples of split 'test' stand in 'validation', too" in outputs
    for judge in ("test", "validation"):
        stand = rf"\d+ of the {size} examples of split '{judge}' stand in 'train'"
        assert re.search(stand, outputs)
    shutil.copytree(toy_task, data, dirs_exist_ok=True)
    assert "examples of split" not in command_line(*options).output


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
    code = WITHOUT_MODELS.replace("*MASKED_LM", "'deepspeed=zero1_auto'")
    for name in (toy_recipe, written(masked_lm_settings, tmp_path)):
        code = code.replace("RECIPE", repr(str(name)), 1)
    done = python(code)
    assert f"ds-distill {__version__}" in done.stdout
    assert done.stdout.count("no mistakes found") == 2


def test_the_shell_can_complete_commands():
    words = {"COMP_WORDS": "ds-distill ca", "COMP_CWORD": "1"}
    given = {"_DS_DISTILL_COMPLETE": "complete_bash", **words}
    found = CliRunner().invoke(app, [], prog_name="ds-distill", env=given)
    assert found.output.split() == ["cache"]


def test_the_argument_that_deepspeeds_launcher_adds_is_taken(ds_distill):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = ds_distill("--local_rank=0", "recipes", env=rank)
    assert "quickstart" in done.stdout, done.stderr
    ds_distill("--local_rank=0", "recipes", code=2)  # nobody else's option
