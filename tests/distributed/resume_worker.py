"""Trainings that are saved by some ranks and go on with others, at other stages. One process loads
the libraries and forks the ranks of each scenario; results go to a JSON file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.process.identity import free_port
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training
from ds_distill.types import Batch
from ds_distill.views import PaddedView

LABELS = 3
"""Shards of three biases are padded, on two ranks and on four."""
SAVED_AT, STEPS, MICRO_BATCHES = 3, 6, 4
SCENARIOS = {
    # name: (ranks, config, the student is sharded too, name of the one that it goes on from)
    "two": (2, "zero3_fp32", False, None),
    "two to one": (1, "zero3_fp32", False, "two"),
    "two to four": (4, "zero3_fp32", False, "two"),
    "two to four, sharded": (4, "zero3_fp32", True, "two"),
    "stage 3 to 1": (2, "zero1_fp32", False, "two"),
    "two at stage 3 to one at stage 1": (1, "zero1_fp32", False, "two"),
    "two at stage 3 to four at stage 2": (4, "zero2_fp32", False, "two"),
    "one": (1, "zero1_fp32", False, None),
    "one to two": (2, "zero1_fp32", False, "one"),
    "one at stage 1 to two at stage 3": (2, "zero3_fp32", True, "one"),
    "one at stage 1 to two at stage 0": (2, "zero0_fp32", False, "one"),
}


def make_model(seed: int, width: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    shape = BertConfig(
        vocab_size=50,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=width,
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(shape)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)
    return model


def micro_batches(step: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(step)
    made = []
    for number in range(MICRO_BATCHES):
        ids = torch.randint(1, 50, (4, 6), generator=draw)
        view = PaddedView(ids, torch.ones_like(ids), torch.zeros_like(ids))
        keys = torch.arange(8).view(4, 2) + 8 * number
        labels = torch.randint(0, LABELS, (4,), generator=draw)
        rows = {"all": torch.arange(4), "labelled": torch.arange(4)}
        made.append(Batch(keys, {"student": view, "teacher": view}, labels, rows))
    return made


def train(
    world: World, config_name: str, sharded: bool, teacher: Path, start: Path | None, saved: Path
) -> list[float]:
    """Losses of the steps, those after `start` where it is given."""
    training = Training(batch_size=16, micro_batch_size=4, max_grad_norm=1.0)
    config = deepspeed_config(config_name, training, world.size)
    with sharded_loading(config):
        teachers = {"teacher": BertForSequenceClassification.from_pretrained(teacher)}
    torch.manual_seed(0)
    losses = losses_of({"cross_entropy": {}, "kl": {}, "hidden_mse": {}})
    terms = build_terms(losses, TermInputs(8, {"teacher": 12}))
    bundle = Bundle(make_model(1, 8), teachers, terms)
    optimizer = OptimizerSettings(0.01, 0.1, total_steps=10, warmup_steps=2)
    engine = Engine(bundle, config, world, optimizer, student_resident=not sharded)
    if start is not None:
        engine.load(start)
    losses_seen = []
    for step in range(SAVED_AT if start else 0, STEPS):
        parts = engine.train_step(micro_batches(step)[world.rank :: world.size])
        losses_seen.append(float(world.sum(parts["loss"].clone())))
        if step + 1 == SAVED_AT:
            engine.save(saved)
    engine.close()
    return losses_seen


def rank_of(number: int, size: int, port: int, name: str, folder: Path) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _, config, sharded, before = SCENARIOS[name]
    saved = folder / name
    saved.mkdir(exist_ok=True)
    world = World.start()
    start = folder / before if before else None
    losses = train(world, config, sharded, folder / "teacher", start, saved)
    if world.is_main:
        (folder / f"{name}.json").write_text(json.dumps(losses))
    World.stop()


def main(folder: Path) -> None:
    make_model(2, 12).save_pretrained(folder / "teacher")
    results: dict[str, Any] = {}
    for name, (size, *_) in SCENARIOS.items():
        port, children = free_port(), []
        for number in range(size):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    rank_of(number, size, port, name, folder)
                    code = 0
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * size, (name, codes)
        results[name] = json.loads((folder / f"{name}.json").read_text())
    (folder / "results.json").write_text(json.dumps(results))


main(Path(sys.argv[1]))
