"""Whatever the package writes goes through `files`: aside, synced, renamed, the name synced."""

import ast
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cache_files import TWO, make_keys, write_cache

import ds_distill
from ds_distill.cache.format import MANIFEST, write_index
from ds_distill.data.columns import build_once
from ds_distill.files import new_folder, write_json
from ds_distill.routing import ExpertiseTable, Fitted
from ds_distill.routing.gate import Gate

PACKAGE = Path(ds_distill.__file__).parent

LISTED = yaml.safe_load(Path(__file__).with_name("writes.yaml").read_text(encoding="utf-8"))
KNOWN = {(*place.split(),) for place in LISTED["known"]}


def writes():
    """File, function, line and call of each write that bypasses `files`."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if name == "files.py":
            continue
        yield from ((name, *found) for found in found_in(ast.parse(file.read_text()), ()))


def found_in(node, place):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        place = (*place, node.name)
    if isinstance(node, ast.With) and any(
        called(item.context_expr) in LISTED["aside"] for item in node.items
    ):
        return
    if isinstance(node, ast.Call) and is_write(node):
        yield ".".join(place), node.lineno, ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from found_in(child, place)


def called(node):
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_write(call):
    name, module = called(call), getattr(getattr(call.func, "value", None), "id", "")
    if name == "open":
        modes = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "mode")]
        if module == "os":
            return any(
                "O_RDWR" in ast.unparse(mode) or "O_WRONLY" in ast.unparse(mode) for mode in modes
            )
        return any(set(ast.literal_eval(mode)) & set("wax+") for mode in modes)
    if name in LISTED["renames"]:
        # A text's or a dataclass's `replace` has another number of arguments, or names them.
        one = len(call.args) == 1 and not call.keywords and isinstance(call.func, ast.Attribute)
        return module in ("os", "shutil") or one
    if name == "write_text":  # of a path, not our own function
        return isinstance(call.func, ast.Attribute)
    return name in LISTED["writers"] or f"{module}.{name}" in LISTED["writers"]


def test_the_package_writes_through_files_alone():
    found = list(writes())
    others = [one for one in found if one[:2] not in KNOWN]
    assert not others, "\n".join(
        f"{file}:{line} {where}: {call}" for file, where, line, call in others
    )
    assert {one[:2] for one in found} == KNOWN, "writes.yaml lists what is no more"


@pytest.mark.parametrize(
    "text",
    [
        "os.replace(aside, path)",
        "aside.replace(path)",
        "shutil.move(aside, path)",
        "open(path, 'w')",
        "open(path, mode='r+b')",
        "with open(path, 'x') as file: pass",
        "path.write_text('a')",
        "save_file({}, path)",
        "pa.OSFile(path, 'wb')",
    ],
)
def test_such_writes_are_found(text):
    assert len(list(found_in(ast.parse(text), ()))) == 1
    assert not list(found_in(ast.parse(f"with new_file(path) as aside:\n {text}"), ()))


@pytest.mark.parametrize("text", ["a.replace('b', 'c')", "replace(a, b=c)", "open(path, 'rb')"])
def test_other_calls_are_none(text):
    assert not list(found_in(ast.parse(text), ()))


def fitted():
    gate = Gate(torch.zeros(2, 2), torch.zeros(2), reads_states=False)
    table = ExpertiseTable.measure({"t": np.eye(2)}, np.arange(2), ["a", "b"])
    keys = torch.zeros(0, 2, dtype=torch.int64)
    return Fitted(table, {"t": 1.0}, gate, keys)


def folder(path):
    with new_folder(path) as aside:
        (aside / "file").write_text("1")


FORMS = {
    "text": lambda path: write_json(path, {"a": 1}),
    "fitted routing": lambda path: fitted().save(path),
    "examples": lambda path: build_once(path, lambda aside: aside.write_text("1") and None),
    "index": lambda path: write_index(path, np.zeros((3, 2), np.int64), np.arange(3, dtype="u4")),
    "folder": folder,
}


@pytest.fixture
def log(monkeypatch):
    """What is synced and what gets its name, by inode."""
    found = []
    sync, replace, rename = os.fsync, os.replace, os.rename

    def synced(descriptor):
        found.append(("sync", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def named(call):
        def run(source, target):
            found.append(("name", os.stat(source).st_ino))
            call(source, target)

        return run

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named(replace))
    monkeypatch.setattr(os, "rename", named(rename))
    return found


def check_order(log, path):
    """A path's content was synced before its name was given, and the name after. Returns where."""
    content, parent = (one.stat().st_ino for one in (path, path.parent))
    at = log.index(("name", content))
    assert log.index(("sync", content)) < at < log.index(("sync", parent), at)
    return at


@pytest.mark.parametrize("form", FORMS)
def test_content_is_synced_before_its_name_and_the_name_after(form, tmp_path, log):
    FORMS[form](tmp_path / "place")
    at = check_order(log, tmp_path / "place")
    if form == "folder":
        inner = (tmp_path / "place" / "file").stat().st_ino
        assert log.index(("sync", inner)) < at


def test_a_block_that_is_acknowledged_survives_a_power_cut(tmp_path, log):
    """Its folders, too, by the names in theirs. At the end it is in a shard with others."""
    place, blocks = tmp_path / "run" / "cache", []

    def acknowledged(teacher, number):
        blocks.append((teacher, number))
        file = place / teacher / f"shard-{number:08d}.arrow"
        check_order(log, file)
        for folder in (file.parent, place, place.parent):
            assert ("sync", folder.parent.stat().st_ino) in log, folder

    write_cache(place, make_keys(60), TWO, block_rows=4, ranks=2, acknowledge=acknowledged)
    assert len(blocks) == 2 * 15
    for file in (*place.glob("*/*.arrow"), *place.glob("*.arrow"), place / MANIFEST):
        check_order(log, file)
