"""Fuzz what reads recipes, data, models, caches, run folders and checkpoints.

    python tests/fuzz/series.py --cases 5000 [--results tests/results/fuzz.json] [--seed N]

Each case changes one file of a folder, in a way that its seed decides, and reads it as `check`,
`run --resume`, `predict` and training do. The only error may be a UserError, which the command line
prints as one paragraph with exit code 2, without an active character of a terminal. A case that
takes more than 20 seconds is a hang, and 2 GiB are too much memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name of a model that is none is not asked for
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import datasets
from cache_files import TWO, make_keys, write_cache
from targets import (
    Target,
    cache_target,
    checkpoint_target,
    data_target,
    model_target,
    recipe_target,
    run_target,
    sharded_model_target,
    texts_target,
)
from toys import make_tiny_bert, make_toy_classifier, recipe_of, toy_vocabulary, write_toy_task

from ds_distill.errors import UserError
from ds_distill.files import write_json
from ds_distill.process.peak_memory import forget_resident_peak, resident_peak
from ds_distill.process.terminal import escaped, message
from ds_distill.recipe import Recipe
from ds_distill.run.folder import RunFolder
from ds_distill.run.inputs import describe_environment

SECONDS = 20
MOST_MIB = 2048
ROWS = [{"text": f"the {word} runs", "label": word} for word in ("cat", "dog") * 8]


def targets(folder: Path) -> dict[str, Target]:
    """All that is fuzzed, in a folder of its own."""
    model = make_tiny_bert(folder / "bert", toy_vocabulary())
    toy = recipe_of("toy", task=write_toy_task(folder / "toy"), toy=model)
    texts = {"type": "masked-lm", "data": {"path": str(folder / "toy")}, "max_length": 24}
    two = {key: value for key, value in toy.items() if key != "task"}
    two["tasks"] = {"topics": toy["task"], "texts": texts}
    two["phases"] = [
        {"fine-tune": {"task": "texts", "models": "student", "save_as": "base", "steps": 3}},
        *(
            {kind: {"task": "topics", **settings}}
            for phase in toy["phases"]
            for kind, settings in phase.items()
        ),
    ]
    small = {
        **toy,
        "teachers": {},
        "training": {**toy["training"], "keep": "last"},
        "task": {"type": "single-label", "labels": ["cat", "dog"], "max_length": 24},
        "phases": [{"fine-tune": {"models": "student"}}, {"evaluate": {"split": "test"}}],
    }
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    in_json = {f"{split}.jsonl": lines for split in ("train", "validation", "test")}
    in_json["labels.json"] = b'["cat", "dog"]'
    table = b"text,label\n" + b"".join(f"{r['text']},{r['label']}\n".encode() for r in ROWS)
    in_tables = {"train.csv": table, "test.tsv": table.replace(b",", b"\t")}
    classifier = make_toy_classifier(folder / "classifier")
    cache = folder / "cache"
    write_cache(cache, make_keys(12), TWO)
    run = RunFolder(folder / "run")
    run.create(Recipe.model_validate(toy), describe_environment(1, "cpu"))
    return {
        "recipes": recipe_target(folder / "of-recipes", toy),
        "recipes of two tasks": recipe_target(folder / "of-two", two),
        "data in JSON": data_target(folder / "of-data", small, in_json),
        "data in tables": data_target(folder / "of-tables", small, in_tables),
        "models": model_target(folder / "of-models", classifier),
        "models in shards": sharded_model_target(folder / "of-shards", classifier),
        "texts to predict": texts_target(folder / "of-texts", classifier),
        "caches": cache_target(folder / "of-caches", cache),
        "run folders": run_target(folder / "of-runs", run.path),
        "checkpoints": checkpoint_target(folder / "of-checkpoints"),
    }


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(target: Target, seed: int, place: Path) -> str:
    """What came of a case: read, refused, or else the traceback."""
    folder = target.case(seed, place)
    try:
        with at_most(SECONDS):
            target.use(folder)
        said = "read"
    except UserError as error:
        shown = message(str(error))
        assert shown.strip() and escaped(shown) == shown and len(shown) < 2100
        said = "refused"
    except Exception:
        return traceback.format_exc()
    victim = folder.with_name("victim")
    if victim.exists() and [path.name for path in victim.rglob("*")] != ["02-student"]:
        return "it reached out of the folder"
    return said


def series(found: dict[str, Target], cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """What came out of `cases` cases, in turn of the targets: counts, and faults by seed."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in found}
    faults: dict[str, str] = {}
    names = list(found)
    forget_resident_peak()
    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, folder
    for number in range(cases):
        name = names[number % len(names)]
        with tempfile.TemporaryDirectory(dir=folder) as place:
            said = outcome(found[name], seed + number, Path(place) / "case")
        if said not in ("read", "refused"):
            faults[f"{name}, seed {seed + number}"] = said.replace(str(folder), "...")
            said = "faults"
        counts[name][said] += 1
    datasets.config.HF_DATASETS_CACHE = before
    peak = (resident_peak() or 0) >> 20
    if peak > MOST_MIB:
        faults["memory"] = f"{peak} MiB"
    found_by_target = {name: dict(of) for name, of in counts.items()}
    return {"peak_mib": peak, "counts": found_by_target, "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.monotonic()
        done = series(targets(folder), arguments.cases, arguments.seed, folder)
        seconds = round(time.monotonic() - started, 1)
    for fault, text in done["faults"].items():
        print(f"{fault}\n{text}\n")
    print(json.dumps(done["counts"], indent=2), f"{len(done['faults'])} faults, {seconds} s")
    if arguments.results is not None:
        asked = {"cases": arguments.cases, "seed": arguments.seed, "seconds": seconds}
        write_json(arguments.results, {**asked, **done, **describe_environment(1, "cpu")})
    sys.exit(bool(done["faults"]))


if __name__ == "__main__":
    main()
