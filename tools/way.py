"""Which files of the package a row, or a recipe's value, goes through.

    python tools/way.py row            from a CSV file to the first loss of a distillation
    python tools/way.py temperature    from the recipe to the kernel: files that are handed it

A file is entered where one of its functions is called (sys.setprofile, all threads), and handed a
value where a function's arguments hold it, three levels deep. Of another tree:
`PYTHONPATH=TREE:TREE/kernels python -P tools/way.py row`.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "golden"))

TOPICS = {"animal": "cat dog horse tiger", "food": "bread soup apple cheese"}
TEMPERATURE = 2.7182818
"""A number that nothing else is."""

STEPS = 2
"""Of the toy run: the teacher's, and its student's."""

ON_THE_WAY = frozenset(
    (
        *("data", "tasks", "cache", "caching", "models", "engine", "routing", "losses"),
        *("types", "views", "keys", "distributions", "ds_kernels"),
    )
)
"""Rooms between a file and a loss; the others say, check or record a run."""


def write_recipe(folder: Path, **distil: Any) -> Path:
    """A toy run: a teacher, then one step of its student."""
    import yaml
    from materials import write_model

    (folder / "data").mkdir()
    for split, size in (("train", 32), ("validation", 8)):
        with open(folder / "data" / f"{split}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            for number in range(size):
                label = list(TOPICS)[number % 2]
                rows.writerow([f"{TOPICS[label].split()[number % 4]} number {number}", label])
    words = [*" ".join(TOPICS.values()).split(), "number", *map(str, range(32))]
    write_model(folder / "model", words)
    recipe = {
        "name": "way",
        "task": {"type": "single-label", "data": {"path": "data"}, "max_length": 16},
        "teachers": {"teacher": {"model": "model", "below_majority": "warn"}},
        "student": {"model": "model", "layers": [0]},
        "training": {"batch_size": 8, "learning_rate": 1.0e-3, "steps": 1, "keep": "last"},
        "phases": [{"fine-tune": {"models": "teacher"}}, {"distil": distil}],
        "deepspeed": "zero0_fp32",
    }
    path = folder / "way.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def file_of(code: CodeType) -> str | None:
    """A path from ds_distill or ds_kernels on."""
    for package in ("ds_distill", "ds_kernels"):
        _, found, path = code.co_filename.rpartition(f"/{package}/")
        if found:
            return f"{package}/{path}"
    return None


def holds(value: Any, wanted: object, depth: int = 3) -> bool:
    if type(value) is type(wanted):
        return bool(value == wanted)
    if depth == 0 or isinstance(value, str | bytes | type | int | float):
        return False
    parts: Iterator[Any]
    if isinstance(value, Mapping):
        parts = iter(value.values())
    elif isinstance(value, list | tuple):
        parts = iter(value)
    else:
        parts = iter(getattr(value, "__dict__", {}).values())
    return any(holds(part, wanted, depth - 1) for part in parts)


class Way:
    """Files in the order of their first call."""

    def __init__(self, enters: Callable[[FrameType, str], bool]) -> None:
        self.files: dict[str, str] = {}
        self.steps = 0
        self._enters = enters

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.steps == STEPS or not code.co_flags & inspect.CO_OPTIMIZED:  # no function
            return
        file = file_of(code)
        if file is None:
            return
        if event == "return":
            self.steps += code.co_name == "train_step"
        elif event == "call" and file not in self.files and self._enters(frame, file):
            self.files[file] = code.co_name


def entered(frame: FrameType, file: str) -> bool:
    return room(file) in ON_THE_WAY


def handed(frame: FrameType, file: str) -> bool:
    count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
    names = frame.f_code.co_varnames[: count + 2]
    return any(holds(frame.f_locals.get(name), TEMPERATURE) for name in names)


def room(file: str) -> str:
    package, _, path = file.partition("/")
    return package if package == "ds_kernels" else path.partition("/")[0].removesuffix(".py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("of", choices=["row", "temperature"])
    of = parser.parse_args().of
    cache = tempfile.mkdtemp(prefix="way-")
    os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
    from ds_distill import load_recipe, run_recipe

    way = Way(entered if of == "row" else handed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_recipe(folder, losses={"kl": {"temperature": TEMPERATURE}})
        os.chdir(folder)
        run_recipe(load_recipe(path), folder / "first")  # what is imported, is imported
        shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
        threading.setprofile(way)
        sys.setprofile(way)
        run_recipe(load_recipe(path), folder / "second")
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed: a function alone
    for number, (file, function) in enumerate(way.files.items(), start=1):
        print(f"{number:3} {file}: {function}")
    verb = "entered" if of == "row" else "handed the value"
    print(f"{len(way.files)} files {verb}")
    shutil.rmtree(cache, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
