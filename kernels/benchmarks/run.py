"""Time every op against its rivals, write a CSV, then the table and the plot from it.

PYTHONPATH=kernels python kernels/benchmarks/run.py [--only masked_kl] [--seconds 1.0]

With --only or --dtype, those rows of an earlier run are replaced and the others kept; with
--resume, all that the same device and versions measured is kept.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import os
import platform
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from modelled import launches_of, machine_of, seconds
from problems import Problem, problems
from torch import Tensor

import ds_kernels

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 1 << 28  # more than any L2 cache
BUSY_CYCLES = 10_000_000  # five milliseconds: more than any path's launches take the host


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
    """Device time of single calls, caches flushed in between.

    A GPU is kept busy while a call's launches are enqueued: with nothing to do in the meantime, the
    time between the events would be the host's.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def once(self, call: Any) -> float:
        """Milliseconds."""
        self.flush.zero_()
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
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
    exact = oracle(problem)
    for name in problem.paths:
        row: dict[str, Any] = {
            "op": problem.op,
            "shape": _shape(problem),
            "dtype": _name(problem.dtype),
            "path": name,
        }
        try:
            measure_path(problem, name, timer, exact, row)
            row["floor_ms"] = problem.floor_bytes / bandwidth * 1e3
            if name == "ds_kernels" and (least := modelled(problem, bandwidth)) is not None:
                row["modelled_ms"] = least
        except Exception as failure:  # a rival's: Triton's and inductor's have types of their own
            row["failure"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:120]
        rows.append(row)
        shown = {key: round(value, 4) for key, value in row.items() if isinstance(value, float)}
        print(row["op"], row["shape"], row["dtype"], name, shown.get("both_ms"), flush=True)
    torch._dynamo.reset()
    return rows


def modelled(problem: Problem, bandwidth: float) -> float | None:
    """Milliseconds of the op both ways, by the instructions that the compiler made for this GPU;
    None where nothing was compiled at the problem's widths, and for few logits, which PyTorch's own
    operations take."""
    machine = machine_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if machine is None or not problem.sizes:
        return None
    name = _name(problem.dtype)
    launches = launches_of(machine.target, problem.op, problem.shape.get("V", 0), name)
    if not launches:
        return None
    sizes = problem.shape | problem.sizes | {"size": problem.dtype.itemsize}
    return seconds(launches, sizes, replace(machine, copied=bandwidth)) * 1e3


def measure_path(
    problem: Problem,
    name: str,
    timer: Timer,
    exact: tuple[float, list[Tensor]],
    row: dict[str, Any],
) -> None:
    """Fill a path's row, as far as the path gets. Its tensors end with the call."""
    exact_loss, exact_gradients = exact
    on_gpu = timer.device.type == "cuda"

    def forward() -> Tensor:
        return problem.paths[name](problem.leaves, problem.fixed)

    loss = forward()
    if name == "ds_kernels":
        row["used"] = ds_kernels.last_path()
        if on_gpu and row["used"] == "reference":
            raise RuntimeError("used the reference on a GPU")
    grads = gradients(loss, problem.leaves, retain=True)
    norm = sum(x.square().sum().item() for x in exact_gradients) ** 0.5
    squares = (
        (a.double() - b).square().sum().item() for a, b in zip(grads, exact_gradients, strict=True)
    )
    row["loss_error"] = abs(loss.item() - exact_loss) / max(abs(exact_loss), 1e-30)
    row["gradient_error"] = sum(squares) ** 0.5 / max(norm, 1e-30)
    del grads
    timed = {
        "forward": forward,
        "backward": lambda: gradients(loss, problem.leaves, retain=True),
        "both": lambda: gradients(forward(), problem.leaves),
    }
    for part, call in timed.items():
        times = timer.many(call)
        row[f"{part}_ms"] = times[len(times) // 2]
        row[f"{part}_ms_p20"] = times[len(times) // 5]
        row[f"{part}_ms_p80"] = times[len(times) * 4 // 5]
    if on_gpu:
        del timed, call, loss
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = forward()
        row["retained_mb"] = (torch.cuda.memory_allocated() - before) / 1e6
        gradients(loss, problem.leaves)
        row["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="ops; all if not given")
    parser.add_argument("--dtype", default="", help="one dtype, as torch calls it")
    parser.add_argument(
        "--out", type=Path, help="CSV to write; results/DATE-DEVICE.csv if not given"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--resume", action="store_true", help="go on where --out ends")
    parser.add_argument("--toy", action="store_true", help="few rows: a try of the benchmark")
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
    chosen = [
        (op, dtype, make)
        for op, dtype, make in problems(device, arguments.toy)
        if op in (arguments.only or [op]) and arguments.dtype in ("", _name(dtype))
    ]
    if not chosen:
        parser.error(
            f"--only {' '.join(arguments.only)} --dtype {arguments.dtype}: there is no such problem"
        )
    rows = read(path)
    if not arguments.resume:
        again = {(op, _name(dtype)) for op, dtype, _ in chosen}
        rows = [row for row in rows if (row["op"], row["dtype"]) not in again]
    known = {key(row) for row in rows if same(row, about)}
    for _, _, make in chosen:
        problem = make()
        if (problem.op, _shape(problem), _name(problem.dtype)) in known:
            continue
        measured = [{**row, **about} for row in measure(problem, timer, bandwidth)]
        del problem
        replaced = {key(row) for row in measured}
        rows = [row for row in rows if key(row) not in replaced] + measured
        write(path, rows)  # after each problem: a run that is cut off keeps its rows
    if find_spec("matplotlib") is not None:  # else report.py is run elsewhere
        from report import report

        report(path)


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What names a problem."""
    return row["op"], row["shape"], row["dtype"]


def same(row: dict[str, Any], about: dict[str, Any]) -> bool:
    """Whether a row was measured where `about` was: its date and load may be others."""
    return all(
        row[name] == about[name] for name in ("device", "torch", "triton", "liger-kernel", "python")
    )


def _shape(problem: Problem) -> str:
    return " ".join(f"{name}={value}" for name, value in problem.shape.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read(path: Path) -> list[dict[str, Any]]:
    """What earlier runs measured."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Whole at any moment: aside, then renamed."""
    fields = dict.fromkeys(name for row in rows for name in row)
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(fields))
        writer.writeheader()
        writer.writerows(rows)
    aside.replace(path)


if __name__ == "__main__":
    main()
