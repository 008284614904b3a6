"""What DeepSpeed's hooks add to a sharded teacher's forward pass, on one rank.

    python tools/benchmarks/hook_time.py --output tests/results/hook-time.json

A BERT of 24 layers so narrow that its computation takes no time: whole on its rank (stage 0); at
stage 3 as runs have it, each layer gathered in one piece; and at stage 3 with hooks on every
module, up to DeepSpeed's own bounds. The passes take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import BertConfig, BertForSequenceClassification

from ds_distill.engine import placement
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.files import write_json
from ds_distill.models.bundle import Bundle
from ds_distill.run.environment import describe_environment
from ds_distill.types import Batch
from ds_distill.views import PaddedView

LAYERS, TURNS, WARM_UP = 24, 60, 5
STAGE_0, STAGE_3, EVERY_MODULE = "stage 0", "stage 3", "stage 3, hooks on every module"


def teacher() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(vocab_size=100, num_hidden_layers=LAYERS, **sizes)
    return BertForSequenceClassification(config).eval()


def engine_of(world: World, config: str) -> Engine:
    return Engine(Bundle(None, {"t": teacher()}), deepspeed_config(config, None, 1), world)


def engines(world: World) -> dict[str, Engine]:
    found = {STAGE_0: engine_of(world, "zero0_fp32"), STAGE_3: engine_of(world, "zero3_fp32")}
    with patch.object(placement, "gather_by_layer", lambda config, _: config):
        found[EVERY_MODULE] = engine_of(world, "zero3_fp32")
    return found


def batch() -> Batch:
    ids = torch.arange(5, 37).view(4, 8)
    view = PaddedView(ids, torch.ones_like(ids), torch.zeros_like(ids))
    return Batch.from_views({"t": view})


def summary(values: list[float]) -> dict[str, Any]:
    least, middle, most = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "quartiles": [round(least, 3), round(most, 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    world = World.start()
    of_each, inputs = engines(world), batch()
    seconds: dict[str, list[float]] = {name: [] for name in of_each}
    for turn in range(TURNS):
        for name, engine in of_each.items():
            began = time.perf_counter()
            engine.predict(inputs, ["t"])
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    ratios = {
        name: summary([one / whole for one, whole in zip(own, seconds[STAGE_0], strict=True)])
        for name, own in seconds.items()
    }
    found = {
        "command": "python tools/benchmarks/hook_time.py --output FILE",
        "layers": LAYERS,
        "milliseconds": {
            name: summary([1e3 * one for one in own]) for name, own in seconds.items()
        },
        "times_stage_0": ratios,
        "environment": describe_environment(1, "cpu"),
    }
    write_json(output, found)
    for name, own in seconds.items():
        print(f"{name}: {1e3 * statistics.median(own):.1f} ms, {ratios[name]}")
    World.stop()


if __name__ == "__main__":
    main()
