"""Every command, recipe and snippet of the documents as it stands.

Blocks are found in the Markdown files themselves, so a new one is covered by being there. Recipes
load, Python runs, commands parse: options, files, modules and make targets must exist. Commands
run in tests/ci/test_documents_run.py.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import yaml
from documents import DOCUMENTS, FENCED, FOLDERS, ROOT, SPANS, Block, alternatives, commands

from ds_distill.check.check import check_recipe, name_mistakes
from ds_distill.check.phases import phase_mistakes
from ds_distill.cli import app
from ds_distill.recipe import Recipe, builtin_recipes, load_recipe

PARTS = ROOT / "docs/example_parts/example_parts"

PROGRAMS = ("ds-distill", "make", "pip", "python", "deepspeed", "torchrun", "sbatch")
"""First words of the commands in the documents."""

NOT_CODE = {"mermaid", "json"}
"""Languages of blocks that nothing can run: graphs, and rows of data."""

TEXTS = {
    "README.md": ["what its Python printed"],
    "docs/extending.md": ["a recipe of the example package: tests/ci/test_outside_parts.py"],
    "docs/own-data.md": ["a folder of data", "teachers in files: tests/unit/test_predictions.py"],
    "docs/recipes.md": ["a small form: tests/unit/test_small_forms.py"],
    "docs/reference.md": ["a line for editors"],
    "docs/studies/domain-expertise.md": [
        "a sweep: tests/unit/test_recipes_builtin.py",
        "how to convert data that may not be passed on",
    ],
}
"""Blocks of `text` by document: what each is, or the test that reads it."""


def example_names() -> dict[str, Any]:
    """What the modules of the example package import; its blocks define the rest."""
    names: dict[str, Any] = {}
    for file in ("settings.py", "parts.py"):
        for node in ast.parse((PARTS / file).read_text(encoding="utf-8")).body:
            imports = isinstance(node, ast.Import | ast.ImportFrom)
            if imports and getattr(node, "module", "") != "example_parts.settings":
                exec(compile(ast.Module([node], []), file, "exec"), names)
    return names


def logits() -> torch.Tensor:
    return torch.randn(2, 4, 30, requires_grad=True)


RUN_ELSEWHERE = {
    "README.md": "tests/ci/test_own_data.py",
    "docs/library.md": "tests/unit/test_library_examples.py",
    "docs/serving.md": "tests/e2e/test_finished_runs.py",
}
"""Documents whose Python needs more than names, and the test that runs it."""

KNOWN_NAMES = {
    "docs/extending.md": example_names(),
    "kernels/README.md": {
        "student_logits": logits(),
        "teacher_logits": logits().detach(),
        "mask": torch.ones(2, 4, dtype=torch.bool),
    },
}
"""What the Python of a document takes as given."""


def test_the_code_of_the_example_package_is_that_of_its_files():
    sources = [" ".join(path.read_text("utf-8").split()) for path in PARTS.glob("*.py")]
    blocks = [b for b in FENCED if b.document == "docs/extending.md" and b.language == "python"]
    parts = [part for block in blocks for part in block.text.split("\n\n\n")]
    assert len(parts) >= 3
    for part in parts:
        assert any(" ".join(part.split()) in source for source in sources), part


@pytest.mark.parametrize("block", FENCED, ids=lambda block: block.place)
def test_a_block_holds(block, tmp_path, toy_settings, parts_as_before):
    if block.language in NOT_CODE or (block.language == "text" and block.document in TEXTS):
        return
    if block.language == "python" and block.document in RUN_ELSEWHERE:
        assert (ROOT / RUN_ELSEWHERE[block.document]).is_file()
    elif block.language == "python":
        exec(compile(block.text, block.place, "exec"), dict(KNOWN_NAMES.get(block.document, {})))
    elif block.language == "yaml" or block.text.startswith("- "):
        check_yaml(block, tmp_path, toy_settings)
    else:
        assert block.language in ("", "sh", "bash", "console"), f"unknown {block.language!r}"
        if re.fullmatch(r"[\w.]+/", block.text.split()[0]):
            check_tree(block.text.split("\n"))
        written: dict[str, str] = {}
        for line in commands(block):
            for part in line.split(" && "):
                check_command(part, written)


def check_yaml(block: Block, tmp_path: Path, toy_settings: dict) -> None:
    data = yaml.safe_load(block.text)
    whole = isinstance(data, dict) and {"phases", "student"} <= data.keys()  # it is copied
    more = data if isinstance(data, dict) else {"phases": data}
    if "task" in more:
        more["task"] = {**toy_settings["task"], **more["task"]}
    toy_settings = {key: toy_settings[key] for key in toy_settings if f"{key}s" not in more}
    path = tmp_path / "snippet.yaml"
    path.write_text(block.text if whole else yaml.safe_dump({**toy_settings, **more}), "utf-8")
    recipe = load_recipe(path)
    assert [*name_mistakes(recipe), *phase_mistakes(recipe)] == []
    models = [model.model for model in [*recipe.teachers.values(), recipe.student]]
    if all(str(model).startswith("pkg:") for model in models):
        check_recipe(recipe)


def check_tree(lines: list[str]) -> None:
    """Lines of a folder's tree: `name    what it is`, indented below its folder."""
    folders: list[str] = []
    for line in filter(str.strip, lines):
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name]
        assert (ROOT / "/".join(folders)).exists(), "/".join(folders)


