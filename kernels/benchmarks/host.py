"""What a call of `masked_kl` on class logits takes of the host, both ways, with launches left out.

PYTHONPATH=kernels python kernels/benchmarks/host.py

On the CPU, with tensors so small that their arithmetic is nothing: an operation of PyTorch's takes
its dispatch, and a Triton kernel nothing at all, where on a GPU its launch takes 10 us or more. So
what the kernels' path is slower by here is the least that it is slower by there.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from run import RESULTS, device_name
from torch import Tensor

import ds_kernels

ROUNDS, CALLS = 60, 40
masked_kl = importlib.import_module("ds_kernels.masked_kl")
rows = importlib.import_module("ds_kernels._rows")


class _NoLaunch:
    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextmanager
def kernels() -> Iterator[None]:
    """All that the kernels' path does on the host but the launches."""
    with ExitStack() as stack:
        for name in ("_forward_kernel", "_backward_kernel"):
            stack.enter_context(mock.patch.object(rows, name, _NoLaunch()))
        stack.enter_context(mock.patch.object(rows, "use_triton", lambda tensor: True))
        yield


@contextmanager
def plain() -> Iterator[None]:
    """PyTorch's own operations, as few logits take them on a GPU."""
    with mock.patch.object(torch.Tensor, "is_cuda", True):
        yield


def eager(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """As one would write it, without the care for small divergences and for rows of NaN."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    losses = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return losses.mean() if mask is None else (losses * mask).sum() / mask.sum()


def once(call: Callable[[], Tensor], leaf: Tensor) -> float:
    """Microseconds a call."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        torch.autograd.grad(call(), leaf)
    return (time.perf_counter() - begin) / CALLS * 1e6


def measure(mask: Tensor | None) -> list[tuple[str, list[float], list[float]]]:
    """Name, microseconds of each round, and what they are of plain PyTorch's in that round."""
    student, teacher = torch.randn(32, 6, requires_grad=True), torch.randn(32, 6)
    ours = lambda: ds_kernels.masked_kl(student, teacher, mask)  # noqa: E731
    paths = {
        "plain PyTorch": (plain, ours),
        "kernels, without their launches": (kernels, ours),
        "eager": (ExitStack, lambda: eager(student, teacher, mask)),
    }
    times: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(ROUNDS + 3):
        for name, (within, call) in paths.items():
            with within():
                times[name].append(once(call, student))
    first = times["plain PyTorch"][3:]
    return [
        (name, found[3:], [a / b for a, b in zip(found[3:], first, strict=True)])
        for name, found in times.items()
    ]


def spread(values: list[float], digits: int) -> str:
    cuts = statistics.quantiles(values, n=5)
    return f"{statistics.median(values):.{digits}f} ({cuts[0]:.{digits}f} - {cuts[-1]:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "host.md")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    triton = importlib.metadata.version("triton")
    lines = [
        f"# The host's time of masked_kl on [32, 6] logits, {datetime.date.today().isoformat()}",
        "",
        f"{device_name(torch.device('cpu'))}, torch {torch.__version__}, triton {triton}; system "
        f"load {os.getloadavg()[0]:.1f}. Microseconds forward and backward, median of {ROUNDS} "
        f"rounds of {CALLS} calls, 20% and 80% in brackets; ratios within a round. No GPU: the "
        "kernels are not launched, PyTorch's operations run on the CPU.",
        "",
        "| mask | path | microseconds | of plain PyTorch |",
        "|---|---|---|---|",
    ]
    for title, mask in (("none", None), ("bool", torch.arange(32) % 4 > 0)):
        for name, times, ratios in measure(mask):
            lines.append(f"| {title} | {name} | {spread(times, 0)} | {spread(ratios, 2)} |")
    arguments.out.write_text("\n".join(lines) + "\n")
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
