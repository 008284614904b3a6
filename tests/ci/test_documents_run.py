"""Every command of the documents runs, as it stands but for what documents.yaml changes, and why.

They run in a desk: a copy of the checkout beside the data, models, recipes and finished runs that
documents take as given. A built-in recipe's name finds the file of that name there, which is the
recipe with toy models and data.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from ci.test_own_data import fine_tune_elsewhere, write_texts
from documents import BLOCKS, FENCED, ROOT, alternatives, commands
from e2e.test_recipes import Toys
from processes import ended
from runs import command_line
from toys import make_tiny_bert, toy_vocabulary

from ds_distill.process.identity import free_port
from ds_distill.recipe import builtin_recipes, load_recipe
from ds_distill.sweep.runs import builtin_suites

TABLE = yaml.safe_load(Path(__file__).with_name("documents.yaml").read_text(encoding="utf-8"))
USED: set[str] = set()

UNRUN = [TABLE["names"], *(test["of"] for test in TABLE["elsewhere"])]

OWN_DATA = ("docs/own-data.md", "yaml")
[RECIPE] = [block.text for block in FENCED if (block.document, block.language) == OWN_DATA]
"""Each recipe of a user's own is this one."""
MOST_LINES = 15
RECIPES = ("RECIPE", "small/RECIPE", "TASK", "tickets.yaml", "my.yaml", "one.yaml", "other.yaml")
RECIPES = (*RECIPES, "folder/third.yaml")
MODELS = ("S", "ONE", "OTHER", "MINE", "MODEL", "distilbert/distilbert-base-uncased")
STARTS = ("run", "launch", "sweep", "quickstart")


def changed(line: str) -> str:
    for change in TABLE["changes"]:
        if re.search(change.get("in", ""), line):
            line, count = re.subn(change["of"], change["by"], line)
            if count:
                USED.add(change["of"])
    return line


def groups() -> Iterator[Any]:
    """What is run one after the other: the commands of a block, without those of earlier ones."""
    seen: set[str] = set()
    for block in BLOCKS:
        lines = [one for line in commands(block) for one in line.split(" && ")]
        lines = [changed(line) for line in lines if not re.fullmatch("|".join(UNRUN), line)]
        new = [line for line in dict.fromkeys(lines) if line not in seen]
        seen |= {*new}
        if new:
            yield pytest.param(new, id=block.place)


GROUPS = list(groups())


def test_the_table_holds_what_is_needed():
    every = [line for block in BLOCKS for line in commands(block)]
    for pattern in UNRUN:
        assert any(re.fullmatch(pattern, line) for line in every), pattern
    for test in TABLE["elsewhere"]:
        assert test["words"] in (ROOT / test["at"]).read_text(encoding="utf-8"), test
    assert RECIPE.count("\n") <= MOST_LINES
    assert {change["of"] for change in TABLE["changes"]} == USED, "a change that changes nothing"
    assert all(change["why"] for change in TABLE["changes"])


