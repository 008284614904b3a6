"""A run's folder, through which phases pass models and records to each other."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from ds_distill.errors import UserError, short
from ds_distill.files import (
    publish_folder,
    refuse_links_out,
    why_unwritable,
    write_json,
    write_text,
)
from ds_distill.process import failures, lease
from ds_distill.process.identity import LAUNCHED, STOP
from ds_distill.process.signals import STOPPED, same_command
from ds_distill.recipe import Recipe, dump_recipe, load_recipe
from ds_distill.recipe.phases import PHASES, Cache
from ds_distill.recipe.schema import Teacher
from ds_distill.recipe.section import Section
from ds_distill.recipe.text import one_line
from ds_distill.recipe.training import Training
from ds_distill.records import TrainedModel, read_object, read_record

TRAINING_RECORD = "training.json"
"""Beside a trained model's weights: examples, steps, validation scores."""

SWEEP = "sweep.json"
"""Of a folder that holds a sweep: the recipe of each run, which are in its folder runs/."""

BEFORE_A_RUN = {*(".recipe.yaml.tmp", lease.NAME, failures.FOLDER), *(LAUNCHED, STOP)}
"""What a start may leave in a folder that holds no run yet: a launch's order to its ranks, and what
a kill leaves, or a rank's failure."""

Resume = bool | Literal["auto"]
"""Whether a start goes on with the run in its folder; "auto": where there is one."""


