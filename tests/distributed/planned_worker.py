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
from small_engines import batch_of, engine_of

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.world import World
from ds_distill.recipe.training import Training

world = World.start()
ROWS, TEACHERS = 4, ("teacher",)


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


def held(configs: Path, precision: str, stage: int, live: bool, resident: bool) -> dict[str, Any]:
    """Bytes of parameters, and of gradients, optimizer and reduce buckets."""
    gc.collect()
    before = storages()
    config = deepspeed_config(
        f"zero{stage}_{precision}", Training(batch_size=ROWS * world.size), world.size
    )
    config["zero_optimization"]["reduce_bucket_size"] = 100_000
    teachers, batch = TEACHERS if live else (), batch_of(ROWS, TEACHERS, live)
    engine = engine_of(world, configs, config, teachers, student_resident=resident)
    bundle = engine.bundle
    engine.train_step([batch])
    inner = engine._engine
    inner.train()
    parts = inner(batch=engine._moved([batch], ())[0])
    dtypes = sorted({str(p.dtype) for p in bundle.student.parameters()})
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
