"""Rows of the kinds of task, written and read; hostile words and texts."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
from hypothesis import strategies as st

from ds_distill.data.batches import Collator, RowsOf, Units, label_rows
from ds_distill.data.groups import MARKS
from ds_distill.data.open_source import open_source
from ds_distill.data.sources import Source
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import TASKS

TAGS = ["O", "B-gene", "I-gene", "B-disease", "I-disease"]
LABELS = {"single-label": ["anger", "joy"], "multi-label": ["x", "y", "z"]}
LABELS["token-classification"] = TAGS

CONTEXT = "the cat saw a very old dog and some snow"

HOSTILE = [
    *("\u200b", "\u00ad", "\ufe0f", "\u0007", "\u00a0", "\u2028", " ", "  ", "\t", "\ufffd"),
    *("e\u0301", "\u0301", "\u05d0\u05d1", "\u0627\u0644", "\ufdfa", "\U0001f468\u200d\U0001f469"),
    *("Parkinson", "IL-2", "\u4e2d\u56fd", "a b ", "[SEP]", "</s>", "\u2581", "##s", "\u202e", "'"),
    *("\U0001f1e9\U0001f1ea", "\u2764\ufe0f", " x ", "\u0085", "\u0130", "\U0001f3fd", "\u0120"),
]
any_letter = st.characters(exclude_categories=["Cs"])
pieces = st.one_of(st.sampled_from(HOSTILE), st.text(any_letter, min_size=1, max_size=6))
texts = st.lists(pieces, max_size=40).map("".join)


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def change(path: Path, **values: Any) -> None:
    """Other values of a JSON file's keys."""
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of the kind that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
        if ".json" in name:
            file.write(jsonl(rows))
            return path
        cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
        if name.endswith(".csv"):
            csv.writer(file).writerows(cells)
        else:
            file.writelines("\t".join(row) + "\n" for row in cells)
    return path


def _cell(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) else "" if value is None else str(value)


def opened(kind: str, folder: Path, rows: list[dict[str, Any]], **more: Any) -> Source:
    """The data of a task of that kind, with train alone. more: keys of the task."""
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text(jsonl(rows))
    labels = {"labels": LABELS[kind]} if kind in LABELS else {}
    task = {"data": {"path": str(folder)}, **labels, **more}
    return open_source(TASKS[kind].model_validate(task), folder / "cache")


def read(kind: str, folder: Path, rows: list[dict[str, Any]], **more: Any) -> datasets.Dataset:
    return opened(kind, folder, rows, **more).read("train")


def texts_split(given: list[str], second: list[str] | None = None, **more: Any) -> datasets.Dataset:
    """Texts without labels, as a source reads them; more: columns."""
    keys = content_keys(given, second)
    row: dict[str, Any] = {"text": given, "label": [-1] * len(given)}
    row |= {"text_b": second} if second is not None else {}
    row |= {"key_hi": keys[:, 0], "key_lo": keys[:, 1], **dict.fromkeys(MARKS, keys[:, 0])}
    return datasets.Dataset.from_dict({**row, **more})


def asked(
    questions: list[str], contexts: list[str], spans: list[list[tuple[int, int]] | None]
) -> datasets.Dataset:
    """Questions with answers at these characters."""
    keys = content_keys(questions, contexts)
    answers = [
        None if given is None else [{"text": text[a:b], "start": a} for a, b in given]
        for text, given in zip(contexts, spans, strict=True)
    ]
    row = {"text": questions, "text_b": contexts, "answers": answers}
    row |= dict.fromkeys(MARKS, [7] * len(keys))
    text, number = datasets.Value("string"), datasets.Value("int64")
    features = dict.fromkeys(["text", "text_b"], text)
    features["answers"] = datasets.List({"text": text, "start": number})
    features |= dict.fromkeys([*MARKS, "key_hi", "key_lo"], number)
    row |= {"key_hi": keys[:, 0], "key_lo": keys[:, 1]}
    return datasets.Dataset.from_dict(row, features=datasets.Features(features))


def collator(
    split: datasets.Dataset, tokenizer: Any, length: int, rows_of: RowsOf = label_rows
) -> tuple[Units, Collator]:
    """One view of a split, `student`."""
    cut = f"{tokens_fingerprint(tokenizer)}:input_ids" in split.column_names
    tokens = split if cut else tokenise(split, tokenizer, length)
    units = Units.of(split)
    return units, Collator(units, {"student": TokenTable(tokens, tokenizer)}, rows_of)
