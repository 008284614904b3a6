"""Errors of the losses of logits in Triton's interpreter, beside those of the kernels of c74f3a6.

PYTHONPATH=kernels python kernels/benchmarks/accuracy.py

Both run on the same logits with the tiles that a GPU would have, each in a process of its own, and
are compared with float64. The interpreter has exponentials and logarithms to the last digit:
`rounding.py` emulates those of a GPU. The kernels before are taken from git.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ds_kernels

BEFORE = "c74f3a6"
ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
WIDTH, ROWS, K = 2501, 8, 16
Setting = tuple[float, float, float, float]
SETTINGS: list[Setting] = list(
    itertools.product([1, 2, 4, 8], [0.001, 0.01, 0.1, 1, 3], [0, 80, -80], [0.5, 1, 2, 8])
)
"""Spread of the logits, of student less teacher, offset of either, temperature."""
EVERY = 7
"""One setting of so many is measured, which meets every value of each: a row takes the interpreter
a tenth of a second."""
OPS = (
    ("masked_kl", "float32"),
    ("masked_kl", "bfloat16"),
    ("masked_reverse_kl", "float32"),
    ("masked_js", "float32"),
    ("masked_tv", "float32"),
    ("topk_kl", "float32"),
)
LIMIT = 1.05
"""What is above it is measured again, on other rows and more: of hundreds of ratios of a few rows
some are large by chance."""
AGAIN = 32


def _placed(x: Tensor, before: int, behind: int) -> Tensor:
    """x within wider rows, which begin elsewhere."""
    wide = torch.zeros(len(x), before + x.shape[1] + behind, dtype=x.dtype)
    wide[:, before : before + x.shape[1]] = x
    return wide[:, before : before + x.shape[1]]


def layouts(s: Tensor, t: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Student and teacher: rows that begin alike anywhere, at 16 bytes, unlike each other, in a
    tensor that begins between 16 bytes, and with columns that neither model has."""
    fit = WIDTH // 8 * 8
    infinite = [x.clone() for x in (s, t)]
    for x in infinite:
        x[:, :20] = x[:, 300] = x[:, -9:] = -torch.inf
    return {
        "alike": (s, t),
        "aligned": (s[:, :fit].contiguous(), t[:, :fit].contiguous()),
        "unlike": (s, _placed(t, 0, 3)),
        "strided": (_placed(s, 1, 2), _placed(t, 1, 2)),
        "infinite": (infinite[0], infinite[1]),
    }


def _logs(x: Tensor, temperature: float) -> Tensor:
    return (x / temperature).log_softmax(-1)


def _entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Relative entropy of rows, without cancellation."""
    d = log_p - log_q
    return (log_p.exp() * (d + torch.expm1(-d))).sum(-1)


def exact_rows(op: str, log_q: Tensor, log_p: Tensor) -> Tensor:
    if op == "masked_reverse_kl":
        return _entropy(log_q, log_p)
    if op == "masked_js":
        log_m = torch.logaddexp(log_p, log_q) - np.log(2)
        return (_entropy(log_p, log_m) + _entropy(log_q, log_m)) / 2
    if op == "masked_tv":
        return (log_p.exp() * torch.expm1(log_q - log_p)).abs().sum(-1) / 2
    return _entropy(log_p, log_q)


def _buckets(logs: Tensor, ids: Tensor) -> Tensor:
    """K log-probabilities and that of all others."""
    rest = logs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat((logs.gather(1, ids), rest), 1)


def errors(op: str, s: Tensor, t: Tensor, temperature: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each row the loss's error and the loss in float64; the norms of both for the gradient."""
    kept = (s > -torch.inf)[0].nonzero()[:, 0]
    leaf = s[:, kept].double().requires_grad_()
    log_q, log_p = _logs(leaf, temperature), _logs(t[:, kept].double(), temperature)
    ours = s.detach().requires_grad_()  # keeps its strides
    if op == "topk_kl":
        ids = log_p.topk(K, -1).indices
        given = _buckets(log_p, ids).float()
        losses = ds_kernels.topk_kl(
            ours, given[:, :-1].contiguous(), kept[ids], given[:, -1].contiguous(),
            temperature=temperature, reduction="none",
        )  # fmt: skip
        log_q, log_p = _buckets(log_q, ids), given.double().log_softmax(1)
    else:
        losses = ds_kernels.masked_kl(
            ours,
            t,
            divergence=op.removeprefix("masked_"),
            temperature=temperature,
            reduction="none",
        )
    (gradient,) = torch.autograd.grad(losses.sum(), ours)
    oracle = exact_rows(op, log_q, log_p) * temperature**2
    (wanted,) = torch.autograd.grad(oracle.sum(), leaf)
    wanted = torch.zeros(s.shape, dtype=torch.float64).index_copy(1, kept, wanted)
    oracle = oracle.detach()
    return {
        "loss": ((losses.detach() - oracle).abs(), oracle),
        "gradient": ((gradient - wanted).norm(dim=1), wanted.norm(dim=1)),
    }


