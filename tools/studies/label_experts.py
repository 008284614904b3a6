"""The study of experts of labels: two teachers that know five hallmarks of cancer each.

    OMP_NUM_THREADS=1 python tools/studies/label_experts.py --work FOLDER [--data FOLDER]
        [--seeds 0 1 2]

The data are the sentences of the Hallmarks of Cancer (HoC), ten labels of which most sentences
have none. Each teacher, a MiniLM, trains on all sentences with one of its five labels and a tenth
of the others. Students of three of its layers learn from both teachers' cached logits on sentences
without labels, of other abstracts; one more learns from 800 labelled sentences without teachers.
The result is the chosen policy's student against the average's on the same test sentences.

Run it again after a stop: what is done is reused. At the end it writes
docs/results/label-experts.json and the tables in docs/studies/label-experts.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from pages import row, show
from routing import MODEL, ROOT, run

from ds_distill.files import read_json, write_json

RESULTS = ROOT / "docs" / "results" / "label-experts.json"
PAGE = ROOT / "docs" / "studies" / "label-experts.md"
MARK = "experts of labels"
EXPERTS = {
    "first": [
        "sustaining proliferative signaling",
        "genomic instability and mutation",
        "tumor promoting inflammation",
        "inducing angiogenesis",
        "avoiding immune destruction",
    ],
    "second": [
        "resisting cell death",
        "activating invasion and metastasis",
        "evading growth suppressors",
        "enabling replicative immortality",
        "cellular energetics",
    ],
}
"""Teacher -> the labels that it learns in full: the frequent ones in turn."""
LABELS = [label for labels in EXPERTS.values() for label in labels]
ABSTRACTS = 650
"""Of the 1,295 for training: theirs teach, those of the others are the transfer set."""
FEW = 800
"""Labelled sentences of the student without teachers."""


def write_data(source: Path, folder: Path) -> None:
    """One file per split. Which abstracts are for what does not depend on the seed of a run: a
    validation or test sentence is of an abstract that no training sees."""
    folder.mkdir(parents=True)
    train = _read(source / "train_sentences.jsonl.gz")
    abstracts = sorted({row["doc"] for row in train})
    random.Random(0).shuffle(abstracts)
    teach = set(abstracts[:ABSTRACTS])
    labelled = [row for row in train if row["doc"] in teach]
    few = random.Random(0).sample(labelled, FEW)
    transfer = [{"text": row["text"]} for row in train if row["doc"] not in teach]
    splits = {"train": labelled, "few": few, "transfer": transfer}
    for name, file in {"validation": "val", "test": "test"}.items():
        splits[name] = _read(source / f"{file}_sentences.jsonl")
    for name, rows in splits.items():
        lines = [
            json.dumps({key: row[key] for key in ("text", "labels") if key in row}) for row in rows
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def recipe(data: Path) -> dict[str, Any]:
    teach: list[dict[str, Any]] = [
        {
            "fine-tune": {
                "name": f"teach-{teacher}",
                "models": teacher,
                "focus": {"classes": labels, "share_of_others": 0.1},
                "epochs": 3,
                "learning_rate": 2.0e-4,
            }
        }
        for teacher, labels in EXPERTS.items()
    ]
    return {
        "name": "label-experts",
        "task": {
            "type": "multi-label",
            "data": {
                "path": str(data),
                "columns": {"label": "labels"},
                "splits": {
                    name: name for name in ("train", "few", "transfer", "validation", "test")
                },
                "limit": {"transfer": 2000, "test": 1500},
            },
            "labels": LABELS,
            "max_length": 64,
        },
        "teachers": {teacher: {"model": MODEL} for teacher in EXPERTS},
        "student": {"model": MODEL, "layers": [0, 2, 5]},
        "training": {
            "batch_size": 16,
            "warmup": 0.1,
            "freeze_embeddings": True,
            "dropout": 0.0,
        },
        "phases": [
            *teach,
            {"cache": {"splits": ["validation", "transfer"], "hidden": [-1]}},
            {"expertise": {}},
            {
                "distil": {
                    "split": "transfer",
                    "teachers": "cached",
                    "routing": ["average", "expertise", "chosen"],
                    "losses": {"kl": {"temperature": 2.0}},
                    "epochs": 3,
                    "learning_rate": 2.0e-4,
                }
            },
            {
                "fine-tune": {
                    "name": "control",
                    "models": "student",
                    "split": "few",
                    "save_as": "few-labels",
                    "epochs": 6,
                    "learning_rate": 2.0e-4,
                }
            },
            {"evaluate": {"split": "test"}},
        ],
        "deepspeed": "zero0_auto",
    }


def record_of(seed: int, folder: Path) -> dict[str, Any]:
    """What the study publishes of a finished run."""
    results = read_json(folder / "results.json")
    phases = {record["kind"]: record for record in results["phases"]}
    expertise, evaluation = phases["expertise"], phases["evaluate"]
    [pair] = (
        row
        for row in evaluation["comparisons"]
        if (row["student"], row["other"]) == ("chosen", "average")
    )
    environment = read_json(folder / "environment.json")
    return {
        "seed": seed,
        "environment": environment,
        "seconds": results["seconds"],
        "experts": expertise["experts"],
        "f1": expertise["f1"],
        "targets": expertise["comparison"],
        "choice": expertise["comparison"]["choice"],
        "test_examples": evaluation["models"]["chosen"]["examples"],
        "test": {
            name: {key: model[key] for key in ("role", "micro_f1", "macro_f1", "per_class")}
            for name, model in evaluation["models"].items()
        },
        "chosen_to_average": {key: pair[key] for key in ("difference", "interval")},
    }


def tables(runs: list[dict[str, Any]]) -> str:
    """The results as Markdown: who is the expert of which label, then scores on test."""
    seeds = [f"seed {one['seed']}" for one in runs]
    text = row(["label", "taught to", *(f"expert, {seed}" for seed in seeds)])
    text += row(["---"] * (2 + len(runs)))
    for teacher, labels in EXPERTS.items():
        for label in labels:
            cells = [
                f"{one['experts'][label]} (F1 {one['f1']['first'][label]:.2f} and "
                f"{one['f1']['second'][label]:.2f})"
                for one in runs
            ]
            text += row([label, teacher, *cells])
    text += "\n" + row(["micro F1 on test", *seeds]) + row(["---"] * (1 + len(runs)))
    for name, model in runs[0]["test"].items():
        cells = [f"{one['test'][name]['micro_f1']:.3f}" for one in runs]
        text += row([f"{model['role']} {name}", *cells])
    text += row(["the chosen policy", *(one["choice"] for one in runs)])
    pairs = [one["chosen_to_average"] for one in runs]
    cells = [
        "{:+.1f} points ({:+.1f} to {:+.1f})".format(
            *(100 * number for number in (pair["difference"], *pair["interval"]))
        )
        for pair in pairs
    ]
    return text + row(["chosen less average", *cells])


def store(record: dict[str, Any]) -> None:
    """Put a record into the results, in place of an earlier one of the same seed."""
    before = read_json(RESULTS)["runs"] if RESULTS.is_file() else []
    runs = [*(one for one in before if one["seed"] != record["seed"]), record]
    runs.sort(key=lambda one: one["seed"])
    write_json(RESULTS, {"runs": runs})
    show(PAGE, MARK, tables(runs))


def _read(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.decode("utf-8").splitlines() if line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "hoc")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    data = arguments.work / "data"
    if not data.is_dir():
        write_data(arguments.data, data)
    for seed in arguments.seeds:
        folder = arguments.work / f"seed-{seed}"
        run(recipe(data), seed, folder)
    for seed in arguments.seeds:  # only now: until here the checkout is as its commit has it
        store(record_of(seed, arguments.work / f"seed-{seed}"))


if __name__ == "__main__":
    main()
