"""One distillation step: ours, from the cache, and as rivals do it.

    python tools/benchmarks/distillation_step.py --output step.json --task masked-lm

classification: BERT-large, RoBERTa-large and DeBERTa-v3-large teach a DistilBERT-sized student
by the average of their logits. masked-lm: BERT-large teaches it at 15% of the tokens. KL at
temperature 2 (random weights make flat distributions, so the top 64 give a smaller first loss).
Paths:

- live: teachers in the student's engine;
- cached: their words come with the batch: class logits, or the top 64 as the cache keeps them;
- labels: no teachers, cross-entropy with labels: what a step costs without distillation;
- two-engines: each teacher in a DeepSpeed engine of its own, see `two_engines_rival`;
- textbrewer: that package, see `textbrewer_rival`.

`--up-to` also takes steps of twice, four times as many examples, up to so many or what fits, and
says for how long of a step the GPU computes: what is left of it waits for Python.

Each path runs in a process of its own, from the same weights on the same batches. One rank.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import growing
import numpy as np
import torch
from distillation_paths import (
    DISTINCT,
    TEMPERATURE,
    Runner,
    Setting,
    cached,
    cached_batch,
    labelled_batch,
    labels,
    live,
    live_batch,
    make_batch,
    prepare,
)
from rank_memory import peak_bytes

from ds_distill.engine.precision import resolved_name
from ds_distill.engine.world import World
from ds_distill.files import read_json, write_json
from ds_distill.run.inputs import describe_environment
from ds_distill.types import Batch

WARM_UP = 3
"""Steps before those that are measured."""
OF_A_SIZE = 4
"""Steps of each larger batch; the first is not counted."""
PREPARE = "prepare"


def start_two_engines(setting: Setting, folder: Path, world: World) -> Runner:
    from two_engines_rival import two_engines

    return two_engines(setting, folder, world)


def start_textbrewer(setting: Setting, folder: Path, world: World) -> Runner:
    from textbrewer_rival import text_brewer  # may not be installed

    return text_brewer(setting, folder, world)


PATHS: dict[str, Callable[[Setting, Path, World], Runner]] = {
    "live": live,
    "cached": cached,
    "labels": labels,
    "two-engines": start_two_engines,
    "textbrewer": start_textbrewer,
}


# ------------------------------------------------------------- one path, in its process


def measure(
    name: str,
    setting: Setting,
    folder: Path,
    world: World,
    up_to: int,
    early: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """A path's row. `folder` is what `prepare` wrote. early: given the row before and within the
    search for the largest batch, which a time limit may end."""
    run = PATHS[name](setting, folder, world)
    batches = [batch_of(name, setting, number, folder, world) for number in range(DISTINCT)]
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    steps = run([batches[number % DISTINCT] for number in range(WARM_UP + setting.steps)])
    low, middle, high = np.quantile(steps.seconds[WARM_UP:], [0.2, 0.5, 0.8]).tolist()
    row = {
        "path": name,
        "dtype": dtype_of(name, setting),
        "seconds_per_step": {"median": middle, "p20": low, "p80": high},
        "tokens_per_second": setting.batch * setting.length / middle,
        "peak_bytes": peak_bytes(world),
        "first_loss": steps.first_loss,
    }
    if not up_to:
        return row
    early(row)

    def larger(found: dict[str, Any]) -> None:
        early({**row, **found})

    row |= larger_batches(name, run, setting, folder, world, up_to, larger)
    # Last: what a profiler puts into each launch stays there.
    return row | {"device_seconds_per_step": device_seconds(run, batches)}


def dtype_of(name: str, setting: Setting) -> str:
    """What a path computes in, for a reader."""
    if setting.dtype is torch.float32:
        return "float32"
    if name == "textbrewer":
        return "bfloat16 by autocast, student's weights float32, teachers' bfloat16"
    return "bfloat16, optimizer's weights float32"


def batch_of(
    name: str, setting: Setting, number: int, folder: Path, world: World, repeats: int = 1
) -> Batch:
    """A batch as a path takes it, `repeats` times the setting's size."""
    if name == "cached":
        return cached_batch(setting, number, folder, repeats)
    larger = replace(setting, batch=setting.batch * repeats)
    if name == "labels":
        return labelled_batch(larger, number)
    return live_batch(larger, number, world) if name == "live" else make_batch(larger, number)


