"""Run by each rank of a launch: engines of all stages, and the bytes that they hold between
the backward pass and the optimizer's step. Rank 0 writes them to a JSON file."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

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
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

world = World.start()
ROWS, CLASSES = 4, 4


def storages() -> dict[int, int]:
    """Bytes of all tensors' storages, by address."""
    found = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.device.type == "cpu":
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return found


def settled_storages() -> dict[int, int]:
    """Storages at the emptiest of some looks: one of gloo's threads may hold the tensor that it
    has reduced for some milliseconds after the reduction has ended."""
    looks = []
    for _ in range(3):
        time.sleep(0.04)
        looks.append(storages())
    return min(looks, key=lambda look: sum(look.values()))


def batch(live: bool) -> Batch:
    ids = torch.ones(ROWS, 8, dtype=torch.int64)
    view = PaddedView(ids, torch.ones_like(ids))
    return Batch(
        keys=torch.zeros(ROWS, 2, dtype=torch.int64),
        views={"student": view, "teacher": view},
        labels=torch.zeros(ROWS, dtype=torch.int64),
        row_sets={"all": torch.arange(ROWS)},
        signals={} if live else {"teacher": Signals(torch.zeros(ROWS, CLASSES))},
    )


def held(configs: Path, precision: str, stage: int, live: bool, resident: bool) -> dict[str, Any]:
    """Bytes of parameters, and of gradients, optimizer and reduce buckets."""
    gc.collect()
    before = storages()
    config = deepspeed_config(
        f"zero{stage}_{precision}", Training(batch_size=ROWS * world.size), world.size
    )
    config["zero_optimization"]["reduce_bucket_size"] = 100_000
    student_config = AutoConfig.from_pretrained(configs / "student")
    teacher_config = AutoConfig.from_pretrained(configs / "teacher")
    for each in (student_config, teacher_config):
        each.num_labels = CLASSES
    student = AutoModelForSequenceClassification.from_config(student_config, dtype=torch.float32)
    teachers = {}
    if live:
        with sharded_loading(config):
            teachers["teacher"] = AutoModelForSequenceClassification.from_config(
                teacher_config, dtype=model_dtype(config)
            )
    terms = build_terms(losses_of({"kl": {}}), TermInputs(student_config.hidden_size))
    bundle = Bundle(student, teachers, terms)
    settings = OptimizerSettings(1e-4, 0.01, 10, 1)
    engine = Engine(bundle, config, world, settings, student_resident=resident)
    engine.train_step([batch(live)])
    inner = engine._engine
    inner.train()
    parts = inner(batch=engine._moved([batch(live)], ())[0])
    dtypes = sorted({str(p.dtype) for p in student.parameters()})
    inner.backward(parts["loss"] * world.size, scale_wrt_gas=False)
    del parts
    # Tensors that autograd made are objects of Python once they have been asked for.
    gradients = [parameter.grad for parameter in bundle.parameters()]
    gc.collect()
    of_parameters = set()
    for parameter in bundle.parameters():
        of_parameters.add(parameter.untyped_storage().data_ptr())
        if hasattr(parameter, "ds_tensor"):
            of_parameters.add(parameter.ds_tensor.untyped_storage().data_ptr())
    found = settled_storages()
    sizes = {address: size for address, size in found.items() if address not in before}
    weights = sum(size for address, size in sizes.items() if address in of_parameters)
    del gradients
    inner.step()
    engine.close()
    return {
        "parameters": weights,
        "others": sum(sizes.values()) - weights,
        "dtypes": dtypes,
    }


def main(folder: Path) -> None:
    gc.collect()
    gc.freeze()  # what has been imported holds no tensor of an engine: each look would go over it
    results = {}
    for name, (precision, cases) in json.loads((folder / "cases.json").read_text()).items():
        for stage, live, resident in cases:
            measured = held(folder / name, precision, stage, live, resident)
            of_ranks = torch.zeros(world.size, 2, dtype=torch.float64)
            of_ranks[world.rank] = torch.tensor([measured["parameters"], measured["others"]])
            key = json.dumps([name, stage, live, resident])
            results[key] = {"dtypes": measured["dtypes"], "ranks": world.sum(of_ranks).tolist()}
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    world.barrier()
    world.stop()


main(Path(sys.argv[1]))
