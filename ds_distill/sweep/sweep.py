"""A sweep: runs of one recipe under several settings, each an ordinary run in a folder of its own.

FOLDER/sweep.json        the recipe of each run, and as files
FOLDER/recipes/NAME.yaml
FOLDER/shared/NAME       runs of the phases that several runs have in common
FOLDER/runs/NAME         the runs
FOLDER/logs/NAME.txt     what they print
FOLDER/results.json      scores by setting and seed; also in report.html and figures/
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ds_distill.check.check import check_all, check_settings, open_sources
from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.data.sources import Progress
from ds_distill.engine.config import deepspeed_config
from ds_distill.errors import Mistake, UserError, refuse
from ds_distill.files import new_folder, write_json, write_text
from ds_distill.planning.units import duration
from ds_distill.process import failures, lease
from ds_distill.process.launcher import ends_with, shell_code
from ds_distill.process.signals import STOPPED
from ds_distill.recipe import Recipe, dump_recipe
from ds_distill.recipe.training import Training
from ds_distill.records import read_object, read_results
from ds_distill.reporting.results import task_metric_of
from ds_distill.run.folder import SWEEP, RunFolder, changes
from ds_distill.sweep.found import Draws, drawn, run_result
from ds_distill.sweep.runs import SweepRun, Variant

WEIGHTS = ("models", "cache", "checkpoints", "student", "data")
"""Folders of a run, large ones, that are removed when it has ended, unless they are kept."""


@dataclass(frozen=True)
class Shared:
    """Phases that several runs have in common."""

    runs: list[SweepRun]
    phases: int
    folder: RunFolder

    @property
    def names(self) -> list[str]:
        return self.runs[0].recipe.phase_names()[: self.phases]

    @property
    def is_done(self) -> bool:
        """Whether the phases are done, or no run needs them any more."""
        done = self.folder.record(self.phases - 1, self.names[-1]).is_file()
        return done or all(run.folder.holds_run() for run in self.runs)

    def child(self, ranks: int | None) -> Child:
        name = f"shared,{self.folder.path.name}"
        return _child(name, self.runs[0], self.folder, ranks, "--until", self.names[-1])


class Sweep:
    def __init__(self, folder: Path, runs: list[SweepRun]) -> None:
        """folder: one that `check_folder` lets pass.

        Raises UserError for runs of the same recipe, which would count as two, and for a folder
        that holds another sweep."""
        self.path, self.runs = folder, runs
        self._recipes = {run.variant.name: run.recipe.as_written() for run in runs}
        seen: dict[str, str] = {}
        for name, recipe in self._recipes.items():
            first = seen.setdefault(json.dumps(recipe, sort_keys=True), name)
            if first != name:
                raise UserError(
                    f"{first} and {name} are the same run. Give each value once, and each key by "
                    "one name."
                )
        groups: list[dict[str, SweepRun]] = []
        written = self._recipes
        for name, run in zip(written, runs, strict=True):
            alike = (of for of in groups if shared_phases(written[next(iter(of))], written[name]))
            if (group := next(alike, None)) is None:
                groups.append(group := {})
            group[name] = run
        self.shared = [
            Shared(
                [*group.values()],
                shared_phases(*(written[name] for name in group)),
                RunFolder(folder / "shared" / next(iter(group))),
            )
            for group in groups
            if len(group) > 1
        ]
        if (file := folder / SWEEP).is_file():
            self._refuse_other(read_object(file, "Give another --folder.")["runs"], file)

    def _refuse_other(self, began: dict[str, Any], file: Path) -> None:
        """Raises UserError where the sweep began with other runs, or with recipes whose results
        differ: both would be pooled as one."""
        if other := sorted(began.keys() ^ self._recipes.keys()):
            raise UserError(
                f"--resume: {self.path} holds a sweep of other settings ({file}): only one of the "
                f"two has a run {other[0]}. Continue it with the same arguments, or give --folder."
            )
        refused = [
            str(change)
            for run in self.runs
            for change in changes(began[run.variant.name], self._recipes[run.variant.name])
            if not change.is_allowed({*range(len(run.recipe.phases))})
        ]
        if refused:
            raise UserError(
                f"--resume: the recipe differs from that of the sweep in {self.path} ({file}) in "
                f"{'; '.join([*dict.fromkeys(refused)][:3])}. Continue with the same recipe and "
                "arguments, or start a new sweep with --folder."
            )

    def check_ranks(self, ranks: int) -> None:
        """Raises UserError where the DeepSpeed config fixes what so many ranks would change."""
        for run in self.runs:
            for phase in run.recipe.phases:
                if isinstance(phase, Training):
                    deepspeed_config(run.recipe.deepspeed, phase, ranks, for_device=False)

    def begin(self) -> None:
        """Make the sweep's folder."""
        (self.path / "logs").mkdir(parents=True, exist_ok=True)
        for run in self.runs:
            write_text(run.file, dump_recipe(run.recipe))
        write_json(self.path / SWEEP, {"runs": self._recipes})

    def what_it_does(self) -> list[str]:
        """Lines that say what will be run."""
        done = sum(run.is_done for run in self.runs)
        lines = [f"{len(self.runs)} runs" + (f", {done} of them done before" if done else "")]
        alike: dict[str, list[int]] = {}  # by the phases: how many runs share them, of each group
        for shared in self.shared:
            alike.setdefault(", ".join(shared.names), []).append(len(shared.runs))
        for names, runs in alike.items():
            once = "once" if len(runs) == 1 else f"once in each of {len(runs)} groups"
            lines.append(f"{sum(runs)} of them share, and run {once}: {names}")
        return lines

    def run(self, pool: Pool, keep: bool, say: Callable[[str], None]) -> list[str]:
        """Run what is left. Returns the names of runs that failed.

        keep: the weights of models, and caches.
        """
        ranks = pool.ranks
        once = [one.child(ranks) for one in self.shared if not one.is_done]
        failed = self._run(once, pool, say, lambda name: "done")
        lost = set[str]()
        for shared in self.shared:
            for run in shared.runs:
                if shared.child(ranks).name in failed:
                    lost.add(run.variant.name)
                elif not run.folder.holds_run():
                    begin_from(shared.folder.path, run.folder.path, run.recipe)
        left = {run.variant.name: run for run in self.runs if not run.is_done}
        children = [_child(n, run, run.folder, ranks) for n, run in left.items() if n not in lost]
        failed += self._run(children, pool, say, lambda name: _ended(left[name], keep))
        if not keep and not failed:
            shutil.rmtree(self.path / "shared", ignore_errors=True)
        return failed

    def _run(
        self,
        children: list[Child],
        pool: Pool,
        say: Callable[[str], None],
        ended: Callable[[str], str],
    ) -> list[str]:
        """ended: called with the name of each that has ended well; says what it found."""

        def waiting(running: list[Child]) -> None:
            for child in running:
                say(f"  {child.name}: {last_phase(child.log) or 'starts'}")

        failed: list[str] = []
        taken = 0.0
        with closing(pool.run(children, waiting)) as ends:
            for number, (child, code, seconds) in enumerate(ends, 1):
                taken += seconds
                left = (len(children) - number) * taken / number / pool.jobs
                text = f"[{number}/{len(children)}] {child.name}: "
                if code:
                    failed.append(child.name)
                    text += f"failed with exit code {code}; {child.log} tells why"
                else:
                    text += f"{ended(child.name)}, {duration(seconds)}"
                say(text + (f" (about {duration(left)} left)" if left else ""))
        return failed

    def ended(self) -> dict[Variant, dict[str, Any]]:
        """`run_result` of each run that has ended."""
        done = [run for run in self.runs if run.is_done]
        return {run.variant: run_result(read_results(run.folder.results)) for run in done}

    def draws(self) -> Draws:
        """See `drawn`; each student's once, and only where it is asked for."""
        folders = {run.variant: run.folder.path for run in self.runs if run.is_done}
        return functools.cache(lambda variant, student: drawn(folders[variant], student))

    @property
    def missing(self) -> list[str]:
        """Names of the runs that have not ended."""
        return [run.variant.name for run in self.runs if not run.is_done]


