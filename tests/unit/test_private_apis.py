"""What the package uses of its libraries that they do not promise to keep.

Private names, and modules that the libraries do not document, may change with any release: each
one is listed in private_apis.yaml with the reason why nothing public does.
"""

import ast
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("ds_distill", "kernels/ds_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "triton", "tokenizers", "accelerate")

LISTED = yaml.safe_load(Path(__file__).with_name("private_apis.yaml").read_text(encoding="utf-8"))
PUBLIC_MODULES = {*LIBRARIES, *LISTED["public modules"]}
REASONS = LISTED["private names"] | LISTED["modules"]


def uses():
    """(`name` or `module`, where) of what is private in a library."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    ours = {name for tree in trees.values() for name in defined(tree)}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            for name in private_names(node):
                if name not in ours:
                    yield name, place
            for module in modules(node):
                if module.split(".")[0] in LIBRARIES and module not in PUBLIC_MODULES:
                    yield module, place


def defined(tree):
    """Names that the package itself gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.ImportFrom) and (node.level or not library(node.module)):
            yield from (alias.name for alias in node.names)


def private_names(node):
    if isinstance(node, ast.Attribute):
        if node.attr != "_exit":  # of os, and documented
            yield from filter(is_private, [node.attr])
    elif isinstance(node, ast.ImportFrom) and library(node.module):
        yield from filter(is_private, [alias.name for alias in node.names])
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        names = [n.value for n in node.args if isinstance(n, ast.Constant)]
        yield from (name for name in names if isinstance(name, str) and is_private(name))


def modules(node):
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)


def library(module):
    return (module or "").split(".")[0] in LIBRARIES


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@pytest.fixture(scope="module")
def used():
    return [*uses()]


def test_each_private_name_is_listed_with_its_reason(used):
    new = [(name, place) for name, place in used if name not in REASONS]
    assert new == [], "use what is public, or list it in private_apis.yaml with the reason"


def test_nothing_is_listed_that_is_not_used(used):
    assert REASONS.keys() - {name for name, _ in used} == set()


def test_a_new_use_is_found():
    code = "from torch._inductor import config\nx = model._private\ngetattr(y, '_hidden', None)"
    nodes = list(ast.walk(ast.parse(code)))
    assert {name for node in nodes for name in private_names(node)} == {"_private", "_hidden"}
    assert [module for node in nodes for module in modules(node)] == ["torch._inductor"]