def check_command(line: str, written: dict[str, str]) -> None:
    """written: file that a command of the block wrote -> the recipe in it."""
    line, _, file = line.partition(" > ")
    for first, *words in alternatives(line):
        if first == "PYTHONPATH=kernels":
            first, *words = words
        if first == "srun":
            first, *words = words[words.index("ds-distill") :]
        if first in ("cp", "mkdir", "source"):
            continue
        first = first.replace("python3", "python")
        assert first in PROGRAMS, f"{first!r} of {line!r}: teach this test what it is"
        if first == "ds-distill":
            check_ds_distill(words, written, file.strip())
        elif first == "make":
            check_make(words)
        elif first == "pip":
            check_pip(words)
        elif first == "python" and words[0] == "-m":
            check_module(words[1:])
        elif first in ("deepspeed", "torchrun") and "--module" in words:
            module, *rest = words[words.index("--module") + 1 :]
            assert module == "ds_distill"
            check_ds_distill(rest, written, file.strip())
        else:
            scripts = [first, *words] if "/" in first else words
            script = next(word for word in scripts if "/" in word)
            assert (ROOT / script).is_file(), script
            if first in ("python", "deepspeed"):
                check_options(ROOT / script, words[words.index(script) :])
            if script.startswith("launchers/"):
                subprocess.run(["bash", "-n", ROOT / script], check=True)
                assert os.access(ROOT / script, os.X_OK) or first == "sbatch", script


def check_ds_distill(words: list[str], written: dict[str, str], file: str) -> None:
    command: Any = typer.main.get_command(app)
    name = "ds-distill"
    if not words or words[0].startswith("--"):
        return
    if words[0] == "quickstart":
        words = ["run", *words]
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"no command {name!r}"
        command = command.commands[name]
    if not words:
        return  # its name alone
    words = [re.sub("^N$", "2", word) for word in words]
    parameters = command.make_context(name, list(words)).params
    if name == "recipes" and file:
        written[file] = parameters["name"]
    recipe = parameters.get("recipe")
    overrides = [o for o in parameters.get("overrides") or [] if o != "KEY=VALUE"]
    recipe = written.get(recipe, recipe)
    if recipe in builtin_recipes():
        load_recipe(recipe, overrides, parameters.get("small", False))
    elif overrides:
        assert any(loads(name, overrides) for name in builtin_recipes()), overrides


def loads(name: str, overrides: list[str]) -> bool:
    try:
        load_recipe(name, overrides)
    except Exception:
        return False
    return True


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        variable, equals, _ = word.partition("=")
        if equals:
            assert f"$({variable})" in makefile, f"make has no variable {variable}"
        else:
            assert re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"make {word}"


def check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        assert {*extra.split(",")} <= project["optional-dependencies"].keys(), extra


def check_module(words: list[str]) -> None:
    module, *arguments = words
    found = importlib.util.find_spec(module)
    assert found is not None, module
    if module == "pytest":
        paths = [word for word in arguments if "/" in word]
        assert all((ROOT / path).exists() for path in paths), paths
    elif found.origin is not None:
        check_options(Path(found.origin), arguments)


def check_options(script: Path, arguments: list[str]) -> None:
    source = script.read_text(encoding="utf-8")
    for option in (word for word in arguments if word.startswith("--")):
        assert f'"{option.partition("=")[0]}"' in source, f"{script} has no {option}"


# ------------------------------------------------------------------------- within sentences


def test_links_lead_somewhere():
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", text):
            file, _, heading = target.partition("#")
            place = path.parent / file if file else path
            assert place.exists(), (path, target)
            headings = re.findall(r"^#+ (.*)$", place.read_text("utf-8"), re.M) if heading else []
            anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert not heading or heading in anchors, (path, target)


def test_the_architecture_names_every_room_and_its_files():
    table = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("\n## ")[0]
    package, named = ROOT / "ds_distill", set()
    for line in filter(lambda line: line.startswith("| `"), table.splitlines()):
        rooms, _, begin = (re.findall(r"`([\w./]+)`", cell) for cell in line.split("|")[1:4])
        named |= {*rooms}
        for file in begin:
            assert any((package / room / file).is_file() for room in (*rooms, "")), line
    there = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    there |= {path.name for path in package.glob("[!_]*.py")}
    assert named == there


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_page_of_commands_names_them_all():
    [block] = [block for block in FENCED if block.document == "docs/commands.md"]
    named = {line.split()[1] for line in block.text.splitlines() if line}
    assert named == set(typer.main.get_command(app).commands)


def test_each_block_of_text_is_accounted_for():
    there = Counter(block.document for block in FENCED if block.language == "text")
    assert there == {document: len(texts) for document, texts in TEXTS.items()}


def test_commands_in_sentences_parse():
    assert len(FENCED) >= 8 and len(SPANS) > 100
    for span in SPANS:
        for command in commands(span):
            print(span.place, command)  # what is shown where it fails
            check_command(command, {})


def test_paths_in_sentences_are_there():
    tops = "|".join(FOLDERS)
    for span in SPANS:
        if re.fullmatch(rf"({tops})/[\w./*-]+", span.text):
            assert any(ROOT.glob(span.text.rstrip("/"))), f"{span.place}: {span.text}"


def test_modules_in_sentences_are_there():
    for span in SPANS:
        if re.fullmatch(r"(ds_distill|ds_kernels)(\.\w+)+", span.text):
            module, _, name = span.text.rpartition(".")
            there = importlib.util.find_spec(module) and importlib.util.find_spec(span.text)
            there = there or hasattr(importlib.import_module(module), name)
            assert there, f"{span.place}: {span.text}"


def test_overrides_in_sentences_load():
    seen = 0
    for span in SPANS:
        key = re.fullmatch(r"([a-z_]+)(\.[\w-]+)*=\S+", span.text)
        if key and key.group(1) in Recipe.model_fields:
            assert any(loads(name, [span.text]) for name in builtin_recipes()), span
            seen += 1
    assert seen, "the documents show overrides"