def _ended(run: SweepRun, keep: bool) -> str:
    """What is said, and cleared away unless it is kept, when a run has ended well."""
    for one in () if keep else WEIGHTS:
        shutil.rmtree(run.folder.path / one, ignore_errors=True)
    found = run_result(read_results(run.folder.results))
    if found["student"] is None:
        return "done"
    score, metric = found["models"][found["student"]]["score"], task_metric_of(found)
    return f"{found['student']} {metric.title} {metric.shown_as(score)}"


def _child(name: str, run: SweepRun, folder: RunFolder, ranks: int | None, *options: str) -> Child:
    resume = ["--resume"] if folder.holds_run() else []
    command = ["run"] if ranks is None else ["launch", "--num-gpus", str(ranks)]
    whole = (*command, str(run.file), "--folder", str(folder.path), *options, *resume)
    return Child(name, whole, run.sweep / "logs" / f"{name}.txt")


_MODELS_AND_DATA = {"task", "tasks", "data_folder", "teachers", "student", "models_folder"}


def check_runs(runs: Sequence[SweepRun], progress: Progress | None = None) -> list[str]:
    """Notes. Raises UserError with all that is wrong: models and data are looked at once for runs
    that have the same. A message names the recipe and settings, of all but a lone recipe's first
    run.

    progress: as of `open_source`.
    """
    notes: dict[str, list[str]] = {}  # what there is to say -> of which runs
    mistakes: list[Mistake] = []
    checked = set[str]()
    recipes = {run.variant.recipe for run in runs}
    models, given = {run.variant.model for run in runs}, {run.variant.setting for run in runs}
    chooses = len(recipes) > 1 and len(given) > len(models)
    for run in runs:
        recipe, variant = run.recipe, run.variant
        words = [variant.recipe, *(() if run is runs[0] else variant.overrides)]
        name = " ".join(filter(None, words))
        read = recipe.model_dump_json(include=_MODELS_AND_DATA)
        try:
            if read in checked:
                check_settings(recipe)
                continue
            checked.add(read)
            for note in check_all(recipe, progress):
                notes.setdefault(note, []).append(name)
            if chooses:
                _check_choosing(recipe)
        except UserError as error:
            mistakes += (Mistake(name, str(mistake)) for mistake in error.mistakes)
    refuse(mistakes)
    found = notes.items()
    return [what if "" in where else f"{', '.join(where)}: {what}" for what, where in found]


