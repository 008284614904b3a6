"""Texts that punctuation alone tells apart, in the data of recipes, suites, papers and studies.

    python tools/studies/near_copies.py [--data FOLDER]

Before version 2 of `ds_distill.data.groups` such texts were one group. A committed result of data
without any pair of them, within a split or between two, cannot have moved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from routing_sets import SETS

from ds_distill.data.groups import Groups, components, plain_text
from ds_distill.data.open_source import open_source
from ds_distill.errors import UserError
from ds_distill.recipe import load_recipe
from ds_distill.recipe.load import small_form
from ds_distill.recipe.tasks import SingleLabel, TaskSettings

ROOT = Path(__file__).parents[2]


def without_punctuation(text: str | list[str]) -> str:
    """As groups had it: a blank for each punctuation mark; a text of nothing else as it is."""
    text = text if isinstance(text, str) else " ".join(text)
    kept = (" " if unicodedata.category(c)[0] == "P" else c for c in plain_text(text))
    return " ".join("".join(kept).split()) or text


def tasks(data: Path, work: Path) -> Iterator[tuple[str, TaskSettings]]:
    """The tasks of all recipes, small forms and suites whose data are here, each data set once."""
    configs, given = ROOT / "ds_configs", [f"data_folder={data}"]
    found: list[tuple[str, TaskSettings]] = []
    for small, file in itertools.product((False, True), sorted(configs.glob("recipes/*.yaml"))):
        if not small or small_form(file).is_file():
            recipe = load_recipe(file, given, small=small)
            found += [(recipe.name, task) for task in recipe.tasks_by_name.values()]
    for file in sorted(configs.glob("suites/**/*.yaml")):
        found += [(file.stem, task) for task in load_recipe(file, given).tasks_by_name.values()]
    seen = set()
    for name, task in found:
        if (mark := (task.type, task.data.model_dump_json())) not in seen:
            seen.add(mark)
            yield f"{name}: {task.data.path}", task
    for one in SETS:
        if one.write is not None:
            (work / one.name).mkdir()
            one.write(data, work / one.name)
            settings = SingleLabel.model_validate(one.task(work / one.name))
            yield f"routing study: {one.name}", settings


def counted(task: TaskSettings, data: Path, work: Path) -> dict[str, Any]:
    """Pairs within a split, and between two, by the names of the splits; without those of one group
    all the same, as of one file of docstrings."""
    source = open_source(task, work / "converted", data_folder=str(data))
    read = {split: source.read(split) for split in source.splits}
    number = components(Groups.joined([Groups.of(rows) for rows in read.values()]).marks)
    alike: dict[tuple[str, ...], list[tuple[int, str]]] = defaultdict(list)
    numbers = iter(number.tolist())
    for split, rows in read.items():
        there = [name for name in ("words", "text", "text_b") if name in rows.column_names]
        fields = ["text_b"] if "answers" in rows.column_names else there
        for row in zip(*(rows[name] for name in fields), strict=True):
            alike[tuple(map(without_punctuation, row))].append((next(numbers), split))
    pairs: Counter[str] = Counter()
    for places in alike.values():
        for (one, a), (other, b) in itertools.combinations(places, 2):
            pairs[" and ".join(sorted({a, b}))] += one != other
    return {"examples": len(number), "pairs": dict(sorted((+pairs).items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    data = parser.parse_args().data
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, task in tasks(data, Path(folder)):
            try:
                found[name] = counted(task, data, Path(folder))
            except (UserError, OSError) as error:
                found[name] = {"not here": str(error).splitlines()[0][:100]}
            print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
