"""How time and memory of each phase grow with the number of texts, and with the number of classes.

    python tools/benchmarks/growth.py --work FOLDER --output tests/results/growth.json

Models are toys of one layer, so that what is measured is the system around them: reading,
tokenising, plans, batches, caches, routing, metrics and reports. A run is one process on the CPU.
Seconds are of its CPUs, which other processes hardly change; memory is the most that was resident,
less pages of files, which are mapped and can be dropped. Both are read from /proc every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import growing
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from toys import TOY_LABELS, make_tiny_bert, save_tiny, toy_text, toy_vocabulary

from ds_distill.run.inputs import describe_environment

TEXTS = (10_000, 100_000, 1_000_000)
CLASSES = (200, 2_000)
FEW = len(TOY_LABELS)
SHARE = 10
"""Labelled splits have this part of the texts, each."""
TICKS = os.sysconf("SC_CLK_TCK")
READ_SECONDS = 0.02
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def write_data(folder: Path, texts: int, labels: list[str]) -> None:
    draw = random.Random(0)
    folder.mkdir(parents=True)
    (folder / "labels.json").write_text(json.dumps(labels))
    sizes = dict.fromkeys(("train", "validation", "test"), texts // SHARE)
    for split, size in {**sizes, "transfer": texts}.items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for number in range(size):
                row = {"text": toy_text(draw.choice(TOY_LABELS), draw)}
                if split != "transfer":
                    row["label"] = labels[number % len(labels)]
                file.write(json.dumps(row) + "\n")


def write_models(folder: Path, labels: list[str]) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    words = toy_vocabulary()
    names = dict(enumerate(labels))
    config = BertConfig(
        vocab_size=len(words), id2label=names, label2id={n: i for i, n in names.items()}, **SMALL
    )
    make_tiny_bert(folder, words, **SMALL)
    save_tiny(folder, BertForSequenceClassification, config)


def write_recipe(folder: Path) -> Path:
    model = str(folder / "model")
    recipe = {
        "name": "growth",
        "task": {"data": {"path": str(folder / "data")}, "max_length": 32},
        "teachers": {"first": {"model": model}, "second": {"model": model}},
        "student": {"model": model},
        "training": {"batch_size": 256, "learning_rate": 1.0e-3, "epochs": 1, "keep": "last"},
        "phases": [
            {"fine-tune": {"models": "second"}},
            {"expertise": {"split": "validation"}},
            {"cache": {"splits": "transfer"}},
            {"distil": {"split": "transfer", "teachers": "cached", "losses": {"kl": {}}}},
            {"evaluate": {"split": "test"}},
        ],
        "deepspeed": "zero1_fp32",
    }
    file = folder / "growth.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return file


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [kilobytes] = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
    return kilobytes * 1024


def watched(command: list[str], run: Path, environment: dict[str, str]) -> dict[str, Any]:
    """CPU seconds and peak memory by phase, of a run that is started: what comes before the first
    phase is `start`, what comes after the last `publish`."""
    with open(run.parent / "log.txt", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    phases: dict[str, Any] = {}
    name, began, peak, seconds = "start", 0.0, 0, 0.0

    def end(now: str) -> None:
        nonlocal name, began, peak
        phases[name] = {"cpu_seconds": round(seconds - began, 2), "peak_bytes": peak}
        name, began, peak = now, seconds, 0

    ended: set[str] = set()
    while process.poll() is None:
        try:
            seconds = cpu_seconds(process.pid)
            peak = max(peak, memory_bytes(process.pid))
        except (OSError, ValueError):  # it has just ended
            continue
        if name == "start" and "[1/" in (run.parent / "log.txt").read_text():
            end("fine-tune")
        for record in sorted((run / "phases").glob("*.json")):
            if record.name not in ended and record.name[0].isdigit():
                ended.add(record.name)
                end(FOLLOWS.get(name, "publish"))
        time.sleep(READ_SECONDS)
    end("")
    assert process.returncode == 0, (run.parent / "log.txt").read_text()[-3000:]
    return phases


FOLLOWS = {"fine-tune": "expertise", "expertise": "cache", "cache": "distil", "distil": "evaluate"}


def measured(work: Path, texts: int, classes: int) -> dict[str, Any]:
    folder = work / f"{texts}-{classes}"
    shutil.rmtree(folder, ignore_errors=True)
    names = TOY_LABELS if classes == FEW else [f"class {number}" for number in range(classes)]
    write_data(folder / "data", texts, names)
    write_models(folder / "model", names)
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "converted")}
    environment["PYTHONUNBUFFERED"] = "1"  # the log tells when the first phase begins
    run = folder / "run"
    command = [sys.executable, "-m", "ds_distill", "run", str(write_recipe(folder))]
    phases = watched([*command, "--folder", str(run)], run, environment)
    row = {
        "texts": texts,
        "classes": classes,
        "phases": phases,
        "cpu_seconds": round(sum(phase["cpu_seconds"] for phase in phases.values()), 2),
        "peak_bytes": max(phase["peak_bytes"] for phase in phases.values()),
        "results_bytes": (run / "results.json").stat().st_size,
        "report_bytes": (run / "report.html").stat().st_size,
    }
    shutil.rmtree(folder)
    return row


def exponents(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Between each size and the next: a of cost ~ size^a, of each phase and of all. An exponent
    below 1 is of what has a part that does not grow."""

    def between(small: float, large: float, ratio: float) -> float | None:
        return (
            round(math.log(large / small) / math.log(ratio), 3) if min(small, large) > 0 else None
        )

    found = []
    for small, large in pairwise(rows):
        ratio = large[by] / small[by]
        parts = {name: (small["phases"][name], large["phases"][name]) for name in small["phases"]}
        parts["all"] = (small, large)
        of_parts = {
            name: {
                what: between(one[what], other[what], ratio)
                for what in ("cpu_seconds", "peak_bytes")
            }
            for name, (one, other) in parts.items()
        }
        found.append({"from": small[by], "to": large[by], "exponents": of_parts})
    return found


def shown(rows: list[dict[str, Any]], by: str) -> None:
    names = [*rows[0]["phases"], "all"]
    for row in rows:
        cells = {**row["phases"], "all": row}
        text = "  ".join(
            f"{name} {cells[name]['cpu_seconds']:.1f} s {cells[name]['peak_bytes'] >> 20} MB"
            for name in names
        )
        print(f"{row[by]:>9,} {by}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="a folder for data and runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--texts", type=int, nargs="*", default=TEXTS)
    parser.add_argument("--classes", type=int, nargs="*", default=CLASSES)
    parser.add_argument("--resume", action="store_true", help="go on with --output")
    given = parser.parse_args()
    head = {"environment": describe_environment(1, "cpu"), "settings": {"model": SMALL}}
    figures = growing.begin(given.output, head, given.resume)
    for key, by, sizes in (
        ("by_texts", "texts", [(texts, FEW) for texts in given.texts]),
        ("by_classes", "classes", [(TEXTS[0], classes) for classes in given.classes]),
    ):
        rows = figures.setdefault(key, {"rows": [], "growth": []})["rows"]
        there = {(row["texts"], row["classes"]) for row in rows}
        for texts, classes in sizes:
            if (texts, classes) in there:
                continue
            rows.append(measured(given.work, texts, classes))
            rows.sort(key=lambda row: (row["texts"], row["classes"]))
            figures[key]["growth"] = exponents(rows, by)
            growing.write(given.output, figures)
        shown(rows, by)
        print(json.dumps(figures[key]["growth"], indent=1), flush=True)


if __name__ == "__main__":
    main()
