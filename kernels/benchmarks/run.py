"""Time every op against its rivals, write a CSV, then the table and the plot from it.

PYTHONPATH=kernels python kernels/benchmarks/run.py [--only masked_kl] [--seconds 1.0]

With --only, that op's rows of an earlier run are replaced and the others kept.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import os
import platform
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from problems import Problem, problems
from torch import Tensor

import ds_kernels

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 1 << 28  # more than any L2 cache


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {torch.get_num_threads()} threads"
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


class Timer:
    """Device time of single calls, caches flushed in between."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def once(self, call: Any) -> float:
        """Milliseconds."""
        self.flush.zero_()
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end)
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    def many(self, call: Any) -> list[float]:
        for _ in range(3):
            self.once(call)
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - begin < self.seconds and len(times) < 200):
            times.append(self.once(call))
        return sorted(times)


def copy_bandwidth(timer: Timer) -> float:
    """Bytes per second, read and written."""
    source = torch.empty(1 << 28, dtype=torch.int8, device=timer.device)
    target = torch.empty_like(source)
    times = timer.many(lambda: target.copy_(source))
    return 2 * source.numel() / (times[len(times) // 2] * 1e-3)


def gradients(loss: Tensor, leaves: list[Tensor], retain: bool = False) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves, retain_graph=retain))


def oracle(problem: Problem) -> tuple[float, list[Tensor]]:
    """float64, on counted rows, from the unrounded tensors."""
    path = problem.paths.get("eager_compact", problem.paths["eager"])
    leaves, fixed = problem.exact
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    fixed = [x.double() if x.is_floating_point() else x for x in fixed]
    loss = path(leaves, fixed)
    return loss.item(), gradients(loss, leaves)


def measure(problem: Problem, timer: Timer, bandwidth: float) -> list[dict[str, Any]]:
    rows = []
    exact_loss, exact = oracle(problem)
    norm = sum(x.square().sum().item() for x in exact) ** 0.5
    on_gpu = timer.device.type == "cuda"
    for name, path in problem.paths.items():
        row: dict[str, Any] = {
            "op": problem.op,
            "shape": " ".join(f"{key}={value}" for key, value in problem.shape.items()),
            "dtype": str(problem.dtype).removeprefix("torch."),
            "path": name,
        }

        def forward(path: Any = path) -> Tensor:
            return path(problem.leaves, problem.fixed)

        try:
            loss = forward()
            if name == "ds_kernels":
                row["used"] = ds_kernels.last_path()
                if on_gpu and row["used"] != "triton":
                    raise RuntimeError(f"used the {row['used']} on a GPU")
            grads = gradients(loss, problem.leaves, retain=True)
            squares = (
                (a.double() - b).square().sum().item() for a, b in zip(grads, exact, strict=True)
            )
            row["loss_error"] = abs(loss.item() - exact_loss) / max(abs(exact_loss), 1e-30)
            row["gradient_error"] = sum(squares) ** 0.5 / max(norm, 1e-30)
            del grads
            timed = {
                "forward": forward,
                "backward": lambda loss=loss: gradients(loss, problem.leaves, retain=True),
                "both": lambda: gradients(forward(), problem.leaves),
            }
            for part, call in timed.items():
                times = timer.many(call)
                row[f"{part}_ms"] = times[len(times) // 2]
                row[f"{part}_ms_p20"] = times[len(times) // 5]
                row[f"{part}_ms_p80"] = times[len(times) * 4 // 5]
            del timed, loss
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                loss = forward()
                row["retained_mb"] = (torch.cuda.memory_allocated() - before) / 1e6
                gradients(loss, problem.leaves)
                row["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
                del loss
            row["floor_ms"] = problem.floor_bytes / bandwidth * 1e3
        except (RuntimeError, torch.OutOfMemoryError) as failure:
            row["failure"] = str(failure).splitlines()[0][:120]
        rows.append(row)
        shown = {key: round(value, 4) for key, value in row.items() if isinstance(value, float)}
        print(row["op"], row["shape"], row["dtype"], name, shown.get("both_ms"), flush=True)
    torch._dynamo.reset()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="one op")
    parser.add_argument(
        "--out", type=Path, help="CSV to write; results/DATE-DEVICE.csv if not given"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    timer = Timer(device, arguments.seconds)
    bandwidth = copy_bandwidth(timer)
    about = {
        "date": datetime.date.today().isoformat(),
        "device": device_name(device),
        "copy_gb_s": round(bandwidth / 1e9, 1),
        **{name: version(name) for name in ("torch", "triton", "liger-kernel")},
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }
    print(about)
    slug = "cpu" if device.type == "cpu" else torch.cuda.get_device_name().replace(" ", "-").lower()
    path = arguments.out or RESULTS / f"{about['date']}-{slug}.csv"
    path.parent.mkdir(exist_ok=True)
    rows = kept_rows(path, arguments.only) if arguments.only else []
    for make in problems(device):
        problem = make()
        if arguments.only in ("", problem.op):
            rows += [{**row, **about} for row in measure(problem, timer, bandwidth)]
            write(path, rows)  # after each problem: a run that is cut off keeps its rows
            if find_spec("matplotlib") is not None:  # else report.py is run elsewhere
                from report import report

                report(path)
        del problem


def kept_rows(path: Path, op: str) -> list[dict[str, Any]]:
    """What an earlier run measured of other ops."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["op"] != op]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    fields = dict.fromkeys(key for row in rows for key in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(fields))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
