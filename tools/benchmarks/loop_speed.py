"""The training loop, all that it measures and logs by default included, against a bare DeepSpeed
loop.

    python tools/benchmarks/loop_speed.py --output docs/results/loop-speed.json

A run fine-tunes MiniLM on docstrings. After each of its steps a plain DeepSpeed loop makes a step
of its own: the same weights at first, the same batch, padded and on the device already, the same
config and optimizer, transformers' own loss. The two take turns, so that a machine that slows down
slows both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import yaml
from training_speed import LABELS, MINILM, ratio

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import OptimizerSettings, _adamw
from ds_distill.engine.precision import model_dtype, resolved_name
from ds_distill.files import write_json
from ds_distill.models.active_weights import weight_groups
from ds_distill.models.bundle import Bundle
from ds_distill.models.load import CLASSIFIER, load_model
from ds_distill.process.timers import Timers
from ds_distill.recipe import load_recipe
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.training import Training
from ds_distill.run.execute import execute
from ds_distill.run.inputs import describe_environment
from ds_distill.run.observer import Observer
from ds_distill.training.meter import WARM_UP_STEPS
from ds_distill.types import Batch
from ds_distill.views import PaddedView


class Rival(Observer):
    """Stands where an observer would: makes a step of the bare loop after each of the run's."""

    def __init__(self, batch: int, config: str, steps: int) -> None:
        super().__init__()
        self._batch, self._config, self._steps = batch, config, steps
        self._batches: dict[int, Batch] = {}
        self._step = 0
        self.seconds: dict[str, list[float]] = {"ours": [], "bare": []}

    def start(self, training: tuple[int, str], device: torch.device) -> Timers:
        config = deepspeed_config(self._config, Training(batch_size=self._batch), 1)
        model = load_model(
            CLASSIFIER, resolve_model(MINILM), LABELS, new_head=True, seed=0, attention="eager"
        ).to(model_dtype(config))
        settings = OptimizerSettings(1e-5, 0.01, self._steps, 0)
        optimizer = _adamw(weight_groups(Bundle(model, {}))[1], settings)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=settings.scheduler,
            config=config,
            dist_init_required=False,
        )
        self._engine.train()
        self._device, self._ended = device, time.perf_counter()
        return Timers(device)

    def batches(self, training: tuple[int, str], step: int, micro_batches: Any) -> None:
        [self._batches[step]] = micro_batches

    def after_step(self) -> None:
        started = time.perf_counter()
        self.seconds["ours"].append(started - self._ended)
        batch = self._batches.pop(self._step)
        self._step += 1
        view = batch.views["student"]
        assert isinstance(view, PaddedView)
        inputs = {**view.to(self._device).model_inputs(), "labels": batch.labels.to(self._device)}
        self._wait()
        started = time.perf_counter()
        loss = self._engine(**inputs).loss
        self._engine.backward(loss)
        self._engine.step()
        self._wait()
        self._ended = time.perf_counter()
        self.seconds["bare"].append(self._ended - started)

    def end(self) -> None:
        pass

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def recipe(steps: int, batch: int, length: int) -> dict[str, Any]:
    return {
        "name": "loop-speed",
        "task": {
            "data": {
                "path": f"docstrings:{','.join(LABELS)}",
                "per_class": {"train": steps * batch // 2, "validation": 1, "test": 1},
            },
            "labels": LABELS,
            "max_length": length,
        },
        "student": {"model": MINILM},
        "training": {"steps": steps, "batch_size": batch, "learning_rate": 1e-5, "keep": "last"},
        "phases": [{"fine-tune": {"models": "student", "save_as": "labels"}}],
        "deepspeed": "zero0_auto",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe(given.steps, given.batch, given.length)))
        loaded = load_recipe(str(file))
        rival = Rival(given.batch, loaded.deepspeed, given.steps)
        runs = execute(loaded, Path(name) / "run", observer=rival)
        world = runs["task"].world
        seconds = {name: each[WARM_UP_STEPS:] for name, each in rival.seconds.items()}
        measured = {
            "environment": describe_environment(world.size, str(world.device)),
            "threads": torch.get_num_threads(),
            "deepspeed": resolved_name(loaded.deepspeed),
            "batch": given.batch,
            "max_length": given.length,
            "steps": len(seconds["ours"]),
            "seconds_per_step": {name: float(np.mean(each)) for name, each in seconds.items()},
            "ours_of_bare": ratio(seconds["ours"], seconds["bare"]),
        }
        world.stop()
    for what, value in measured.items():
        if what != "environment":
            print(f"{what}: {value}")
    if given.output:
        write_json(given.output, measured)


if __name__ == "__main__":
    main()