class RunFolder:
    """Paths and records of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / "results.json"
        self.report = path / "report.html"
        self.student = path / "student"
        self.environment = path / "environment.json"
        self.inputs = path / "inputs.json"
        self.teacher_scores = path / "teachers.json"

    def data(self, task: str | None) -> Path:
        """The folder of a task's splits. task: its name; None for the only one."""
        return self.path / "data" if task is None else self.path / "data" / task

    def fitted(self, task: str | None) -> Path:
        """What an expertise phase has fitted on a task."""
        return self.path / (f"routing-{task}.safetensors" if task else "routing.safetensors")

    def comparison(self, task: str | None) -> Path:
        """The comparison of policies on a task."""
        return self.path / (f"routing-{task}.json" if task else "routing.json")

    def holds_run(self) -> bool:
        return (self.path / "recipe.yaml").is_file()

    def goes_on(self, resume: Resume) -> bool:
        return self.holds_run() if resume == "auto" else resume

    def check_new_or_same(self, recipe: Recipe, resume: Resume) -> None:
        """Raises UserError for a folder of another run, for one that a run has at the moment (which
        "auto" waits for, see `leased`), for one with a link out of it, and for a resume with
        another recipe."""
        written = self.path / "recipe.yaml"
        if self.path.is_dir():
            refuse_links_out(self.path)
            if resume != "auto":
                lease.check_free(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(
                f"--folder {self.path}: is a file, and a run needs a folder. Name another one."
            )
        if (why := why_unwritable(self.path)) is not None:
            raise UserError(f"--folder {self.path}: {why}. Name another folder.")
        if not self.goes_on(resume):
            present = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
            begun = {name for name in present if name.startswith(f"{LAUNCHED}.")}
            if found := sorted(present - BEFORE_A_RUN - begun):
                what = "holds a run" if written.is_file() else f"holds {found[0]}"
                fix = "Add --resume to continue that run, " if written.is_file() else "Give "
                raise UserError(
                    f"the run's folder {self.path} exists and {what}. {fix}--folder for another "
                    "one, or remove it."
                )
            return
        if not written.is_file():
            raise UserError(
                f"--resume: {self.path} holds no recipe.yaml, so there is no run to continue. "
                "Start it without --resume, or name the run's folder with --folder."
            )
        refused = [c for c in self.changes(recipe) if not c.is_allowed(self._done(recipe))]
        if refused:
            raise UserError(
                f"--resume: the recipe differs from the run's own ({written}) in "
                f"{'; '.join(map(str, refused[:3]))}. Continue with the same recipe and overrides, "
                "or start a new run with --folder. docs/launching.md lists what may change."
            )

    def changes(self, recipe: Recipe) -> list[Change]:
        """What a recipe has otherwise than the run that is there; nothing without one."""
        if not self.holds_run():
            return []
        old = load_recipe(str(self.path / "recipe.yaml"))
        return list(changes(old.as_written(), recipe.as_written()))

    def _done(self, recipe: Recipe) -> set[int]:
        names = enumerate(recipe.phase_names())
        return {number for number, name in names if self.record(number, name).is_file()}

    def check_seen(self, rank: int) -> None:
        """Raises UserError where a rank's host does not see the folder that rank 0 has made."""
        for _ in range(50):  # network file systems show new files late
            if self.holds_run():
                return
            time.sleep(0.1)
        raise UserError(
            f"--folder {self.path}: rank {rank} on {socket.gethostname()} does not see the run "
            "that rank 0 has begun there. Name a folder on a file system that all hosts share."
        )

    def how_to_continue(self, *options: str) -> str:
        """A sentence for a stopped run: what is saved, and the command to continue, with
        `options`."""
        if not self.holds_run():
            return f"Nothing was written. Start again with: {same_command()}"
        return f"{self._saved()}. Continue with: {same_command(*options)}"

    def progress(self, recipe: Recipe) -> Callable[[], bool]:
        """A question to be asked later: whether a later start goes on from more than one would
        now."""
        before = self._saved_work(recipe)
        return lambda: bool(self._saved_work(recipe) - before)

    def _saved_work(self, recipe: Recipe) -> set[tuple[Path, int]]:
        """Records of phases, trained models, checkpoints, and caches with what was written."""
        of_run = ("phases/*.json", f"models/*/{TRAINING_RECORD}", "checkpoints/*/step-*")
        found = {(path, 0) for pattern in of_run for path in self.path.glob(pattern)}
        for number, (name, phase) in enumerate(recipe.named_phases()):
            if isinstance(phase, Cache):
                cache = phase.shared or self.cache(number, name)
                found |= {(path, 0) for path in cache.glob("*/shard-*.arrow")}
                # It is written anew when a build ends.
                found |= {(path, path.stat().st_mtime_ns) for path in cache.glob("manifest.json")}
        return found

    def check_finished(self) -> None:
        """Raises UserError for a run that has not finished, where it is for other commands."""
        if not self.results.is_file():
            raise UserError(f"{self.path}: this run has not finished. {self.how_to_finish()}")

    def status(self) -> tuple[int, str]:
        """An exit code, and sentences: 0 of a finished run, 3 of one that runs, 75 of one that can
        go on, and of one that failed its own. Raises UserError where there is none."""
        try:
            lease.check_free(self.path)
        except lease.Locked as error:
            return 3, str(error)
        failure = failures.first_failure(self.path)
        if failure is None and self.results.is_file():
            return 0, f"{self.path}: finished. See {self.report}."
        if failure is None and not self.holds_run():
            raise UserError(f"{self.path}: holds no run. Name the folder of one.")
        what = "it was killed" if failure is None else str(failure).rstrip(".")
        code = STOPPED if failure is None else failure.exit_code
        return code, f"{self.path}: not finished: {what}. {self.how_to_finish()}"

    def how_to_finish(self) -> str:
        """As `how_to_continue`, for other commands than the run's own."""
        run = ["ds-distill", "run", str(self.path / "recipe.yaml"), "--folder", str(self.path)]
        return f"{self._saved()}. Continue with: {shlex.join([*run, '--resume'])}"

    def _saved(self) -> str:
        done = ", ".join(path.stem[3:] for path in sorted((self.path / "phases").glob("*.json")))
        newest = [
            (folder.name[3:], max(int(step.name.removeprefix("step-")) for step in steps))
            for folder in sorted((self.path / "checkpoints").glob("*"))
            if (steps := list(folder.glob(f"step-{'[0-9]' * 8}")))
        ]
        steps_saved = ", ".join(f"{output} at step {step}" for output, step in newest)
        saved = [f"the phases {done}"] * bool(done)
        saved += [f"the checkpoint of {steps_saved}"] * bool(steps_saved)
        return f"{self.path} keeps {' and '.join(saved) or 'what was written'}"

    def create(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Create the folder, or begin again in one.

        environment: of this start. It stands in environment.json, behind those before it in
            `starts`, with the number of phases that were `done`, and with `changes`: the keys of
            the recipe that it has otherwise than the start before.

        Raises UserError when that fails, and leaves nothing behind.
        """
        new = not self.holds_run()
        changed = [change.to_json() for change in self.changes(recipe)]
        try:
            # First: with it the folder holds a run.
            write_text(self.path / "recipe.yaml", dump_recipe(recipe))
            start = {**environment, "done": len(self._done(recipe)), "changes": changed}
            starts = [*self.read_environment().get("starts", []), start]
            write_json(self.environment, {**environment, "starts": starts})
        except OSError as error:
            if new:
                (self.path / "recipe.yaml").unlink(missing_ok=True)
            raise self._unwritable(error) from error

    @contextmanager
    def leased(self, on_lost: Callable[[str], None], *, waits: bool) -> Iterator[None]:
        """Inside this block this process alone writes to the folder; see `lease.leased`."""
        with ExitStack() as held:
            try:
                held.enter_context(lease.leased(self.path, on_lost, waits=waits))
            except OSError as error:
                raise self._unwritable(error) from error
            yield

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"--folder {self.path}: the run's folder cannot be written: "
            f"{error.strerror or error}. Free some space, or name another folder."
        )

    def model(self, number: int, output: str) -> Path:
        """The folder of the model `output` that phase `number` trains."""
        return self.path / "models" / f"{number:02d}-{output}"

    def checkpoints(self, number: int, training: str) -> Path:
        return self.path / "checkpoints" / f"{number:02d}-{training}"

    def from_here(self, path: Path) -> str:
        """A path as results have it: from this folder where it lies in it, which may be moved, and
        its results published."""
        inside = path.is_relative_to(self.path)
        return str(path.relative_to(self.path) if inside else path)

    def cache(self, number: int, name: str) -> Path:
        """The folder of cache phase `number`, unless the recipe names another one."""
        return self.path / "cache" / f"{number:02d}-{name}"

    def record(self, number: int, name: str) -> Path:
        """The file with the results of a phase. It exists once the phase is done."""
        return self.path / "phases" / f"{number:02d}-{name}.json"

    def predictions(self, number: int, name: str) -> Path:
        """What the models of an evaluation predict."""
        return self.path / "predictions" / f"{number:02d}-{name}.safetensors"

    def read_record(self, number: int, name: str) -> dict[str, Any] | None:
        path = self.record(number, name)
        return read_record(path) if path.is_file() else None

    def records(self, recipe: Recipe) -> list[dict[str, Any]]:
        """Of the phases that are done, in order."""
        found = (self.read_record(number, name) for number, name in enumerate(recipe.phase_names()))
        return [record for record in takewhile(bool, found) if record is not None]

    def kept(self, number: int, training: str, epoch: int) -> Path:
        """The folder of the models after an epoch, from 0, that may be the best. Which one is, a
        checkpoint says: a kill before it leaves the weights that the last one names."""
        return self.checkpoints(number, training) / "kept" / f"epoch-{epoch + 1:04d}"

    def forget_models(self, number: int, training: str, but: Collection[int]) -> None:
        """Remove the models of all epochs but those that checkpoints name. Main process."""
        wanted = {self.kept(number, training, epoch).name for epoch in but}
        for folder in (self.checkpoints(number, training) / "kept").glob("*"):
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)

    def publish_models(
        self, number: int, training: str, epoch: int, records: Mapping[str, dict[str, Any]]
    ) -> None:
        """Make the models of an epoch the training's results, beside their records, and remove the
        checkpoints. After a kill between two of them the training goes on from its last checkpoint,
        and comes to the same. Main process.

        records: by output.
        """
        for output, record in records.items():
            kept, model = self.kept(number, training, epoch) / output, self.model(number, output)
            if not (model / TRAINING_RECORD).is_file():
                write_json(kept / TRAINING_RECORD, record)
                model.parent.mkdir(exist_ok=True)
                publish_folder(kept, model)
        self._forget_checkpoints(number, training)

    def finished_training(
        self, number: int, training: str, outputs: Sequence[str]
    ) -> list[TrainedModel] | None:
        """The records of a training that ended before a kill, or None. Main process."""
        records = [self.model(number, output) / TRAINING_RECORD for output in outputs]
        if not all(one.is_file() for one in records):
            return None
        self._forget_checkpoints(number, training)
        fix = "Remove that folder, and the model is trained again."
        return [read_object(record, fix) for record in records]

    def read_environment(self) -> dict[str, Any]:
        """environment.json; empty where no run has begun."""
        return self._read(self.environment, {})

    def read_teacher_scores(self) -> list[dict[str, Any]]:
        """teachers.json."""
        return self._read(self.teacher_scores, [])

    def _read(self, file: Path, nothing: Any) -> Any:
        fix = "Remove that file: it is written again."
        return read_object(file, fix) if file.is_file() else nothing

    def _forget_checkpoints(self, number: int, training: str) -> None:
        shutil.rmtree(self.checkpoints(number, training), ignore_errors=True)
        parent = self.path / "checkpoints"
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


def run_of(student: Path) -> Path | None:
    """The run whose student is meant: its folder, or student/ in it; None where it is no run's."""
    for folder in (student, student.parent):
        if (folder / "recipe.yaml").is_file() and student in (folder, folder / "student"):
            return folder
    return None


def student_folder(folder: str | Path) -> Path | None:
    """The student of a run's folder; None where it is none. Raises UserError for a run that has no
    student."""
    path = Path(folder).expanduser()
    if not (path / "recipe.yaml").is_file() or (path / "config.json").is_file():
        return None
    if not (path / "student").is_dir():
        why = why_no_models(path) or "this run has ended without a student. Name a model's folder."
        if not RunFolder(path).results.is_file():
            why = (
                "this run has no student yet. Finish it (ds-distill run ... --resume), or name a "
                "model's folder."
            )
        raise UserError(f"{folder}: {why}")
    return path / "student"


def why_no_models(run: Path) -> str | None:
    """Why a finished run has no models, and what to do; None where it is no run of a sweep that
    kept none."""
    if (run / "models").is_dir() or not (run.absolute().parent.parent / SWEEP).is_file():
        return None
    return (
        "it is a run of a sweep, which kept no models. Start the sweep with --keep in another "
        "--folder, or run this one alone: "
        f"{shlex.join(['ds-distill', 'run', str(run / 'recipe.yaml'), '--folder'])} FOLDER."
    )


STAGES = re.compile(r"zero[0-3]_(\w+)")
"""Built-in DeepSpeed configs. Those of one precision differ in the stage, and so in how weights are
spread over ranks."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs."""

    key: tuple[str, ...]
    was: Any
    now: Any

    def __str__(self) -> str:
        was, now = (short(value, one_line) for value in (self.was, self.now))
        return f"{'.'.join(self.key)} (was {was}, now {now})"

    def to_json(self) -> dict[str, Any]:
        return {"key": ".".join(self.key), "was": self.was, "now": self.now}

    def is_allowed(self, done: set[int]) -> bool:
        """done: numbers of the phases that have ended, whose settings stay."""
        section: type[Section] = Recipe
        match self.key:
            case ("deepspeed",):
                configs = [STAGES.fullmatch(name) for name in (self.was, self.now)]
                return all(configs) and len({found.group(1) for found in configs if found}) == 1
            case ("teachers", _, name, *_):
                section = Teacher
            case ("training", name, *_):  # what phases take of it stands in them, too
                section = Training
            case ("phases", number, kind, name, *_) if int(number) not in done:
                section = PHASES[kind]
            case (name, *_):
                pass
        return section.may_change(name)


def _names(phases: list[dict[str, Any]]) -> list[str]:
    """Of phases as a recipe has them, with their kinds where these are others."""
    found = [(kind, settings["name"]) for phase in phases for kind, settings in phase.items()]
    return [kind if name in (None, kind) else f"{name} ({kind})" for kind, name in found]


def changes(old: Any, new: Any, key: tuple[str, ...] = ()) -> Iterator[Change]:
    """The innermost keys that differ."""
    if key == ("phases",) and (was := _names(old)) != (now := _names(new)):
        yield Change(key, was, now)  # settings of other phases are not compared
    elif isinstance(old, dict) and isinstance(new, dict):
        for inner in {**old, **new}:
            yield from changes(old.get(inner), new.get(inner), (*key, str(inner)))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from changes(before, after, (*key, str(index)))
    elif old != new:
        yield Change(key, old, new)
