"""Run a recipe by command, and read all numbers that its folder holds.

Nothing of ds_distill is imported: the same code reads the folders of any commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors import safe_open

Reading = dict[str, Any]
"""Where a number stands (`metrics.jsonl/...`, `results.json/...`, `models/00-first/...`) -> the
number; of a tensor or a column its type, shape and SHA-256."""

CLOCK = (
    "time",
    "timing",
    "seconds",
    "examples_per_second",
    "tokens_per_second",
    "peak_bytes",
    "before",
)
"""Keys that no two runs have alike."""

BOOKKEEPING = ("environment.json", "data/*/examples.json")
"""Files that say where and when, or that the datasets library keeps for itself."""

CHECKSUMMED = ("checksum", "index", "shards")
"""Keys of a cache's manifest about its files, whose columns are read instead."""


def environment(tree: Path, folder: Path) -> dict[str, str]:
    """For commands of the checkout `tree`, whose ranks compute on one core each."""
    group = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in group}
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_DATASETS_CACHE": str(folder / "datasets-cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "kernels")]),
        "TRITON_INTERPRET": "0",
    }


IN_ONE_PROCESS = """
import json, runpy, sys
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        runpy.run_module("ds_distill", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
"""
"""A process's start costs more than these runs do."""


FP16_IS_SUPPORTED = """
import ds_distill.engine.accelerator
from deepspeed.accelerator import get_accelerator
get_accelerator().is_fp16_supported = lambda: True
"""
"""DeepSpeed does not say so of a CPU."""


def start(
    tree: Path, folder: Path, *commands: list[str], before: str = ""
) -> subprocess.Popen[str]:
    """Commands of `ds-distill` of the checkout `tree`, one after the other, in `folder`, and Python
    lines before them."""
    return subprocess.Popen(
        [sys.executable, "-c", before + IN_ONE_PROCESS, json.dumps(commands)],
        cwd=folder,
        env=environment(tree, folder),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(tree: Path, folder: Path, *commands: list[str], before: str = "") -> None:
    """`start` to the end. Raises RuntimeError with the output where a command fails."""
    process = start(tree, folder, *commands, before=before)
    output, _ = process.communicate(timeout=900)
    if process.returncode != 0:
        raise RuntimeError(f"{tree}: ds-distill {commands}\n{output}")


def read_run(folder: Path) -> Reading:
    """All numbers of a run's folder."""
    reading: Reading = {}
    skipped = {file for pattern in BOOKKEEPING for file in folder.glob(pattern)}
    for file in sorted(folder.rglob("*")):
        if file in skipped:
            continue
        name = file.relative_to(folder).as_posix()
        if file.name == "metrics.jsonl":
            found = _events(file)
        elif file.suffix == ".json":
            found = _flat(json.loads(file.read_text(encoding="utf-8")))
        elif file.suffix == ".safetensors":
            found = _tensors(file)
        elif file.suffix == ".arrow":
            found = _columns(file)
        else:
            continue
        reading.update({f"{name}/{key}": value for key, value in found})
    return reading


def events(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def _events(file: Path) -> Iterator[tuple[str, Any]]:
    seen: Counter[str] = Counter()
    for event in events(file.parent):
        what = {key: event.pop(key, None) for key in ("number", "phase", "event", "step", "model")}
        place = "/".join(str(value) for value in what.values() if value is not None)
        seen[place] += 1
        again = f"#{seen[place]}" if seen[place] > 1 else ""
        for key, value in _flat(event):
            yield f"{place}{again}/{key}", value


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of JSON, each with the way to it."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            if key not in CLOCK and key not in CHECKSUMMED and key != "environment":
                yield from _flat(inner, f"{place}/{key}" if place else str(key))
    else:
        yield place, value


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    with safe_open(file, "np") as opened:
        for key, text in (opened.metadata() or {}).items():
            try:
                yield from _flat(json.loads(text), key)
            except json.JSONDecodeError:
                yield key, text
        for key in sorted(opened.keys()):
            tensor = opened.get_tensor(key)
            yield key, f"{tensor.dtype} {list(tensor.shape)} {_digest(tensor.tobytes())}"


def _columns(file: Path) -> Iterator[tuple[str, Any]]:
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        table = stream.read_all()
        for name, column in zip(table.column_names, table.columns, strict=True):
            rows = repr(column.to_pylist()).encode()
            yield name, f"{column.type} [{len(column)}] {_digest(rows)}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
