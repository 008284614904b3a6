"""Questions whose answers are any number of spans, the data of `clinical-notes --small`.

    python tools/studies/span_questions.py DATA DIR
    ds-distill run clinical-notes --small data_folder=DIR

DATA holds folders of words and tags, ner_bc2gm, ner_ncbi_disease and ner_bc5cdr_chem (files train,
val and test), and qa_xquad_en (files own_train and own_test). `find every gene` is asked of
sentences of the first, and so on: of a sentence only what its set annotates, and often there is
none. XQuAD's questions have one answer each. The splits are the sets' own; a fifth of the
paragraphs of own_train are for validation. `abstracts` is `train` without XQuAD.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_distill.data.readers import open_file
from ds_distill.files import write_text
from ds_distill.keys import content_keys

SETS = {"ner_bc2gm": "gene", "ner_ncbi_disease": "disease", "ner_bc5cdr_chem": "chemical"}
FILES = {"train": "train", "validation": "val", "test": "test"}
SIZES = {"train": 500, "validation": 100, "test": 200}
"""Of each set, by split."""


def of_entities(words: list[str], tags: list[str], kind: str) -> dict[str, Any]:
    """A question about a sentence, with the characters of its entities (IOB2)."""
    answers: list[dict[str, int]] = []
    at = 0
    for word, tag in zip(words, tags, strict=True):
        if tag.startswith("B-"):
            answers.append({"start": at, "end": at + len(word)})
        elif tag.startswith("I-"):
            answers[-1]["end"] = at + len(word)
        at += len(word) + 1
    return {"question": f"find every {kind}", "context": " ".join(words), "answers": answers}


def rows_of(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    [file] = folder.glob(f"{name}.jsonl*")
    reader = open_file(file)
    return (row for _, row in reader.rows(reader.columns()))


def is_validation(context: str) -> bool:
    """Whether the questions about a paragraph choose."""
    return bool(content_keys([context])[0, 0] % 5 == 0)


def questions(data: Path, split: str) -> dict[str, list[dict[str, Any]]]:
    """By set, all of a split."""
    found = {
        name: [
            of_entities(row["tokens"], row["tags"], kind)
            for row in rows_of(data / name, FILES[split])
        ]
        for name, kind in SETS.items()
    }
    rows = rows_of(data / "qa_xquad_en", "own_test" if split == "test" else "own_train")
    found["qa_xquad_en"] = [
        {key: row[key] for key in ("question", "context", "answers")}
        for row in rows
        if split == "test" or is_validation(row["context"]) == (split == "validation")
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("folder", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    folder = arguments.folder / "span_questions"
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        draw, rows = random.Random(0), []
        for name, of_set in questions(arguments.data, split).items():
            some = draw.sample(of_set, min(size, len(of_set)))
            rows += [(name, json.dumps(row, ensure_ascii=False) + "\n") for row in some]
        write_text(folder / f"{split}.jsonl", "".join(line for _, line in rows))
        if split == "train":
            lines = (line for name, line in rows if name in SETS)
            write_text(folder / "abstracts.jsonl", "".join(lines))
        print(f"{folder / split}.jsonl: {len(rows):,} questions")


if __name__ == "__main__":
    main()
