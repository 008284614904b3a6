"""`make test` holds an example of everything: of each part, command and ZeRO stage some test of its
own tier speaks. Those marked `further` or `slow` do not count."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_distill.cli import app
from ds_distill.recipe.registry import KINDS

TESTS = Path(__file__).parents[1]
LATER = re.compile(r"pytest\.mark\.(further|slow)\b")


def spoken(tree: ast.Module) -> Iterator[str]:
    """The strings and names of a module's tests, of its fixtures and of what they are given."""
    marks = [n for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
    if any(LATER.search(ast.unparse(mark)) for mark in marks):
        return
    for part in tree.body:
        decorators = getattr(part, "decorator_list", [])
        if any(LATER.match(ast.unparse(decorator)) for decorator in decorators):
            continue
        for node in ast.walk(part):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"[\w-]+", node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                yield node.arg
            elif isinstance(node, ast.Name):
                yield node.id


@pytest.fixture(scope="module")
def words() -> set[str]:
    files = [file for file in TESTS.rglob("test_*.py") if file != Path(__file__)]
    assert len(files) > 100
    return {word for file in files for word in spoken(ast.parse(file.read_text()))}


def test_what_later_tests_speak_of_does_not_count() -> None:
    module = """
def test_one(): run("kl")
@pytest.mark.further
def test_two(): run("cosine")
@pytest.mark.parametrize("x", [1])
@pytest.mark.slow
def test_three(): run("hidden_mse", x=1)
"""
    assert {*spoken(ast.parse(module))} == {"run", "kl"}
    assert not [*spoken(ast.parse(f"pytestmark = pytest.mark.further\n{module}"))]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_part_has_an_example(kind, words: set[str]) -> None:
    """By its name, or by that of its settings' class."""
    for name, entry in kind.entries.items():
        own = entry if isinstance(entry, type) else getattr(entry, "settings", None)
        assert name in words or (own and own.__name__ in words), name


def test_each_command_and_stage_has_an_example(words: set[str]) -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    groups = {group.name for group in app.registered_groups}
    stages = {f"zero{stage}_fp32" for stage in range(4)}
    assert commands | groups | stages <= words
