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
from collections.abc import Callable
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
SETTINGS = list(
    itertools.product([1, 2, 4, 8], [0.001, 0.01, 0.1, 1, 3], [0, 80, -80], [0.5, 1, 2, 8])
)
"""Spread of the logits, of student less teacher, offset of either, temperature."""
OPS: dict[str, tuple[int, tuple[torch.dtype, ...]]] = {
    # op: each so many settings, which meets every value of each; dtypes. A row takes the
    # interpreter a tenth of a second.
    "masked_kl": (7, (torch.float32, torch.bfloat16)),
    "masked_reverse_kl": (7, (torch.float32,)),
    "masked_js": (7, (torch.float32,)),
    "masked_tv": (7, (torch.float32,)),
    "topk_kl": (7, (torch.float32,)),
}


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


def errors(op: str, s: Tensor, t: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the loss's error, the norm of the gradient's, and the loss in float64."""
    kept = (s > -torch.inf)[0].nonzero()[:, 0]
    leaf = s[:, kept].double().requires_grad_()
    log_q, log_p = _logs(leaf, temperature), _logs(t[:, kept].double(), temperature)
    ours = s.detach().requires_grad_()  # keeps its strides
    function: Callable[..., Tensor] = getattr(ds_kernels, op)
    if op == "topk_kl":
        ids = log_p.topk(K, -1).indices
        given = _buckets(log_p, ids).float()
        losses = function(
            ours, given[:, :-1].contiguous(), kept[ids], given[:, -1].contiguous(),
            temperature=temperature, reduction="none",
        )  # fmt: skip
        log_q, log_p = _buckets(log_q, ids), given.double().log_softmax(1)
    else:
        losses = function(ours, t, temperature=temperature, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), ours)
    oracle = exact_rows(op, log_q, log_p) * temperature**2
    (wanted,) = torch.autograd.grad(oracle.sum(), leaf)
    wanted = torch.zeros(s.shape, dtype=torch.float64).index_copy(1, kept, wanted)
    oracle = oracle.detach()
    return (losses.detach() - oracle).abs(), (gradient - wanted).norm(dim=1), oracle


def measure(op: str, every: int) -> list[dict[str, Any]]:
    """Root mean squares over the rows of each layout and setting."""
    found = []
    step, dtypes = OPS[op]
    for setting in SETTINGS[:: step * every]:
        spread, gap, offset, temperature = setting
        for dtype in dtypes:
            random = torch.Generator().manual_seed(0)
            base = torch.randn(ROWS, WIDTH, generator=random) * spread
            noise = torch.randn(ROWS, WIDTH, generator=random) * gap
            s, t = (base + noise + offset).to(dtype), (base - offset).to(dtype)
            for layout, pair in layouts(s, t).items():
                loss, slope, exact = errors(op, *pair, temperature)
                row = {"op": op, "dtype": str(dtype).removeprefix("torch."), "setting": setting}
                row |= {"layout": layout, "exact": exact.mean().item()}
                row |= {"loss": loss.square().mean().sqrt().item()}
                row |= {"gradient": slope.square().mean().sqrt().item()}
                found.append(row)
    return found


def run(kernels: Path, out: Path, every: int, ops: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(kernels), "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, "--measure", str(out), "--every", str(every)]
    command += ["--ops", *ops]
    return subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"})


def compare(every: int, ops: list[str]) -> list[dict[str, Any]]:
    """Rows of `measure` with the errors of both."""
    with tempfile.TemporaryDirectory() as folder:
        tree = ["git", "archive", BEFORE, "kernels/ds_kernels"]
        archive = subprocess.run(tree, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        sources = {"before": Path(folder) / "kernels", "now": ROOT / "kernels"}
        files = {name: Path(folder) / f"{name}.json" for name in sources}
        runs = [run(sources[name], files[name], every, ops) for name in sources]
        if any([one.wait() for one in runs]):
            raise RuntimeError("accuracy.py: a measurement failed")
        before, now = (json.loads(file.read_text()) for file in files.values())
    return [
        {**new, "loss": [old["loss"], new["loss"]], "gradient": [old["gradient"], new["gradient"]]}
        for old, new in zip(before, now, strict=True)
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"# Errors in Triton's interpreter, over those of the kernels of {BEFORE}",
        "",
        f"{ROWS} rows of {WIDTH} logits in each of five layouts (rows that begin alike, at 16 "
        "bytes, unlike, strided, with columns of -inf) and each setting of spread (1 to 8), gap "
        "(0.001 to 3), offset (0, 80, -80) and temperature (0.5 to 8). Errors against float64, "
        "root mean squares over the rows of a setting. Made by accuracy.py.",
        "",
        "| op | dtype | error of | settings | median | above 1.05 | "
        "worst: spread, gap, offset, T | before | now | loss there |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], dict[tuple[float, ...], list[dict[str, Any]]]] = {}
    for row in rows:
        settings = groups.setdefault((row["op"], row["dtype"]), {})
        settings.setdefault(tuple(row["setting"]), []).append(row)
    for names, settings in groups.items():
        for what in ("loss", "gradient"):
            both = np.array([[one[what] for one in rows] for rows in settings.values()])
            old, new = np.sqrt((both**2).mean(1)).T
            ratios = new / np.maximum(old, np.finfo(np.float64).tiny)
            worst = int(ratios.argmax())
            setting, exact = list(settings.items())[worst]
            cells = [*names, what, str(len(ratios)), f"{np.median(ratios):.2f}"]
            cells += [str((ratios > 1.05).sum())]
            cells += [f"{ratios[worst]:.2f}: {', '.join(f'{x:g}' for x in setting)}"]
            cells += [f"{old[worst]:.1e}", f"{new[worst]:.1e}", f"{exact[0]['exact']:.1e}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--every", type=int, default=1, help="only each so many settings")
    parser.add_argument("--out", type=Path, default=RESULTS / "accuracy.md")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        found = [row for op in arguments.ops for row in measure(op, arguments.every)]
        arguments.measure.write_text(json.dumps(found))
        return
    arguments.out.write_text(table(compare(arguments.every, arguments.ops)))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