def _check_choosing(recipe: Recipe) -> None:
    for name, source in open_sources(recipe).items():
        if CHOOSING_SPLIT not in source.splits:
            raise UserError(
                f"its data {recipe.tasks_by_name[name].data.path} have no split "
                f"{CHOOSING_SPLIT!r}, on which a setting is chosen, because the test split must "
                f"not choose. Say where it is with data.splits.{CHOOSING_SPLIT}."
            )


TOLD = {"name", "task", "split", "splits", "teachers", "follow", "models", "save_as", "start"}
"""Keys of later phases by which earlier ones find what to make: which examples choose, which caches
are read."""

LINKED = {"models", "cache"}
"""Folders of a run whose files no later phase changes."""


def shared_phases(first: dict[str, Any], *others: dict[str, Any]) -> int:
    """How many phases, from the first one, recipes as written run alike, so that one may run them
    for all."""
    alike = len(first["phases"])
    for change in (change for other in others for change in changes(first, other)):
        match change.key:
            case ("name" | "description" | "training", *_):
                pass  # what phases take of `training` stands in them
            case ("phases", number, _, key, *_) if key not in TOLD:
                alike = min(alike, int(number))
            case _:
                return 0
    return alike


def begin_from(shared: Path, folder: Path, recipe: Recipe) -> None:
    """Make a run's folder in which the phases are done that a run in `shared` did. Models and
    caches are linked, and take no space again."""

    def copy(source: str, target: str) -> None:
        inside = Path(source).relative_to(shared).parts[0]
        try:
            if inside in LINKED:
                os.link(source, target)
                return
        except OSError:  # a file system without links
            pass
        shutil.copy2(source, target)

    left_out = shutil.ignore_patterns(lease.NAME, failures.FOLDER, "recipe.yaml", ".*")
    with new_folder(folder) as aside:
        shutil.copytree(
            shared, aside, copy_function=copy, ignore=left_out, symlinks=True, dirs_exist_ok=True
        )
        write_text(aside / "recipe.yaml", dump_recipe(recipe))


