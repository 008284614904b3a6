"""Run by each rank of a launch: a step of engines of all stages, and what DeepSpeed's communication
log has of it. Rank 0 writes that to a JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.precision import model_dtype
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training
from ds_distill.routing import Router
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

world = World.start()
ROWS, CLASSES = 2, 4
TEACHERS = ("one", "two")


def batch(live: bool) -> Batch:
    ids = torch.ones(ROWS, 8, dtype=torch.int64)
    view = PaddedView(ids, torch.ones_like(ids))
    signals = {name: Signals(torch.zeros(ROWS, CLASSES)) for name in TEACHERS}
    return Batch(
        keys=torch.zeros(ROWS, 2, dtype=torch.int64),
        views={"student": view} | ({name: view for name in TEACHERS} if live else {}),
        labels=torch.zeros(ROWS, dtype=torch.int64),
        row_sets={"all": torch.arange(ROWS)},
        signals={} if live else signals,
    )


def logged(folder: Path, case: dict[str, Any]) -> dict[str, dict[int, int]]:
    """How often a window of steps sent each size, by collective."""
    stage, live, micro_steps = case["stage"], case["live"], case["micro_steps"]
    ahead = case["ahead"]
    training = Training(batch_size=ROWS * world.size * micro_steps, micro_batch_size=ROWS)
    config = deepspeed_config(f"zero{stage}_{case['precision']}", training, world.size)
    student_config = AutoConfig.from_pretrained(folder / "student", num_labels=CLASSES)
    teacher_config = AutoConfig.from_pretrained(folder / "teacher", num_labels=CLASSES)
    student = AutoModelForSequenceClassification.from_config(student_config, dtype=torch.float32)
    teachers = {}
    if live:
        with sharded_loading(config):
            teachers = {
                name: AutoModelForSequenceClassification.from_config(
                    teacher_config, dtype=model_dtype(config)
                )
                for name in TEACHERS
            }
    terms = build_terms(losses_of({"kl": {}}), TermInputs(student_config.hidden_size))
    bundle = Bundle(student, teachers, terms, Router("average"))
    settings = OptimizerSettings(1e-4, 0.01, 10, 1)
    engine = Engine(
        bundle,
        config,
        world,
        settings,
        student_resident=case["resident"],
        together=ahead * micro_steps,
    )

    def window() -> None:
        for step in engine.read_ahead([[batch(live)] * micro_steps] * ahead):
            engine.train_step(step)

    for _ in range(2):  # DeepSpeed's prefetch follows what it has seen
        window()
    log = dist.comms_logger
    log.reset_data()
    dist.configure(enabled=True, prof_all=True)
    window()
    dist.configure(enabled=False)
    sent = {
        name: {size: times for size, (times, *_) in sizes.items()}
        for name, sizes in log.get_raw_data().items()
    }
    engine.close()
    return sent


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    results = [logged(folder, case) for case in cases]
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    world.barrier()
    world.stop()


main(Path(sys.argv[1]))
