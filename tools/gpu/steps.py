"""The steps of run.py, by value: a GPU machine that is taken back early has done the first.

Limits are for a machine with 16 cores and one H100, which nothing was measured on so far: an
import with CUDA takes some 15 s, a Triton kernel 1 to 3 s to compile, torch.compile of a rival 10
to 20 s forward and backward, a 24-layer model some 10 s to make.
"""

from __future__ import annotations

import csv
import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

BENCHMARK = "kernels/benchmarks/run.py"
MODELS = "tools/benchmarks"
"""Where what 24-layer teachers, steps and builds cost is measured."""
SHARE_OF_CORES = 4
"""Cores for each of pytest's processes, which wait for Triton's compiler most of the time."""


@dataclass(frozen=True, eq=False)
class Step:
    name: str
    limit: int
    """Seconds after which it is stopped."""
    least: int
    """It does not start with fewer seconds left: all of it, or a first part of what it writes."""
    results: str
    """The file that it writes. It goes on with what an earlier call left there."""
    command: list[str]
    """Arguments of Python."""
    check: Callable[[Path], str] = lambda folder: ""
    """Of the results folder: a line for the summary. Raises ValueError where it is not good."""
    timed: bool = True
    """Whether it measures a time: nothing runs beside it."""


def steps(
    folder: Path, texts: Path, tokenizer: str, model: str | None = None, toy: bool = False
) -> list[Step]:
    """model: MiniLM, for the quickstart; a kit may lack it.
    toy: the same on a CPU, at sizes that show nothing but that each step works."""
    made = [
        *_kernel_steps(folder, toy),
        *_model_steps(folder, texts, tokenizer, toy),
        *([_quickstart(folder, model, toy, half) for half in ("bf16", "fp16")] if model else []),
        *_remaining_steps(folder, texts, tokenizer, toy),
    ]
    # Two cores that others use too take long to import alone.
    return [replace(step, limit=5 * step.limit) for step in made] if toy else made


# ------------------------------------------------------------------------------- kernels

TESTS = {
    # test_edges.py names no op where it tests masked_kl and its siblings.
    "masked_kl": "[{0}-kl or [{0}-reverse_kl or [{0}-js or [{0}-tv or "
    "(test_edges and {0} and not topk and not linear and not cosine)",
    "linear_kl": "[{0}-linear or ({0} and test_linear) or gpu_memory",
    "topk_kl": "[{0}-topk or ({0} and test_topk)",
}
"""pytest's -k for the tests of an op; {0}: the device."""


def _kernel_steps(folder: Path, toy: bool) -> list[Step]:
    device = "cpu" if toy else "cuda"
    made = [
        # Some 20 kernels in three dtypes, compiled in several processes.
        _tests(folder, f"tests-{op}", 150, 60, device, chosen.format(device))
        for op, chosen in TESTS.items()
    ]
    # Three vocabularies, at each a rival to compile and some 15 measurements of 0.15 s.
    for op in TESTS:
        made.append(_benchmark(folder, f"benchmark-{op}", 200, op, toy))
    return made


def _tests(
    folder: Path,
    name: str,
    limit: int,
    least: int,
    device: str,
    chosen: str,
    where: str = "tests/kernels",
) -> Step:
    command = ["-m", "pytest", "-q", where, "-k", chosen]
    command += [f"--junitxml={folder / name}.xml", "-p", "no:cacheprovider"]
    for elsewhere in ("test_interpreter.py", "test_gpu_compile.py", "test_torch_compile.py"):
        command += [f"--ignore=tests/kernels/{elsewhere}"]
    processes = (os.cpu_count() or 1) // SHARE_OF_CORES
    if processes > 1 and find_spec("xdist") is not None:
        command += ["-n", str(processes)]

    def check(folder: Path) -> str:
        return all_passed_on(device, folder / f"{name}.xml")

    return Step(name, limit, least, f"{name}.xml", command, check, timed=False)


def all_passed_on(device: str, file: Path) -> str:
    """device: part of the names of those that have to be among them. The tests themselves fail
    where an op on the GPU used the reference."""
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    names = [
        case.get("name", "") for case in suite.iter("testcase") if case.find("skipped") is None
    ]
    there = sum(device in name for name in names)
    if not there or counts["failures"] or counts["errors"]:
        raise ValueError(f"{counts}, {there} of them ran with {device}")
    return f"{counts['tests']} tests, {there} of them with {device}"