def measure(op: str, dtype: str, setting: Setting, rows: int, seed: int) -> list[dict[str, Any]]:
    """Root mean squares over the rows of each layout."""
    spread, gap, offset, temperature = setting
    random = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, WIDTH, generator=random) * spread
    noise = torch.randn(rows, WIDTH, generator=random) * gap
    s, t = (x.to(getattr(torch, dtype)) for x in (base + noise + offset, base - offset))
    found = []
    for layout, pair in layouts(s, t).items():
        for what, each in errors(op, *pair, temperature).items():
            error, exact = (x.square().mean().sqrt().item() for x in each)
            row = {"op": op, "dtype": dtype, "of": what, "setting": setting, "layout": layout}
            found.append(row | {"error": error, "exact": exact})
    return found


def run(kernels: Path, asked: Path, out: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(kernels), "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, "--measure", str(asked), str(out)]
    return subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"})


def compare(
    asked: Sequence[tuple[str, str, Setting]], rows: int, seed: int
) -> list[dict[str, Any]]:
    """Rows of `measure` with the errors of both."""
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(folder) / "asked.json"
        questions.write_text(json.dumps([[*one, rows, seed] for one in asked]))
        tree = ["git", "archive", BEFORE, "kernels/ds_kernels"]
        archive = subprocess.run(tree, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        sources = {"before": Path(folder) / "kernels", "now": ROOT / "kernels"}
        files = {name: Path(folder) / f"{name}.json" for name in sources}
        runs = [run(sources[name], questions, files[name]) for name in sources]
        if any([one.wait() for one in runs]):
            raise RuntimeError("accuracy.py: a measurement failed")
        before, now = (json.loads(file.read_text()) for file in files.values())
    return [
        {**new, "error": [old["error"], new["error"]]} for old, new in zip(before, now, strict=True)
    ]


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each op, dtype and setting, over its layouts: errors before and now, and their ratio."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["op"], row["dtype"], row["of"], tuple(row["setting"])
        groups.setdefault(key, []).append(row)
    found = []
    for (op, dtype, what, setting), layouts_of in groups.items():
        both = np.array([row["error"] for row in layouts_of])
        old, new = np.sqrt((both**2).mean(0))
        one = {"op": op, "dtype": dtype, "of": what, "setting": setting, "before": old}
        one |= {"now": new, "ratio": new / max(old, np.finfo(np.float64).tiny)}
        found.append(one | {"exact": layouts_of[0]["exact"]})
    return found


def _cells(one: dict[str, Any]) -> list[str]:
    setting = ", ".join(f"{x:g}" for x in one["setting"])
    errors_of = [f"{one[name]:.1e}" for name in ("before", "now", "exact")]
    return [f"{one['ratio']:.2f}: {setting}", *errors_of]


def table(found: list[dict[str, Any]], again: list[dict[str, Any]]) -> str:
    lines = [
        f"# Errors in Triton's interpreter, over those of the kernels of {BEFORE}",
        "",
        f"{ROWS} rows of {WIDTH} logits in each of five layouts (rows that begin alike, at 16 "
        "bytes, unlike, strided, with columns of -inf) and each setting of spread (1 to 8), gap "
        "(0.001 to 3), offset (0, 80, -80) and temperature (0.5 to 8). Errors against float64, "
        "root mean squares over the rows of a setting. Largest: of all settings, over the loss or "
        "the gradient itself. Made by accuracy.py.",
        "",
        "| op | dtype | error of | largest before | largest now | settings | ratio, median | "
        f"above {LIMIT} | worst: spread, gap, offset, T | before | now | of |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (op, dtype), what in itertools.product(OPS, ("loss", "gradient")):
        of = [one for one in found if (one["op"], one["dtype"], one["of"]) == (op, dtype, what)]
        if of:
            every = np.array([one["ratio"] for one in of])
            largest = [max(one[when] / one["exact"] for one in of) for when in ("before", "now")]
            cells = [op, dtype, what, *(f"{x:.1e}" for x in largest), str(len(of))]
            cells += [f"{np.median(every):.2f}"]
            cells += [str((every > LIMIT).sum()), *_cells(of[int(every.argmax())])]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Those above {LIMIT} again, on {AGAIN} other rows of each layout:",
        "",
        "| op | dtype | error of | ratio: spread, gap, offset, T | before | now | of |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in again:
        cells = [one["op"], one["dtype"], one["of"], *_cells(one)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(dict.fromkeys(op for op, _ in OPS))
    parser.add_argument("--ops", nargs="+", default=names, choices=names)
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.md")
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        asked, out = arguments.measure
        lists = [measure(op, *rest) for op, *rest in json.loads(asked.read_text())]
        out.write_text(json.dumps([row for rows in lists for row in rows]))
        return
    ops = [one for one in OPS if one[0] in arguments.ops]
    first = [(*one, setting) for one in ops for setting in SETTINGS[::EVERY]]
    found = ratios(compare(first, ROWS, seed=0))
    above = [
        (one["op"], one["dtype"], one["of"], one["setting"])
        for one in found
        if one["ratio"] > LIMIT
    ]
    settings = list(dict.fromkeys((op, dtype, setting) for op, dtype, _, setting in above))
    more = ratios(compare(settings, AGAIN, seed=1)) if settings else []
    again = [one for one in more if (one["op"], one["dtype"], one["of"], one["setting"]) in above]
    arguments.out.write_text(table(found, again))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
