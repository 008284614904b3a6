"""Whatever the package writes goes through `files`: aside, synced, renamed, the name synced."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_files import TWO, make_keys, write_cache

import ds_distill
from ds_distill.cache.format import MANIFEST
from ds_distill.cache.index import write_index
from ds_distill.data.columns import build_once
from ds_distill.files import new_folder, write_json
from ds_distill.routing import ExpertiseTable, Fitted
from ds_distill.routing.gate import Gate

PACKAGE = Path(ds_distill.__file__).parent

RENAMES = {"rename", "renames", "replace", "move"}
WRITERS = {
    "write_bytes",
    "save_file",
    "save_pretrained",
    "save_to_disk",
    "savefig",
    "tofile",
    "to_csv",
    "OSFile",
    "FileIO",
    "copyfile",
    "copytree",
    "copy2",
    "torch.save",
    "np.save",
    "np.savez",
}
"""Calls that write a file whose path they are given."""

ASIDE = {"new_file", "new_folder", "new_model"}
"""What is written within a `with` of these is published by `files`."""

KNOWN = {
    ("cache/build.py", "Build.write"): "a block aside, and then published",
    ("cache/build.py", "Build._published"): "reads",
    ("cache/format.py", "Manifest.write"): "aside, and then published",
    ("cli/loading.py", "text_output"): "aside by new_file; only a device, a pipe or a link is not",
    ("data/columns.py", "write_columns"): "a file aside, given by build_once",
    ("data/predictions.py", "_write"): "a file aside, given by build_once",
    ("engine/engine.py", "Engine.save"): "a checkpoint's folder aside, which checkpoints publish",
    ("engine/training_state.py", "write_training_state"): "into that folder",
    ("models/load.py", "save_model"): "into a folder aside, which the run's folder publishes",
    ("process/failures.py", "record_failure"): "made with O_EXCL; half a record counts for none",
    ("process/peak_memory.py", "forget_resident_peak"): "an order to the kernel, no file",
    ("sweep/sweep.py", "Pool._run"): "what a run prints, added to a log",
    ("sweep/sweep.py", "begin_from.copy"): "into a folder aside, which new_folder publishes",
    ("run/events.py", "RunLog.event"): "a line at the end of metrics.jsonl, where none is trusted",
}
"""Where something else is written, and why that is sound."""


def writes() -> Iterator[tuple[str, str, int, str]]:
    """File, function, line and call of each write that bypasses `files`."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if name == "files.py":
            continue
        yield from ((name, *found) for found in found_in(ast.parse(file.read_text()), ()))


def found_in(node: ast.AST, place: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        place = (*place, node.name)
    if isinstance(node, ast.With) and any(
        called(item.context_expr) in ASIDE for item in node.items
    ):
        return
    if isinstance(node, ast.Call) and is_write(node):
        yield ".".join(place), node.lineno, ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from found_in(child, place)


def called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_write(call: ast.Call) -> bool:
    name, module = called(call), getattr(getattr(call.func, "value", None), "id", "")
    if name == "open":
        modes = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "mode")]
        if module == "os":
            return any(
                "O_RDWR" in ast.unparse(mode) or "O_WRONLY" in ast.unparse(mode) for mode in modes
            )
        return any(set(ast.literal_eval(mode)) & set("wax+") for mode in modes)
    if name in RENAMES:
        # A text's or a dataclass's `replace` has another number of arguments, or names them.
        one = len(call.args) == 1 and not call.keywords and isinstance(call.func, ast.Attribute)
        return module in ("os", "shutil") or one
    if name == "write_text":  # of a path, not our own function
        return isinstance(call.func, ast.Attribute)
    return name in WRITERS or f"{module}.{name}" in WRITERS


def test_the_package_writes_through_files_alone() -> None:
    found = list(writes())
    others = [one for one in found if one[:2] not in KNOWN]
    assert not others, "\n".join(
        f"{file}:{line} {where}: {call}" for file, where, line, call in others
    )
    assert {one[:2] for one in found} == KNOWN.keys(), "KNOWN lists what is no more"


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
def test_such_writes_are_found(text: str) -> None:
    assert len(list(found_in(ast.parse(text), ()))) == 1
    assert not list(found_in(ast.parse(f"with new_file(path) as aside:\n {text}"), ()))


@pytest.mark.parametrize("text", ["a.replace('b', 'c')", "replace(a, b=c)", "open(path, 'rb')"])
def test_other_calls_are_none(text: str) -> None:
    assert not list(found_in(ast.parse(text), ()))


def fitted() -> Fitted:
    gate = Gate(torch.zeros(2, 2), torch.zeros(2), reads_states=False)
    table = ExpertiseTable.measure({"t": np.eye(2)}, np.arange(2), ["a", "b"])
    keys = torch.zeros(0, 2, dtype=torch.int64)
    return Fitted(table, {"t": 1.0}, gate, keys)


def folder(path: Path) -> None:
    with new_folder(path) as aside:
        (aside / "file").write_text("1")


FORMS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: write_json(path, {"a": 1}),
    "fitted routing": lambda path: fitted().save(path),
    "examples": lambda path: build_once(path, lambda aside: aside.write_text("1") and None),
    "index": lambda path: write_index(path, np.zeros((3, 2), np.int64), np.arange(3, dtype="u4")),
    "folder": folder,
}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is synced and what gets its name, by inode."""
    found: list[tuple[str, int]] = []
    sync, replace, rename = os.fsync, os.replace, os.rename

    def synced(descriptor: int) -> None:
        found.append(("sync", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def named(call: Callable[..., None]) -> Callable[..., None]:
        def run(source: Any, target: Any) -> None:
            found.append(("name", os.stat(source).st_ino))
            call(source, target)

        return run

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named(replace))
    monkeypatch.setattr(os, "rename", named(rename))
    return found


def check_order(log: list[tuple[str, int]], path: Path) -> int:
    """A path's content was synced before its name was given, and the name after. Returns where."""
    content, parent = (one.stat().st_ino for one in (path, path.parent))
    at = log.index(("name", content))
    assert log.index(("sync", content)) < at < log.index(("sync", parent), at)
    return at


@pytest.mark.parametrize("form", FORMS)
def test_content_is_synced_before_its_name_and_the_name_after(
    form: str, tmp_path: Path, log: list[tuple[str, int]]
) -> None:
    FORMS[form](tmp_path / "place")
    at = check_order(log, tmp_path / "place")
    if form == "folder":
        inner = (tmp_path / "place" / "file").stat().st_ino
        assert log.index(("sync", inner)) < at


def test_a_block_that_is_acknowledged_survives_a_power_cut(
    tmp_path: Path, log: list[tuple[str, int]]
) -> None:
    """Its folders, too, by the names in theirs. At the end it is in a shard with others."""
    place, blocks = tmp_path / "run" / "cache", []

    def acknowledged(teacher: str, number: int) -> None:
        blocks.append((teacher, number))
        file = place / teacher / f"shard-{number:08d}.arrow"
        check_order(log, file)
        for folder in (file.parent, place, place.parent):
            assert ("sync", folder.parent.stat().st_ino) in log, folder

    write_cache(place, make_keys(60), TWO, block_rows=4, ranks=2, acknowledge=acknowledged)
    assert len(blocks) == 2 * 15
    for file in (*place.glob("*/*.arrow"), *place.glob("*.arrow"), place / MANIFEST):
        check_order(log, file)
