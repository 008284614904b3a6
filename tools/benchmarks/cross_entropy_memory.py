"""Peak memory and time of cross-entropy over a vocabulary, forward and backward: our term against
torch's cross-entropy of all logits, as it was before. One process each, in turn.

    python tools/benchmarks/cross_entropy_memory.py --rows 4096 --runs 3 --output memory.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAYS = ("ours", "all logits")


def measure(way: str, rows: int, vocabulary: int, width: int, dtype: str) -> dict[str, float]:
    """{"peak_mb": above what the tensors and torch need, "seconds": of the second of two calls}."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from ds_distill.losses import CrossEntropy, Seen
    from ds_distill.process.peak_memory import forget_resident_peak, resident_peak
    from ds_distill.types import Batch, Signals, VocabularyHead

    torch.set_num_threads(2)
    torch.manual_seed(0)
    decoder = nn.Linear(width, vocabulary).to(getattr(torch, dtype))
    features = torch.randn(rows, width, dtype=decoder.weight.dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,))
    every = torch.arange(rows)
    batch = Batch(torch.zeros(rows, 2).long(), {}, labels, {"all": every, "labelled": every})
    term = CrossEntropy()

    def step(features: torch.Tensor, batch: Batch) -> None:
        head = VocabularyHead(features, decoder, decoder)
        if way == "ours":
            losses = term(Seen(Signals(head), batch))
        else:
            losses = F.cross_entropy(head.logits().float(), batch.labels, reduction="none")
        losses.mean().backward()

    few = torch.arange(8)
    small = Batch(batch.keys[:8], {}, labels[:8], {"all": few, "labelled": few})
    step(features[:8], small)  # what the first call imports and allocates, gradients too
    for trained in (decoder.weight, decoder.bias, features):
        trained.grad = torch.ones_like(trained)  # all of its pages
    forget_resident_peak()
    before = resident_peak() or 0
    step(features, batch)
    peak = (resident_peak() or 0) - before
    begin = time.perf_counter()
    step(features, batch)
    return {"peak_mb": peak / 2**20, "seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turn")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON")
    given = parser.parse_args()
    shape = (given.rows, given.vocabulary, given.width, given.dtype)
    if given.way:
        print(json.dumps(measure(given.way, *shape)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    names = ("--rows", "--vocabulary", "--width", "--dtype")
    options = [text for pair in zip(names, map(str, shape), strict=True) for text in pair]
    for _ in range(given.runs):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, *options]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[way].append(json.loads(out.splitlines()[-1]))
            print(way, found[way][-1], flush=True)
    if given.output:
        write(given.output, vars(given), found)


def write(file: Path, given: dict[str, Any], found: dict[str, list[dict[str, float]]]) -> None:
    from ds_distill.run.inputs import describe_environment

    def over(way: str, key: str) -> float:
        return statistics.median(run[key] for run in found[way])

    shape = {key: given[key] for key in ("rows", "vocabulary", "width", "dtype", "runs")}
    ratios = {key: over("ours", key) / over("all logits", key) for key in ("peak_mb", "seconds")}
    content = {"settings": shape, "runs": found, "ours / all logits, medians": ratios}
    content["environment"] = describe_environment(1, "cpu")
    file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
