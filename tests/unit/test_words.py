"""Names in the code are the field's: words that were replaced do not come back."""

import ast
import re
from pathlib import Path

import pytest

import ds_distill

REPLACED = {
    "deal": "split_batch",
    "dealt": "assigned",
    "felt": "predicted",
    "filler": "dummy",
    "heeded": "handled",
    "place": "reference, location or position",
    "said": "reported",
    "says": "signals",
    "speaks": "enabled",
    "voice": "log",
}
"""Word -> what to use. As a part of a name: `filler_rows`, `FillerRows`."""

ROOT = Path(ds_distill.__file__).parent


def names(tree):
    """The identifiers of a module: its own and those that it uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def parts(name):
    return {part.lower() for part in re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", name)}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_names_are_the_fields(path):
    for name in set(names(ast.parse(path.read_text(encoding="utf-8")))):
        for word in parts(name) & REPLACED.keys():
            pytest.fail(f"{name}: not {word!r} but {REPLACED[word]}")


def test_a_word_is_found_within_a_name():
    found = set(names(ast.parse("class FillerRows:\n    def dealt_by(self, place): ...")))
    assert set().union(*map(parts, found)) & REPLACED.keys() == {"filler", "dealt", "place"}
