"""Train a student in a loop of your own, on the teachers' logits that a cache holds.

    ds-distill cache build my.yaml --folder runs/my
    python docs/library.py runs/my/cache/00-cache MODEL train.jsonl test.jsonl student

MODEL is where the student starts: a folder or a hub id. The texts of train.jsonl are those that the
cache was built from, or some of them; their labels are not read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
)

from ds_distill import CacheReader, content_keys, evaluate
from ds_kernels import masked_kl

TEMPERATURE = 2.0


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cache", type=Path)
    parser.add_argument("model")
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--max-length", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    cache = CacheReader(given.cache)
    labels = cache.labels  # the classes, in the order of the logits' columns
    if labels is None:
        sys.exit(f"{given.cache} holds masked-LM teachers, and this script trains a classifier")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    student = AutoModelForSequenceClassification.from_pretrained(
        given.model, num_labels=len(labels), id2label=dict(enumerate(labels))
    ).to(device)

    def tokens(texts: list[str]) -> dict[str, torch.Tensor]:
        options = {"padding": True, "truncation": True, "max_length": given.max_length}
        return dict(tokenizer(texts, **options, return_tensors="pt"))

    def training_batch(numbers: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The student's inputs, and the mean of the teachers' logits: float32 [B, C]."""
        signals = [cache.read(teacher, records[numbers]) for teacher in cache.teachers]
        return tokens([texts[n] for n in numbers]), torch.stack([s.logits for s in signals]).mean(0)

    def test_batch(lines: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        truth = [labels.index(line["label"]) for line in lines]
        return {**tokens([line["text"] for line in lines]), "labels": torch.tensor(truth)}

    texts = [line["text"] for line in read_lines(given.train)]
    records = cache.indices(content_keys(texts))  # an error if the cache lacks one of them
    numbers = list(range(len(texts)))
    loader = DataLoader(numbers, given.batch_size, shuffle=True, collate_fn=training_batch)
    optimizer = torch.optim.AdamW(student.parameters(), lr=given.learning_rate)
    steps = given.epochs * len(loader)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    student.train()
    for epoch in range(given.epochs):
        for inputs, teacher_logits in loader:
            outputs = student(**{name: values.to(device) for name, values in inputs.items()})
            loss = masked_kl(outputs.logits, teacher_logits.to(device), temperature=TEMPERATURE)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss of the last batch {loss.item():.4f}")

    test = DataLoader(read_lines(given.test), given.batch_size, collate_fn=test_batch)
    scores = evaluate(student, test)
    print(f"accuracy {scores['accuracy']:.3f}, macro F1 {scores['macro_f1']:.3f}")
    student.save_pretrained(given.output)
    tokenizer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