def _benchmark(folder: Path, name: str, limit: int, op: str, toy: bool) -> Step:
    """In bf16: the others are a step of their own, the last."""
    command = [BENCHMARK, "--resume", "--out", str(folder / f"{name}.csv"), "--seconds"]
    command += ["0.01", "--toy"] if toy else ["0.15"]
    if op:
        command += ["--only", op, "--dtype", "float32" if toy else "bfloat16"]
    file = folder / f"{name}.csv"
    return Step(name, limit, 60, file.name, command, lambda folder: ours_ran(file))


def ours_ran(file: Path) -> str:
    """Rivals may fail: that is a result."""
    with file.open(newline="") as table:
        rows = list(csv.DictReader(table))
    failed = [row for row in rows if row.get("failure")]
    own = [row for row in failed if row["path"] == "ds_kernels"]
    if own:
        raise ValueError(f"{own[0]['shape']} {own[0]['dtype']}: {own[0]['failure']}")
    rivals = sorted({row["path"] for row in failed})
    return f"{len(rows)} rows" + (f"; failed: {', '.join(rivals)}" if rivals else "")


# -------------------------------------------------------------------- teachers and steps


def _model_steps(folder: Path, texts: Path, tokenizer: str, toy: bool) -> list[Step]:
    read = ["--texts", str(texts), "--tokenizer", tokenizer]
    few = ["--examples", "24", "--length", "64", "--layers", "1", "--rounds", "1"]
    paths = ["live", "textbrewer", "cached", "labels"]
    return [
        # Four rounds of three paths: seconds each, but DeBERTa padded to 512.
        Step(
            "teacher-speed",
            240,
            60,
            "teacher-speed.json",
            [
                f"{MODELS}/teacher_speed.py",
                "--resume",
                *read,
                *(few if toy else ["--examples", "2048", "--rounds", "2"]),
                "--output",
                str(folder / "teacher-speed.json"),
            ],
        ),
        # Models written once, then each path in a process: import, load, 23 steps, larger batches.
        _distillation(folder, "step-classification", 300, 150, "classification", paths, toy),
        _distillation(folder, "step-masked-lm", 240, 100, "masked-lm", paths, toy),
        _one_engine(folder, 3, toy),
    ]


def _distillation(
    folder: Path,
    name: str,
    limit: int,
    least: int,
    task: str,
    paths: list[str],
    toy: bool,
    config: str = "zero0_auto",
) -> Step:
    file = folder / f"{name}.json"
    command = [f"{MODELS}/distillation_step.py", "--resume", "--task", task]
    command += ["--config", config, "--output", str(file), "--paths", *paths]
    small = ["--size", "tiny", "--batch", "4", "--length", "16", "--steps", "2"]
    command += small if toy else ["--up-to", "1024"]
    return Step(name, limit, least, file.name, command, lambda folder: no_path_failed(file))


def no_path_failed(file: Path) -> str:
    measured = json.loads(file.read_text())
    failed = [row for row in measured["paths"] if "error" in row]
    if failed:
        raise ValueError("; ".join(f"{row['path']}: {row['error']}" for row in failed))
    ratios = [
        f"{path} {ratio['seconds']}"
        for path, ratio in measured["of_live"].items()
        if path != "live"
    ]
    return f"time of live's: {', '.join(ratios)}"


def calls_beside_plain(file: Path) -> str:
    """Of the fewest texts, how much faster each way is than a teacher's layers as they are. Ways
    may fail: that is a result."""
    found = []
    for name, ways in json.loads(file.read_text())["teachers"].items():
        fewest = {way: next(iter(sizes.values())) for way, sizes in ways.items()}
        speeds = [f"{way} {row.get('times_as_fast', 'failed')}" for way, row in fewest.items()]
        found.append(f"{name} {', '.join(speeds)}")
    if not found:
        raise ValueError("no teacher takes packed views here")
    return "; ".join(found)


def _one_engine(folder: Path, stage: int, toy: bool) -> Step:
    """Three 24-layer teachers, live, with accumulation: where a step's time goes, and its memory,
    beside the plan's. They are made at random on one GPU: most of its time."""
    file = folder / f"one-engine-zero{stage}.json"
    command = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
    command += [f"{MODELS}/large_teachers.py"]
    shape = ["--batch", "2", "--length", "16", "--layers", "1"]
    command += shape if toy else ["--batch", "32", "--length", "128"]
    command += ["--micro-steps", "4", "--steps", "3" if toy else "8"]
    command += ["--config", f"zero{stage}_bf16", "--output", str(file)]
    return Step(file.stem, 180, 90, file.name, command, lambda folder: beside_the_plan(file))