@pytest.fixture(scope="module")
def desk(tmp_path_factory, ds_distill):
    here = tmp_path_factory.mktemp("desk")
    leave = shutil.ignore_patterns(".*", "runs", "dist", "__pycache__", "ds_*")
    shutil.copytree(ROOT, here, ignore=leave, dirs_exist_ok=True)
    for name in ("folder", "small", "FOLDER"):
        (here / name).mkdir()
    (here / ".venv").symlink_to(sys.prefix)
    settings = yaml.safe_load(RECIPE)
    labels = settings["task"]["labels"]
    for name in ("tickets", "DATA", "DIR"):
        (here / name).mkdir()
        write_texts(here / name, labels)
    shutil.copy(here / "tickets/test.csv", here / "new-tickets.csv")
    shutil.copy(ROOT / "docs/results/encoders.json", here / "FOLDER")
    table = min((ROOT / "kernels/benchmarks/results").glob("*.csv"))
    shutil.copy(table, here / "benchmark-masked_kl.csv")
    (here / "FETCHED").mkdir()
    for name in ("summary.json", "results.tar.gz"):
        (here / "FETCHED" / name).touch()
    with gzip.open(here / "texts.txt.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"{row} of many texts\n" for row in range(40))
    for split in ("train", "test"):
        rows = csv.DictReader((here / f"DATA/{split}.csv").open(encoding="utf-8"))
        (here / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = [teacher["model"] for teacher in settings["teachers"].values()]
    for seed, names in enumerate(zip(places, "AB", strict=True)):
        fine_tune_elsewhere(here / names[0], here / "DATA", labels, seed)
        shutil.copytree(here / names[0], here / names[1])
    for name in MODELS:
        make_tiny_bert(here / name, toy_vocabulary())
    columns = {"text": "text", "text_b": None, "label": "label"}
    for split in ("train", "validation", "test"):
        file = here / f"DIR/tweeteval_emotion/{split}.jsonl"
        Toys(here).write(file, columns, ["anger", "joy", "optimism", "sadness"], "single-label")
    begin(here)
    shutil.copy(here / "test.jsonl", here / "texts.jsonl")
    ds_distill("run", "my.yaml", "--folder", "finished", cwd=here)
    ds_distill("run", "RECIPE", "--folder", "unfinished", "--until", "cache", cwd=here)
    return here


def begin(desk: Path) -> None:
    """As they are before any command: recipes, built-in ones as they are, and no run."""
    remove_runs(desk)
    for name in builtin_recipes():
        if (desk / name).is_file():
            (desk / name).unlink()
    for name in RECIPES:
        (desk / name).write_text(RECIPE, encoding="utf-8")


def remove_runs(desk: Path) -> None:
    for name in ("runs", "shared"):
        shutil.rmtree(desk / name, ignore_errors=True)


def lay(desk: Path, words: list[str]) -> None:
    """What a command takes as given is there, and what it makes is not."""
    if words[1] in STARTS and "--resume" not in words:
        remove_runs(desk)
    if "--resume" in words and not (desk / "runs").exists():
        shutil.copytree(desk / "unfinished", desk / "runs/RECIPE")
    if words[1] == "route":
        shutil.copytree(desk / "finished", desk / "runs/my", dirs_exist_ok=True)
    if words[1] == "init" and "--output" not in words:
        (desk / f"{words[2]}.yaml").unlink(missing_ok=True)
    for before, word in pairwise(words):
        run = re.match(r"(shared/)?runs/[\w-]+", word)
        if before in ("--output", "--json", "--figure", ">"):
            (desk / word).unlink(missing_ok=True)
        elif run and before != "--folder" and not (desk / run[0]).exists():
            shutil.copytree(desk / "finished", desk / run[0])
        elif word in builtin_recipes() and "--small" not in words and before != "recipes":
            shutil.copy(toy(desk, word), desk / word)
        elif word in builtin_suites():
            of_it = max(builtin_suites()[word].rglob("*.yaml"))
            (desk / word).mkdir(exist_ok=True)
            shutil.copy(toy(desk, str(of_it)), desk / word)


def toy(desk: Path, name: str) -> Path:
    recipe = load_recipe(name)
    Toys(desk / f"toys-{recipe.name}").recipe(recipe)
    return desk / f"toys-{recipe.name}" / f"{recipe.name}.yaml"


@pytest.mark.parametrize("lines", GROUPS)
@pytest.mark.usefixtures("in_this_process")
def test_commands_run(lines, desk, ds_distill, command_environment, monkeypatch):
    begin(desk)
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    here = {"PATH": path, "ROOT": str(ROOT), "PORT": str(free_port())}
    for line in lines:
        given, _, file = line.partition(" > ")
        for first, *words in alternatives(given):
            lay(desk, [first, *words, *([">", file] if file else [])])
            if re.fullmatch(TABLE["looked_at"], line):
                monkeypatch.chdir(desk)
                monkeypatch.setattr("ds_distill.cli.sweep.run_sweep", lambda *_: None)
                command_line(*words)
            elif "&" not in words and (first == "ds-distill" or words[0].endswith(".py")):
                done = ds_distill(*words, cwd=desk)
            else:
                done = ended("bash", "-c", line, env=command_environment | here, cwd=desk)
            if file:
                assert done.stdout, line
                (desk / file).write_text(done.stdout)
            for before, word in pairwise(words):
                if before in ("--output", "--json", "--figure"):
                    assert (desk / word).stat().st_size, f"{line}: {word} is empty"
