"""Every command, recipe and snippet of the documents as it stands.

Blocks are found in the Markdown files themselves, so a new one is covered by being there. Recipes
load, Python runs, commands parse: options, files, modules and make targets must exist. What a
command would do is not done here; PARSED_ONLY says why.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import yaml

from ds_distill.check.check import check_recipe, name_mistakes
from ds_distill.check.phases import phase_mistakes
from ds_distill.cli import app
from ds_distill.recipe import Recipe, builtin_recipes, load_recipe

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "docs/example_parts/example_parts"
FOLDERS = ("ds_distill", "ds_configs", "kernels", "launchers", "tests", "tools", "docs")
OTHERS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", *OTHERS]

PARSED_ONLY = {
    "ds-distill": "runs take minutes; tests/e2e runs each command",
    "make": "installs and runs everything else",
    "pip": "needs an index",
    "python": "measurements take minutes, and some need a GPU",
    "deepspeed": "two ranks of 24-layer teachers need 13 GiB",
    "sbatch": "needs Slurm",
    "torchrun": "several nodes; tests/ci/test_launch.py starts it on one",
}
"""First words of the commands in the documents, and why they do not run here."""

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


@dataclass
class Block:
    """A fenced block, or a code span of one line."""

    place: str
    document: str
    language: str
    text: str
    is_span: bool = False


FENCED_BLOCK = re.compile(r"^[ \t]*```(.*)\n(?s:(.*?)\n)??[ \t]*```$", re.MULTILINE)


def blocks(path: Path) -> Iterator[Block]:
    document, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for found in FENCED_BLOCK.finditer(text):
        place = f"{document}:{1 + text.count(chr(10), 0, found.start())}"
        yield Block(place, document, found[1].strip(), found[2] or "")
    rest = FENCED_BLOCK.sub(lambda found: "\n" * found[0].count("\n"), text)
    assert "```" not in rest, f"{document}: a block is not closed"
    for number, line in enumerate(rest.split("\n"), 1):
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            yield Block(f"{document}:{number}", document, "", span, is_span=True)


BLOCKS = [block for path in DOCUMENTS for block in blocks(path)]
FENCED = [block for block in BLOCKS if not block.is_span]
SPANS = [block for block in BLOCKS if block.is_span]


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
        lines = block.text.replace("\\\n", " ").split("\n")
        if re.fullmatch(r"[\w.]+/", lines[0].split(" ")[0]):
            check_tree(lines)
            return
        written: dict[str, str] = {}
        for line in filter(str.strip, lines):
            if not line.startswith("#"):
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
    line = re.sub(r"\s+#.*|^\s*\$ ", "", line).strip()
    line = re.split(r"\s{2,}(?!-)", line)[0]  # what follows is said of it
    line, _, file = line.partition(" > ")
    for first, *words in alternatives(line):
        if first == "PYTHONPATH=kernels":
            first, *words = words
        if first in ("cp", "mkdir", "source"):
            continue
        first = first.replace("python3", "python")
        assert first in PARSED_ONLY, f"{first!r} of {line!r}: teach this test what it is"
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


def alternatives(line: str) -> Iterator[list[str]]:
    """The commands that a line of usage stands for: `a b|c [D ...]` is `a b D` and `a c D`."""
    line = re.sub(r"\[([^\[\]]*?)( \.\.\.)?\]", r"\1", line) if ".[" not in line else line
    words = [word for word in shlex.split(line) if word != "..."]
    choice = next((word for word in words if re.fullmatch(r"[a-z]+(\|[a-z]+)+", word)), None)
    for one in choice.split("|") if choice else [None]:
        yield [one if one and word == choice else word for word in words]


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
        part = span.text.startswith("ds-distill") and " ... " in span.text
        if re.match(r"(ds-distill|make|pip|deepspeed|python) ", span.text) and not part:
            print(span.place, span.text)  # what is shown where it fails
            check_command(span.text, {})


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