def beside_the_plan(file: Path) -> str:
    measured = json.loads(file.read_text())
    plan = measured["planned"]
    if plan is None:
        return "no plan for this device, or for so few layers"
    seconds = min(step["seconds"] for step in measured["steps"])
    peak = max(rank["peak_bytes"] for rank in measured["ranks"])
    return (
        f"step {seconds:.3f} s, planned {plan['seconds']:.3f}; "
        f"{peak / 2**30:.1f} GiB, planned {plan['peak_bytes'] / 2**30:.1f}"
    )


def stages_agree(folder: Path) -> str:
    """The live path's first loss at stage 0 and 3: the same weights and batches, no dropout. What
    bf16 sums are rounded by may differ."""
    one, three = (folder / f"{name}.json" for name in ("step-classification", "two-engines"))
    if not one.is_file():
        return "no step at stage 0 to compare with"
    losses = [
        row["first_loss"]
        for file in (one, three)
        for row in json.loads(file.read_text())["paths"]
        if row["path"] == "live" and "error" not in row
    ]
    apart = abs(losses[0] - losses[-1]) / losses[0]
    if len(losses) < 2 or apart > 0.02:
        raise ValueError(f"first losses of stage 0 and 3: {losses}")
    return f"first losses of stage 0 and 3 are {apart:.2%} apart"


def _quickstart(folder: Path, model: str, toy: bool, half: str) -> Step:
    """Six trainings and a report; 4 minutes on two CPU cores that compute in bf16. What the student
    becomes is asked, not how fast: both halves and the tests run side by side."""
    file = folder / ("quickstart.json" if half == "bf16" else f"quickstart-{half}.json")
    command = ["tools/gpu/quickstart.py", model]
    if half != "bf16":  # which the recipe takes by itself
        command += [f"deepspeed=zero1_{'fp32' if toy else half}"]
    if toy:
        sizes = {"train": 16, "transfer": 16, "validation": 16, "test": 8}
        command += [f"task.data.per_class.{split}={size}" for split, size in sizes.items()]
        command += ["phases.control.per_class=8"]
    command += ["--output", str(file)]  # last: argparse takes positional arguments together
    return Step(file.stem, 400, 120, file.name, command, timed=False)


# ------------------------------------------------------------------------------ the rest


def _remaining_steps(folder: Path, texts: Path, tokenizer: str, toy: bool) -> list[Step]:
    device = "cpu" if toy else "cuda"
    read = ["--texts", str(texts), "--tokenizer", tokenizer]
    few = ["--examples", "8", "--length", "32", "--layers", "1"] if toy else []
    done = " or ".join(f"({chosen})" for chosen in TESTS.values()).format(device)
    packed = "tests/unit/test_packed.py" if toy else "tests/gpu/test_packed_on_gpu.py"
    text = ["--examples", "24", "--length", "32", "--layers", "1"] if toy else ["--copies", "7"]
    calls = ["--layers", "2", "--hidden", "64", "--sizes", "2", "--length", "16"] if toy else []
    made = [
        # 7 times the kit's texts are 40 MB: half a minute to ask, and as long to build.
        Step(
            "cache-build",
            300,
            110,
            "cache-build.json",
            [
                f"{MODELS}/build_speed.py",
                *read,
                *text,
                "--output",
                str(folder / "cache-build.json"),
            ],
        ),
        # Per teacher a model to make, a layer to compile, and 10 passes three ways at four sizes.
        Step(
            "teacher-calls",
            200,
            70,
            "teacher-calls.json",
            [
                f"{MODELS}/teacher_calls.py",
                "--resume",
                *calls,
                "--output",
                str(folder / "teacher-calls.json"),
            ],
            lambda folder: calls_beside_plain(folder / "teacher-calls.json"),
        ),
        replace(
            _distillation(
                folder,
                "two-engines",
                240,
                120,
                "classification",
                ["live", "two-engines"],
                toy,
                "zero3_auto",
            ),
            check=lambda folder: (
                f"{no_path_failed(folder / 'two-engines.json')}; {stages_agree(folder)}"
            ),
        ),
        _one_engine(folder, 1, toy),
        _tests(folder, "tests-packed", 120, 45, "packed", "packed", packed),
        # Per teacher five models of 24 layers, two of them asked in fp32.
        Step(
            "packed-fidelity",
            300,
            90,
            "packed-fidelity.json",
            [
                f"{MODELS}/packed_fidelity.py",
                "--resume",
                *read,
                *few,
                "--output",
                str(folder / "packed-fidelity.json"),
            ],
            timed=False,
        ),
        _tests(folder, "tests-others", 200, 60, device, f"{device} and not ({done})"),
    ]
    for op in ("masked_cosine", "attention_kl", "relation_kl"):
        made.append(_benchmark(folder, f"benchmark-{op}", 150, op, toy))
    return [*made, _benchmark(folder, "benchmark-all-dtypes", 540, "", toy)]