TELLS_EVERY = 60
"""Seconds between lines that say what runs."""

GRACE = 20
"""Seconds that runs have to end, all the same ones, after they were told to."""


@dataclass(frozen=True)
class Child:
    """A run, by the command that does it."""

    name: str
    arguments: tuple[str, ...]
    """Of `ds-distill`."""
    log: Path
    """What it prints."""


class Pool:
    """Runs children side by side. They end when this process does."""

    def __init__(self, jobs: int, gpus: Sequence[str] = (), ranks: int | None = None) -> None:
        """
        jobs: how many at once. They share the cores; where there are GPUs each has one.
        gpus: as CUDA_VISIBLE_DEVICES names them.
        ranks: of each child, which is a launch then; see `launches_at_once`.
        """
        self.jobs, self.gpus, self.ranks = jobs, gpus, ranks
        self._running: dict[int, tuple[Child, subprocess.Popen[bytes]]] = {}
        self._ends, self._starts = False, threading.RLock()
        self._slots = SimpleQueue[int]()
        for slot in range(jobs):
            self._slots.put(slot)

    def run(
        self, children: Sequence[Child], waiting: Callable[[list[Child]], None]
    ) -> Generator[tuple[Child, int, float]]:
        """(child, exit code, seconds) as each ends. waiting: called with those that run, where none
        has ended for TELLS_EVERY seconds."""
        with ThreadPoolExecutor(self.jobs) as threads:
            left = {threads.submit(self._run, child) for child in children}
            try:
                while left:
                    done, left = wait(left, TELLS_EVERY, FIRST_COMPLETED)
                    if not done:
                        waiting([child for child, _ in [*self._running.values()]])
                    yield from (each.result() for each in done)
            finally:
                if left:  # a mistake of ours: the threads would see the others through
                    self.end(at_once=True)

    def _run(self, child: Child) -> tuple[Child, int, float]:
        slot, began = self._slots.get(), time.monotonic()
        try:
            with self._starts, open(child.log, "ab") as log:
                if self._ends:
                    return child, STOPPED, 0.0
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ds_distill", *child.arguments],
                    env=self.environment(slot),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=ends_with(os.getpid()),  # and when this thread does, which waits
                )
                self._running[slot] = child, process
            code = shell_code(process.wait())
            del self._running[slot]
            return child, code, time.monotonic() - began
        finally:
            self._slots.put(slot)

    def environment(self, slot: int) -> dict[str, str]:
        """Of the child that runs in a slot, from 0 to `jobs` - 1."""
        environment = dict(os.environ)
        each = self.ranks or 1
        if self.gpus:
            first = slot * each % len(self.gpus)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[first : first + each])
        if self.jobs > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // (self.jobs * each))
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        return environment

    def end(self, at_once: bool) -> bool:
        """End what runs, and say whether a run has saved its work; see `exit_on_signal`."""
        with self._starts:
            self._ends = True
        running = [process for _, process in [*self._running.values()]]
        for process in running:  # all of them first: each trains on until it is asked
            process.kill() if at_once else process.terminate()
        until, codes = time.monotonic() + GRACE, set[int]()
        for process in running:
            try:
                codes.add(process.wait(max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
        return STOPPED in codes


def launches_at_once(jobs: int, ranks: int, gpus: Sequence[str]) -> int:
    """How many launches of so many ranks run side by side: up to `jobs`, no more than have a GPU
    for each rank, or without GPUs a core.

    Raises UserError where there are GPUs, and too few for one.
    """
    if gpus and ranks > len(gpus):
        raise UserError(
            f"--num-gpus {ranks}: each run would have so many ranks, and this machine has "
            f"{len(gpus)} GPUs. Give a smaller number."
        )
    return max(1, min(jobs, len(gpus or os.sched_getaffinity(0)) // ranks))


def last_phase(log: Path) -> str:
    """The last line of a run's output that begins a phase, such as `[2/6] distil`."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.startswith("[") and "/" in line), "")
