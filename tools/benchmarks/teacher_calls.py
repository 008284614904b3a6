"""What Python adds to passes of frozen 24-layer teachers without padding: their layers as they are,
by torch.compile, and the whole pass as a CUDA graph.

    python tools/benchmarks/teacher_calls.py --output calls.json

With few texts a GPU waits for Python, which calls some fifteen operations a layer. A compiled layer
is one call, and one compilation serves all layers, which are alike; a graph is one call for all,
of one number of tokens alone. Neither is what a run does: this is to say which would be worth it.
Weights are random, at the published sizes; in bf16 on a GPU, in fp32 on a CPU, where examples are
read one by one and there are no graphs. ZeRO stage 3, whose hooks gather each weight within a
layer, has neither.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import growing
import numpy as np
import torch
from large_teachers import configurations
from teacher_speed import dtype_of
from transformers import (
    AttentionInterface,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ds_distill.engine.world import World
from ds_distill.models.encoder import read_signals
from ds_distill.models.packed import ATTENTION, attend, parts_called
from ds_distill.models.packing import packed_attention, packed_backend
from ds_distill.run.inputs import describe_environment
from ds_distill.views import PackedView, PaddedView

Pass = Callable[[PackedView], torch.Tensor]
"""The logits [B, C] of a batch, on the device."""


def texts_of(count: int, length: int, device: torch.device) -> PackedView:
    """Random tokens; texts of half of the length to all of it."""
    random = np.random.default_rng(count)
    lengths = random.integers(length // 2, length + 1, count)
    ids = torch.from_numpy(random.integers(1000, 30000, (count, length)))
    mask = torch.from_numpy((np.arange(length) < lengths[:, None]).astype(np.int64))
    return PackedView.of(PaddedView(ids, mask)).to(device)


@torch.no_grad()
def plain(model: PreTrainedModel, view: PackedView) -> torch.Tensor:
    return read_signals(model, view).logits


def compiled(model: PreTrainedModel) -> Pass:
    parts = parts_called(model.config, [*model.base_model.encoder.layer])
    forwards = [torch.compile(part.forward, dynamic=True) for part in parts]

    def run(view: PackedView) -> torch.Tensor:
        for part, forward in zip(parts, forwards, strict=True):
            part.forward = forward
        try:
            return plain(model, view)
        finally:
            for part in parts:
                del part.forward  # that of the class shows again

    return run


def graph(model: PreTrainedModel) -> Pass:
    """Of the view that it is first given, alone."""
    made: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    def run(view: PackedView) -> torch.Tensor:
        if not made:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries begin, and kernels are compiled
                plain(model, view)
            torch.cuda.current_stream().wait_stream(side)
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                logits = plain(model, view)
            made.append((recorded, logits))
        recorded, logits = made[0]
        recorded.replay()
        return logits

    return run


def seconds_of(run: Pass, view: PackedView) -> tuple[float, torch.Tensor]:
    """Of a pass until its logits are on the host: float32 [B, C]."""
    started = time.perf_counter()
    logits = run(view).float().cpu()
    return time.perf_counter() - started, logits


def beside_plain(
    model: PreTrainedModel, run: Pass, view: PackedView, rounds: int
) -> dict[str, Any]:
    """A way against the layers as they are, in turns."""
    as_it_is = partial(plain, model)
    _, expected = seconds_of(as_it_is, view)
    first, found = seconds_of(run, view)
    seconds = np.array(
        [[seconds_of(way, view)[0] for way in (as_it_is, run)] for _ in range(rounds)]
    )
    low, median, high = np.quantile(seconds[:, 0] / seconds[:, 1], [0, 0.5, 1]).round(2).tolist()
    return {
        "first_seconds": round(first, 2),
        "plain_seconds": float(np.median(seconds[:, 0])),
        "seconds": float(np.median(seconds[:, 1])),
        "times_as_fast": median,
        "range": [low, high],
        "largest_logit_difference": float((found - expected).abs().max()),
    }


def measure(
    config: PreTrainedConfig, sizes: list[int], length: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    """By way and number of texts, see `beside_plain`. One that failed says why, and is not tried
    with more texts; graphs come last, since a capture that fails may take the device with it."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForSequenceClassification.from_config(
            config, dtype=dtype_of(device), attn_implementation=packed_attention(config)
        ).eval()
    by_layer = compiled(model)
    ways: dict[str, Callable[[], Pass]] = {"compiled": lambda: by_layer}
    if device.type == "cuda":
        ways["graph"] = partial(graph, model)
    found: dict[str, Any] = {way: {} for way in ways}
    for way, make in ways.items():
        for size in sizes:
            try:
                view = texts_of(size, length, device)
                found[way][str(size)] = beside_plain(model, make(), view, rounds)
            except Exception as error:
                found[way][str(size)] = {"error": f"{type(error).__name__}: {error}"[:300]}
                break
    return found


def lines(name: str, ways: dict[str, Any]) -> list[str]:
    found = []
    for way, of_sizes in ways.items():
        for size, row in of_sizes.items():
            what = row.get("error") or (
                f"{1000 * row['seconds']:.1f} ms for {1000 * row['plain_seconds']:.1f}, "
                f"{row['times_as_fast']} times as fast ({row['range'][0]} to {row['range'][1]}), "
                f"first {row['first_seconds']:.1f} s"
            )
            found.append(f"{name}, {size} texts, {way}: {what}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teachers", nargs="+", default=list(configurations()))
    parser.add_argument("--sizes", nargs="+", type=int, default=[32, 64, 256, 1024], help="texts")
    parser.add_argument("--length", type=int, default=128, help="most tokens of a text")
    parser.add_argument("--layers", type=int, default=24, help="fewer for a try on a CPU")
    parser.add_argument("--hidden", type=int, help="width, where it is not the published one")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument(
        "--resume", action="store_true", help="leave out the teachers that --output has"
    )
    given = parser.parse_args()
    world = World.start()
    if world.device.type == "cpu":  # there attention reads one example after the other
        AttentionInterface.register(ATTENTION, torch.compiler.disable(attend))
    head = {
        "environment": describe_environment(1, str(world.device)),
        "dtype": str(dtype_of(world.device)).removeprefix("torch."),
        "layers": given.layers,
        "settings": {"sizes": given.sizes, "length": given.length, "hidden": given.hidden},
        "rounds": given.rounds,
    }
    figures = growing.begin(given.output, head, given.resume)
    teachers = figures.setdefault("teachers", {})
    for name in given.teachers:
        config = configurations()[name]
        config.num_hidden_layers = given.layers
        if given.hidden:
            config.hidden_size = config.pooler_hidden_size = given.hidden
            config.intermediate_size = 4 * given.hidden
        half = dtype_of(world.device) == torch.bfloat16
        if name not in teachers and packed_backend(config, world.device, half=half) is not None:
            teachers[name] = measure(config, given.sizes, given.length, given.rounds, world.device)
            growing.write(given.output, figures)
        print(*lines(name, teachers.get(name, {})), sep="\n")
    world.stop()


if __name__ == "__main__":
    main()
