"""Compare codecs on a masked-LM teacher's distributions, and what each part of the compact codec
is worth; time them.

    ds-distill run tools/benchmarks/codecs.yaml task.data.path=TEXT --folder runs/codecs
    python tools/benchmarks/codec_comparison.py runs/codecs --output tests/results/codecs.json

TEXT is a folder with train and validation, a document a line. Tails are fitted to training rows,
and all figures are of validation rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from codec_parts import ablation
from codec_rivals import rivals
from codec_scores import candidates, codec_table, compare_codecs, plot_codecs
from topk_codec import TopKCodec
from torch import Tensor

from ds_distill.cache.codecs import Encoded
from ds_distill.data.open_source import open_source
from ds_distill.data.schedule import plan_epoch
from ds_distill.engine.world import World
from ds_distill.files import write_json
from ds_distill.models.encoder import read_signals
from ds_distill.recipe import LONE_TASK, load_recipe
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder
from ds_distill.run.inputs import describe_environment
from ds_distill.run.run import Run

TEMPERATURES = (1.0, 2.0)
EXAMPLES = 16
FIT_ROWS = 1024
"""Training rows that tails are fitted to."""
PART_ROWS = 128
"""Rows on which the parts of the codec are varied."""


def logits_of(run: Run, teacher: str, split: str, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and true ids of a split's masked tokens, in batches of `EXAMPLES` examples."""
    place = run.reference(teacher, len(run.recipe.phases))
    model = run.model(place).eval()
    examples = run.data.examples(split)
    collate = run.collator(examples, run.data.tables(split, [place]), [place])
    given = 0
    for chosen in plan_epoch(collate.lengths, examples.keys, EXAMPLES, seed=0, epoch=0):
        batch = collate(chosen, 0)
        counted = batch.row_sets["all"]
        if given >= rows or not len(counted):
            break
        with torch.inference_mode():
            logits = read_signals(model, batch.views[teacher]).logits[counted]
        given += len(logits)
        yield logits.float(), batch.labels[counted]


def decoding_speed(vocabulary: int, rows: int = 4096, repeats: int = 21) -> dict[str, Any]:
    """Rows of 64 entries decoded a second by one thread, in calls of `rows`: the median call,
    by the clock and by the processor's time, which other processes hardly change."""
    codec = TopKCodec(vocabulary, 64)
    generator = torch.Generator().manual_seed(0)
    some = codec.encode(torch.randn(256, vocabulary, generator=generator)).payload
    encoded = Encoded(some[torch.randint(0, 256, (rows,), generator=generator)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    codec.decode(encoded)
    clock, processor = [], []
    for _ in range(repeats):
        begin, own = time.perf_counter(), time.thread_time()
        codec.decode(encoded)
        clock.append(time.perf_counter() - begin)
        processor.append(time.thread_time() - own)
    torch.set_num_threads(threads)
    return {
        "vocabulary": vocabulary,
        "rows_of_a_call": rows,
        "rows_per_second": rows / statistics.median(clock),
        "rows_per_processor_second": rows / statistics.median(processor),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a finished run")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1000, help="to compare on")
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": describe_environment(1, "cpu")}
    if options.output.is_file():  # speed alone is measured anew
        result = json.loads(options.output.read_text()) | result
    sizes = (30_522, 50_265, 128_100)
    result["decode_topk_64"] = [decoding_speed(size) for size in sizes]
    if options.run is not None:
        result |= compare(options.run, options.rows)
        for temperature, part in result["temperatures"].items():
            scores = part.pop("scores")
            title = f"MiniLM, masked-LM on Wikipedia, T = {temperature}"
            plot_codecs(scores, options.output.with_name(f"codecs-T{temperature}.svg"), title)
            part["codecs"] = [asdict(score) for score in scores]
    write_json(options.output, result)
    print(json.dumps(result["decode_topk_64"], indent=1))


def compare(folder: Path, rows: int) -> dict[str, Any]:
    recipe = load_recipe(str(folder / "recipe.yaml"))
    run = Run(
        recipe,
        RunFolder(folder),
        World.start(),
        RunLog(folder, recipe, enabled=False, resumed=True),
        open_source(recipe.tasks_by_name[LONE_TASK]),
    )
    teacher = next(iter(recipe.teachers))
    sample = [logits for logits, _ in logits_of(run, teacher, "train", FIT_ROWS)]
    outputs = list(logits_of(run, teacher, "validation", rows))
    batches, labels = [logits for logits, _ in outputs], torch.cat([ids for _, ids in outputs])
    right = torch.cat([logits.argmax(1) for logits in batches]) == labels
    vocabulary = batches[0].shape[1]
    temperatures = {}
    for temperature in TEMPERATURES:
        fitted_to = [logits / temperature for logits in sample]
        measured = [logits / temperature for logits in batches]
        codecs = {**rivals(vocabulary), **candidates(fitted_to)}
        scores = compare_codecs(measured, codecs)
        few = list(islice(measured, -(-PART_ROWS // len(measured[0]))))
        temperatures[f"{temperature:g}"] = {
            "scores": scores,
            "rows_of_parts": sum(map(len, few)),
            "parts": ablation(few, fitted_to),
        }
        print(f"T = {temperature:g}\n\n{codec_table(scores).markdown()}", flush=True)
    return {
        "teacher": {
            "recipe": recipe.name,
            "training": RunFolder(folder).read_record(0, recipe.phase_names()[0]),
            "masked_accuracy": float(right.float().mean()),
            "rows": len(labels),
            "rows_of_tail_fit": sum(map(len, sample)),
            "vocabulary": vocabulary,
        },
        "temperatures": temperatures,
    }


if __name__ == "__main__":
    main()
