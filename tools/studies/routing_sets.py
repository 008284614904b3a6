"""The data sets of the routing study, made narrow: who teaches what, and on which rows."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_distill.recipe import load_recipe

SHARE_OF_OTHERS = 0.1


@dataclass(frozen=True)
class StudySet:
    """A single-label task that two teachers know half of each."""

    name: str
    experts: dict[str, list[str]]
    """Teacher -> classes it learns in full; of the others it sees SHARE_OF_OTHERS."""
    max_length: int
    epochs: dict[str, int]
    """Of `teachers` and `student`."""
    per_class: dict[str, int] = field(default_factory=dict)
    write: Callable[[Path, Path], None] | None = None
    """(shared data, folder to fill with one file per split). None: the quickstart's docstrings.

    What routing learns from is called `routing`: all of it is fitted on, and no epoch is chosen."""

    @property
    def labels(self) -> list[str]:
        return [label for classes in self.experts.values() for label in classes]

    def task(self, folder: Path) -> dict[str, Any]:
        data: dict[str, Any] = {"path": str(folder), "per_class": self.per_class}
        if self.write is None:
            data["path"] = load_recipe("quickstart").task.data.path
            own = {name: name for name in ("train", "transfer", "test")}
            data["splits"] = {**own, "routing": "validation"}
        return {
            "type": "single-label",
            "data": data,
            "labels": self.labels,
            "max_length": self.max_length,
        }


def _emotion(shared: Path, folder: Path) -> None:
    """TweetEval's own validation, for routing, and test; of its 3,257 training tweets 1,500 lose
    their label and become the transfer set."""
    source = shared / "tweeteval_emotion"
    train = _shuffled(_read(source / "train.jsonl"))
    _write(folder / "train.jsonl", train[1500:])
    _write(folder / "transfer.jsonl", train[:1500])
    _write(folder / "routing.jsonl", _read(source / "val.jsonl"))
    _write(folder / "test.jsonl", _read(source / "test.jsonl"))


def _relations(shared: Path, folder: Path) -> None:
    """SemEval-2010 task 8, its nine relations and Other, without their direction. It has no
    validation split: of its 8,000 training sentences 1,000 are for routing, 2,500 the transfer set,
    and 2,500 teach."""
    source = shared / "re_semeval2010_task8"

    def rows(path: Path) -> list[dict[str, str]]:
        return [
            {"text": row["text"], "label": row["label"].partition("(")[0]} for row in _read(path)
        ]

    train = _shuffled(rows(source / "train.jsonl.gz"))
    _write(folder / "routing.jsonl", train[:1000])
    _write(folder / "transfer.jsonl", train[1000:3500])
    _write(folder / "train.jsonl", train[3500:6000])
    _write(folder / "test.jsonl", rows(source / "test.jsonl"))


SETS = [
    StudySet(
        "docstrings",
        {"first": ["torch", "sklearn", "sympy"], "second": ["scipy", "pandas", "networkx"]},
        32,
        {"teachers": 2, "student": 2},
        {"train": 350, "transfer": 300, "routing": 200, "test": 400},
    ),
    StudySet(
        "emotion",
        {"first": ["anger", "optimism"], "second": ["joy", "sadness"]},
        48,
        {"teachers": 3, "student": 4},
        write=_emotion,
    ),
    StudySet(
        "relations",
        {
            "first": [
                *("Cause-Effect", "Entity-Origin", "Message-Topic"),
                *("Content-Container", "Other"),
            ],
            "second": [
                *("Component-Whole", "Entity-Destination", "Product-Producer"),
                *("Member-Collection", "Instrument-Agency"),
            ],
        },
        48,
        {"teachers": 2, "student": 2},
        write=_relations,
    ),
]


def _read(path: Path) -> list[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [json.loads(line) for line in text.decode("utf-8").splitlines() if line]
    return [{"text": row["text"], "label": row["label"]} for row in rows]


def _shuffled(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    random.Random(0).shuffle(rows)
    return rows


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
