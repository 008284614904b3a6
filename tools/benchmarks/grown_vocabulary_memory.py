"""Peak memory and time of a step of VE-KD over a grown vocabulary, forward and backward: our three
terms, `linear_kl` alone on the same heads, and the same three losses of all logits by torch. One
process each, in turn.

    python tools/benchmarks/grown_vocabulary_memory.py --runs 3 --output memory.json
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

WAYS = ("terms", "linear_kl alone", "all logits")
TEMPERATURE, KL_WEIGHT, COSINE_WEIGHT = 2.0, 2.0, 5.0


def measure(
    way: str, rows: int, labelled: int, vocabulary: int, known: int, width: int
) -> dict[str, float]:
    """{"peak_mb": above what the tensors and torch need, "seconds"}."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from ds_distill.losses import KL, Cosine, CrossEntropy, Seen
    from ds_distill.process.peak_memory import forget_resident_peak, resident_peak
    from ds_distill.types import Batch, Signals, VocabularyHead

    torch.set_num_threads(1)
    torch.manual_seed(0)
    own, other = nn.Linear(width, vocabulary), nn.Linear(width, known).requires_grad_(False)
    features = torch.randn(rows, width, requires_grad=True)
    taught = torch.randn(rows, width)
    labels = torch.randint(0, vocabulary, (rows,))
    kl = KL({"rows": "tokens", "temperature": TEMPERATURE, "weight": KL_WEIGHT})
    # In a bundle's order: terms without teachers first, those over a head and a teacher's last.
    terms = [CrossEntropy(), Cosine({"rows": "tokens", "weight": COSINE_WEIGHT}), kl]
    if way == "linear_kl alone":
        terms = [kl]

    def step(count: int, of_labels: int) -> None:
        states, wanted = features[:count], taught[:count]
        if way == "all logits":
            eager(F, own(states), other(wanted), states, wanted, labels[:of_labels]).backward()
            return
        every = torch.arange(count)
        sets = {"all": every, "tokens": every, "labelled": every[:of_labels]}
        batch = Batch(torch.zeros(count, 2).long(), {}, labels[:count], sets)
        student = Signals(VocabularyHead(states, own, own), {-1: states})
        teacher = Signals(VocabularyHead(wanted, other, other), {-1: wanted})
        losses = [term(Seen(student, batch, {"t": teacher})).mean() for term in terms]
        torch.stack(losses).sum().backward()

    step(8, 4)  # what the first call imports and allocates, gradients too
    for trained in (own.weight, own.bias, features):
        trained.grad = torch.ones_like(trained)  # all of its pages
    forget_resident_peak()
    before = resident_peak() or 0
    begin = time.perf_counter()
    step(rows, labelled)
    seconds = time.perf_counter() - begin
    return {"peak_mb": ((resident_peak() or 0) - before) / 2**20, "seconds": seconds}


def eager(F: Any, own: Any, other: Any, states: Any, wanted: Any, labels: Any) -> Any:
    """The losses by the equations; own: [n, V], other: [n, V_t], labels of the first rows."""
    entropy = F.cross_entropy(own[: len(labels)], labels)
    p, q = ((logits / TEMPERATURE).log_softmax(-1) for logits in (other, own[:, : other.shape[1]]))
    kl = F.kl_div(q, p, reduction="batchmean", log_target=True) * TEMPERATURE**2
    cosine = (1 - F.cosine_similarity(states, wanted, dim=-1)).mean()
    return KL_WEIGHT * kl + COSINE_WEIGHT * cosine + entropy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=14_000, help="tokens that the teacher knows")
    parser.add_argument("--labelled", type=int, default=3_500, help="of these, masked ones")
    parser.add_argument("--vocabulary", type=int, default=60_000)
    parser.add_argument("--known", type=int, default=30_522)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turn")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON")
    given = vars(parser.parse_args())
    shape = {name: given[name] for name in ("rows", "labelled", "vocabulary", "known", "width")}
    if given["way"]:
        print(json.dumps(measure(given["way"], **shape)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    options = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    for _ in range(given["runs"]):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, *options]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[way].append(json.loads(out.splitlines()[-1]))
            print(way, found[way][-1], flush=True)
    if given["output"]:
        write(given["output"], {**shape, "runs": given["runs"]}, found)


def write(file: Path, settings: dict[str, Any], found: dict[str, list[dict[str, float]]]) -> None:
    from ds_distill.run.inputs import describe_environment

    medians = {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for way, runs in found.items()
    }
    ratios = {
        f"terms / {way}": {key: medians["terms"][key] / value for key, value in of_way.items()}
        for way, of_way in medians.items()
        if way != "terms"
    }
    content = {"settings": settings, "runs": found, "ratios of medians": ratios}
    content["environment"] = describe_environment(1, "cpu")
    file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
