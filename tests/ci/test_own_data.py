"""README's call: CSV files, two teachers from elsewhere, one small student."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from toys import TOY_LABELS, make_tiny_bert, toy_text, toy_vocabulary

import ds_distill

ROOT = Path(__file__).parents[2]


def write_texts(folder: Path, labels: list[str]) -> None:
    draw = random.Random(0)
    for split, size in {"train": 120, "validation": 80, "test": 60}.items():
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(["text", "label"])
            for number in range(size):
                of = number % len(labels)
                lines.writerow([toy_text(TOY_LABELS[of], draw), labels[of]])


def fine_tune_elsewhere(folder: Path, texts: Path, labels: list[str], seed: int) -> None:
    """A teacher, by a plain loop of transformers."""
    torch.manual_seed(seed)
    make_tiny_bert(folder, toy_vocabulary())
    tokenizer = tr.AutoTokenizer.from_pretrained(folder)
    numbers = {label: number for number, label in enumerate(labels)}
    config = tr.AutoConfig.from_pretrained(
        folder, id2label=dict(enumerate(labels)), label2id=numbers
    )
    model = tr.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [*csv.DictReader((texts / "train.csv").open(encoding="utf-8"))]
    for _ in range(4):
        for start in range(0, len(rows), 20):
            some = rows[start : start + 20]
            inputs = tokenizer([row["text"] for row in some], padding=True, return_tensors="pt")
            right = torch.tensor([labels.index(row["label"]) for row in some])
            model(**inputs, labels=right).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.mark.usefixtures("in_this_process")
def test_one_call_distils(tmp_path, monkeypatch, capsys):
    """README's lines, but for what makes so small a student learn."""
    labels = ["beast", "meal", "sky"]
    monkeypatch.chdir(tmp_path)
    Path("DATA").mkdir()
    write_texts(tmp_path / "DATA", labels)
    for seed, name in enumerate("AB"):
        fine_tune_elsewhere(tmp_path / name, tmp_path / "DATA", labels, seed)
    make_tiny_bert(tmp_path / "S", toy_vocabulary())
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    fast = ["training.learning_rate=1e-2", "training.batch_size=8", "training.epochs=8"]
    names: dict[str, Any] = {}
    more = f'student="S", overrides={fast}'
    exec(code.replace('teachers=["A", "B"]', f'teachers=["A", "B"], {more}'), names)
    done = names["done"]
    shown = capsys.readouterr().out
    assert "description: DATA, by ds-distill init." in shown and f"\n{done.report}\n" in shown
    assert all(f"{name:12} {score:.1%}\n" in shown for name, score in done.scores.items())
    assert names["answer"]["predicted"] in labels
    assert done.folder == Path("runs/DATA") and Path("runs/DATA.yaml").is_file()
    assert {"teacher-1", "teacher-2", done.results["student"]} <= set(done.scores)
    assert done.scores[done.results["student"]] > 0.6
    assert "srcdoc=" in done._repr_html_() and "&lt;h1&gt;" in done._repr_html_()
    model = tr.AutoModelForSequenceClassification.from_pretrained(done.student)
    assert [*model.config.id2label.values()] == labels
    with pytest.raises(ds_distill.UserError, match="nowhere: no such file or folder"):
        ds_distill.distil("nowhere", teachers=["A"])