def larger_batches(
    name: str,
    run: Runner,
    setting: Setting,
    folder: Path,
    world: World,
    up_to: int,
    early: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Seconds and peak memory of steps whose size doubles up to so many examples, the largest that
    fits the device, and what stopped the next. early: given what there is after each of them."""
    larger: dict[str, dict[str, float]] = {}
    found: dict[str, Any] = {"larger": larger}
    size, stopped = setting.batch, None
    while 2 * size <= up_to and stopped is None:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
        try:
            batch = batch_of(name, setting, 0, folder, world, 2 * size // setting.batch)
            steps = run([batch] * OF_A_SIZE)
        except Exception as error:
            stopped = first_line(error)
        else:
            size *= 2
            seconds = float(np.median(steps.seconds[1:]))
            larger[str(size)] = {"seconds": seconds, "peak_bytes": peak_bytes(world)}
            early(found)
    return {**found, "largest_batch": size, "stopped_by": stopped}


def device_seconds(run: Runner, batches: list[Batch]) -> float:
    """For how many of a step's seconds the GPU computes, of one step on each batch."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        run(batches)
    on_device = [
        event.device_time_total
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return sum(on_device) / 1e6 / len(batches)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def do_alone(name: str, setting: Setting, folder: Path, up_to: int) -> None:
    """A child process's work: its row, or its error, into FOLDER/NAME.json."""
    to = folder / f"{name}.json"
    try:
        world = World.start()
        if name == PREPARE:
            row = prepare(setting, folder, world)
        else:
            row = measure(name, setting, folder, world, up_to, partial(write_json, to))
        world.stop()
    except Exception as error:
        row = {"path": name, "error": first_line(error)}
    write_json(to, row)


# ------------------------------------------------------------------ all paths, in turn


def in_own_process(
    name: str,
    setting: Setting,
    folder: Path,
    up_to: int,
    early: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """The row of a path, or {path, error} where it failed. early: given what `measure` gives it."""
    arguments = [f"--{key}={value}" for key, value in asdict(setting).items()]
    alone = ["--alone", name, "--output", str(folder), "--up-to", str(up_to)]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments, *alone],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    row, seen = folder / f"{name}.json", None
    while True:
        try:
            errors = process.communicate(timeout=1)[1]
            break
        except subprocess.TimeoutExpired:
            if row.is_file() and (now := read_json(row)) != seen:
                early(now)
                seen = now
    last = (errors.strip().splitlines() or [""])[-1]
    ended = f"exit code {process.returncode}: {last}"[:300]
    if not row.is_file():  # killed, or it never began
        return {"path": name, "error": ended}
    return dict(read_json(row)) | ({"stopped_by": ended} if process.returncode else {})


def compare(
    setting: Setting, names: list[str], up_to: int, output: Path, resume: bool
) -> dict[str, Any]:
    """The record of all paths, in `output` after each of them. resume: paths that it has are left
    out, and tried again where they failed.

    Raises RuntimeError when what they share cannot be made.
    """
    measured = growing.begin(output, record(setting, []), resume)
    rows = finished(measured["paths"], up_to)
    missing = [name for name in names if name not in rows]
    if not missing:
        return measured
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shared = in_own_process(PREPARE, setting, folder, 0)
        if "error" in shared:
            raise RuntimeError(f"models and cache could not be made: {shared['error']}")

        def note(row: dict[str, Any]) -> None:
            rows[row["path"]] = row
            measured.update(record(setting, list(rows.values())), shared=shared)
            growing.write(output, measured)

        for name in missing:
            note(in_own_process(name, setting, folder, up_to, note))
            print(f"  {name}: {rows[name].get('error', 'done')}", flush=True)
    return measured


def finished(rows: list[dict[str, Any]], up_to: int) -> dict[str, dict[str, Any]]:
    """Rows, by path, that are not to be measured again."""
    return {
        row["path"]: row
        for row in rows
        if "error" not in row and (not up_to or "largest_batch" in row)
    }


def record(setting: Setting, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What goes into the file."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    environment = describe_environment(1, device)
    with suppress(PackageNotFoundError):
        environment["packages"]["textbrewer"] = version("textbrewer")
    settings = {**asdict(setting), "config": resolved_name(setting.config)}
    settings |= {"temperature": TEMPERATURE, "warm_up": WARM_UP}
    return {
        "environment": environment,
        "settings": settings,
        "paths": rows,
        "of_live": ratios(rows),
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each path's figures over those of `live`: seconds of a step, peak."""
    done = {row["path"]: row for row in rows if "error" not in row}
    if "live" not in done:
        return {}

    def figures(row: dict[str, Any]) -> dict[str, float]:
        seconds = row["seconds_per_step"]["median"]
        return {"seconds": seconds, "peak_bytes": row["peak_bytes"]}

    ours = figures(done["live"])
    return {
        name: {key: round(value / ours[key], 3) for key, value in figures(row).items()}
        for name, row in done.items()
    }


def table(measured: dict[str, Any]) -> str:
    """The record's rows for a reader."""
    heads = ["path", "ms/step", "p20-p80", "tokens/s", "peak MiB", "largest", "first loss"]
    heads += ["time/live", "peak/live"]
    lines = [heads]
    failed = []
    for row in measured["paths"]:
        if "error" in row:
            failed.append(f"{row['path']}: {row['error']}")
            continue
        seconds, ratio = row["seconds_per_step"], measured["of_live"].get(row["path"], {})
        lines.append(
            [
                row["path"],
                f"{1000 * seconds['median']:.1f}",
                f"{1000 * seconds['p20']:.1f}-{1000 * seconds['p80']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['peak_bytes'] / 2**20:,.0f}",
                str(row.get("largest_batch", "-")),
                f"{row['first_loss']:.6f}",
                f"{ratio['seconds']:.2f}" if ratio else "-",
                f"{ratio['peak_bytes']:.2f}" if ratio else "-",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    ]
    return "\n".join(text + failed)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--task", choices=["classification", "masked-lm"], default="classification")
    parser.add_argument(
        "--size",
        choices=["large", "small", "tiny"],
        default="large",
        help="small: two teachers of MiniLM's shape; tiny: toys of two layers",
    )
    parser.add_argument("--batch", type=int, default=32, help="examples of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of an example")
    parser.add_argument("--steps", type=int, default=20, help="steps measured, after a warm-up")
    parser.add_argument("--config", default="zero0_auto", help="DeepSpeed config of the student")
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument(
        "--up-to", type=int, default=0, help="also steps of more examples, up to so many"
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out the paths that --output has"
    )
    # A path, in a child process; its --output is the folder of what all paths share.
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    keys = ("task", "size", "batch", "length", "steps", "config")
    setting = Setting(**{key: getattr(given, key) for key in keys})
    if given.alone:
        do_alone(given.alone, setting, given.output, given.up_to)
        return
    measured = compare(setting, given.paths, given.up_to, given.output, given.resume)
    print(table(measured))


if __name__ == "__main__":
    main()
