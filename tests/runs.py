"""Runs under test: started, stopped at a moment, continued; and what must come out the same."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import pty
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
import yaml
from processes import Process, events, kill_all, left_of, marked, prepare, read_all
from ranks import run_ranks
from typer.testing import CliRunner, Result
from warm import Fork, Warm

from ds_distill import Recipe, load_recipe, run_recipe
from ds_distill.cli import app
from ds_distill.files import read_json

SETTINGS = ["training.epochs=3", "training.dropout=0.2", "training.save_every=4", "logging.every=1"]
"""Dropout needs the generators' state; checkpoints also fall inside epochs."""

STEPS = 12
"""Of a training that is compared on one rank and on two: on two, a step at stage 3 takes six times
as long as in one process."""

DS_DISTILL = [sys.executable, "-P", "-m", "ds_distill"]
"""As the console script: the working folder is not on Python's path."""

NOTHING: Mapping[str, str] = MappingProxyType({})

Moment = Callable[[Path], bool]
"""Whether to kill now, given the run's folder."""


class Runs:
    """Starts runs of one recipe, alone or on two ranks, and stops them."""

    def __init__(
        self, recipe: Path, warm: Warm, ranks: int | None, more: Mapping[str, str] = NOTHING
    ) -> None:
        """more: of the environment."""
        self.arguments = ["launch" if ranks else "run", str(recipe), *SETTINGS]
        self.arguments += ["--num-gpus", str(ranks)] if ranks else []
        self.environment = {**warm.environment, **marked(), **more}
        self._warm = warm
        self._forks: list[Fork] = []

    def start(self, folder: Path, resume: bool, terminal: int | None = None) -> Process | Fork:
        more = ["--folder", str(folder), *(["--resume"] if resume else [])]
        return self.begin(folder.parent, *more, terminal=terminal)

    def begin(self, cwd: Path, *more: str, terminal: int | None = None) -> Process | Fork:
        """A fork, or a process of its own where it starts others. terminal: one for it to have; its
        output goes there."""
        arguments = [*self.arguments, *more]
        if not {"--num-gpus", "--hostfile"} & {*arguments}:
            fork = self._warm.start(arguments, cwd, self.environment, together=True)
            self._forks.append(fork)
            return fork
        return subprocess.Popen(
            [*DS_DISTILL, *arguments],
            env=self.environment,
            cwd=cwd,
            start_new_session=True,
            # Heeded also where whoever started the tests has SIGINT ignored.
            preexec_fn=partial(prepare, terminal),
            text=True,
            stdin=terminal,
            stdout=terminal or subprocess.PIPE,
            stderr=terminal or subprocess.STDOUT,
        )

    def finish(self, folder: Path, resume: bool = False) -> None:
        process = self.start(folder, resume)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output

    def kill(self, folder: Path, moment: Moment, resume: bool) -> bool:
        """Start or resume a run and kill all its processes at a moment; False if it ended first."""
        process = self.start(folder, resume)
        try:
            return self._until(moment, process, folder)
        finally:
            kill_all(process)

    def stop(
        self,
        folder: Path,
        moment: Moment,
        resume: bool,
        send: Callable[[Process | Fork], None],
        seconds: float = 60,
    ) -> tuple[int, str]:
        """Start or resume a run and send it something at a moment that makes it end: its exit
        code and output. seconds: until then."""
        process = self.start(folder, resume)
        try:
            assert self._until(moment, process, folder), "the run ended too early"
            send(process)
            output, _ = process.communicate(timeout=seconds)
        finally:
            kill_all(process)
        return process.returncode, output

    def press(self, folder: Path, moment: Moment, resume: bool, keys: bytes) -> tuple[int, str]:
        """The same, on a terminal where keys are pressed."""
        ours, its = pty.openpty()
        process = self.start(folder, resume, its)
        os.close(its)
        shown: list[bytes] = []
        reader = threading.Thread(target=read_all, args=[ours, shown])
        reader.start()
        try:
            assert self._until(moment, process, folder), b"".join(shown).decode()
            os.write(ours, keys)
            process.wait(timeout=60)
        finally:
            kill_all(process)
            reader.join()
            os.close(ours)
        return process.returncode, b"".join(shown).decode()

    def continue_with(self, folder: Path) -> str:
        """The line that a stopped run prints."""
        command = ["ds-distill", *self.arguments, "--folder", str(folder), "--resume"]
        return f"Continue with: {shlex.join(command)}\n"

    def left(self) -> list[psutil.Process]:
        """Processes that have not ended, of all that it has started and of what these started."""
        return [*left_of(self.environment), *(one for fork in self._forks for one in fork.left())]

    @staticmethod
    def _until(moment: Moment, process: Process | Fork, folder: Path) -> bool:
        while process.poll() is None:
            if moment(folder):
                return True
            time.sleep(0.0005)
        assert process.returncode == 0, process.communicate()[0]
        return False


# ----------------------------------------------------------------------------------- moments


def after_steps(count: int, delay: float) -> Moment:
    """Some milliseconds after `count` more optimizer steps than the folder knew at first."""
    sizes: list[int] = []

    def now(folder: Path) -> bool:
        file = folder / "metrics.jsonl"
        size = file.stat().st_size if file.is_file() else 0
        if not sizes or size < sizes[-1]:  # the resumed run dropped events after its checkpoint
            sizes[:] = [size, steps(folder)]
        if size == sizes[0] or steps(folder) < sizes[1] + count:
            return False
        time.sleep(delay)
        return True

    return now


def steps(folder: Path) -> int:
    return sum(event["event"] == "train" for event in events(folder))


def writing_a_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*/.step-*.tmp"))


def end_of_a_phase(folder: Path) -> Moment:
    """As soon as one more phase has left its record."""
    before = len(records(folder))
    return lambda folder: len(records(folder)) > before


def records(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "phases").glob("*.json"))


def is_between_phases(folder: Path) -> bool:
    """No event of a phase after the last that has its record."""
    done = len(records(folder))
    return done > 0 and all(event["number"] < done for event in events(folder))


# ---------------------------------------------------------------------------------- what counts


def digests(folder: Path) -> dict[str, str]:
    """Every weights file that a run leaves."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for part in ("models", "student", "cache")
        for path in sorted((folder / part).rglob("*"))
        if path.suffix in (".safetensors", ".arrow")
    }


def curves(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (event["number"], event["phase"], event["step"], event["loss"], event["learning_rate"])
        for event in events(folder)
        if event["event"] == "train"
    ]


def others(folder: Path) -> list[tuple[Any, ...]]:
    """The other events, without times, and without the starts: a resume tells a phase's anew."""
    names = ("step", "epoch", "accuracy", "model")
    return [
        (event["event"], event["number"], event["phase"], *(event.get(name) for name in names))
        for event in events(folder)
        if event["event"] not in ("train", "start")
    ]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def check_same(folder: Path, whole: Path) -> None:
    # Two teachers, two students, the shipped one; the shards of two teachers, and their index.
    assert len(digests(whole)) == 5 + 3
    assert digests(folder) == digests(whole)
    assert curves(folder) == curves(whole)
    assert others(folder) == others(whole)
    assert files(folder) == files(whole), "a kill left something behind"
    scores = [
        {name: model["accuracy"] for name, model in phase["models"].items()}
        for run in (folder, whole)
        for phase in read_json(run / "results.json")["phases"]
        if "models" in phase
    ]
    assert scores[0] == scores[1]
    builds = [read_json(run / "phases" / "03-cache.json") for run in (folder, whole)]
    assert all(set(build["fidelity"]) == {"first", "second"} for build in builds)
    assert without_measures(builds[0]) == without_measures(builds[1])


def without_measures(record: Mapping[str, Any]) -> dict[str, Any]:
    """A phase's record without what no two runs have alike: time and memory."""
    return {name: of for name, of in record.items() if name not in ("seconds", "peak_bytes")}


def losses(folder: Path, training: str) -> list[float]:
    """Of each logged step of a run's training."""
    return [event["loss"] for event in logged(folder, "train", training)]


def logged(folder: Path, event: str, phase: str | None = None) -> list[dict[str, Any]]:
    """A run's events of a kind. phase: of one phase, or of a model, alone."""
    of_kind = [one for one in events(folder) if one["event"] == event]
    return [one for one in of_kind if phase in (None, one["phase"])]


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / "results.json")
    return found


def evaluation(folder: Path) -> dict[str, Any]:
    """The record of a run's only evaluate phase."""
    [record] = (r for r in results(folder)["phases"] if r["kind"] == "evaluate")
    return dict(record)


# --------------------------------------------------------------------------- one rank and two


def written(settings: dict[str, Any], folder: Path, name: str = "recipe") -> Path:
    """A recipe's file."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder / f"{name}.yaml"


def loaded(settings: dict[str, Any], folder: Path, *overrides: str) -> Recipe:
    """A recipe, from a file of it."""
    return load_recipe(written(settings, folder), overrides)


def run_here(settings: dict[str, Any], root: Path, *overrides: str) -> Path:
    """The folder of a run of a recipe in this process."""
    run_recipe(loaded(settings, root, *overrides), root / "run")
    return root / "run"


def command_line(*arguments: str | Path, code: int | None = 0) -> Result:
    """`ds-distill` in this process, which must end with `code`, if given; its errors are raised."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code in (None, result.exit_code), result.output
    return result


# ------------------------------------------------------------------- interrupted in this process


class Interrupted(Exception):
    """In place of a kill."""


@contextmanager
def interrupted(
    owner: Any, name: str, when: Callable[..., Any] = lambda *_, **__: True
) -> Iterator[None]:
    """A run within it ends before the first call of a function for which `when` holds."""
    function = getattr(owner, name)

    def called(*given: Any, **named: Any) -> Any:
        if when(*given, **named):
            raise Interrupted
        return function(*given, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(owner, name, called)
        yield


def after_calls(count: int, of: Callable[..., Any] = lambda *_: True) -> Callable[..., bool]:
    """For `interrupted`: after so many calls of those for which `of` holds."""
    calls = itertools.count()
    return lambda *given, **_: bool(of(*given)) and next(calls) >= count


RANKS = """
import os, sys
from pathlib import Path

from ds_distill import load_recipe, run_recipe
from ds_distill.evaluation import bootstrap

marked = bootstrap.marked
def counted(*arguments):
    Path("resampled-by-" + os.environ["RANK"]).touch()
    return marked(*arguments)
bootstrap.marked = counted

for place in sys.argv[1:]:
    name, stage = place.split("/")
    recipe = load_recipe(f"{name}/recipe.yaml", [f"deepspeed=zero{stage}_fp32"])
    run_recipe(recipe, place)
"""


def alone_and_on_two_ranks(
    recipes: Mapping[str, dict[str, Any]],
    warm: Warm,
    root: Path,
    stages: Sequence[int] = (3,),
) -> dict[str, Path]:
    """Runs of recipes whose trainings end after a few steps: NAME/run in this process at stage 0,
    and NAME/STAGE on two ranks, which start once for all of them. Returns their folders by name."""
    (root / "ranks.py").write_text(RANKS)
    for name, settings in recipes.items():
        short = copy.deepcopy(settings)
        short["training"] |= {"steps": STEPS}
        for phase in short["phases"]:
            for section in phase.values():
                section.pop("epochs", None)
        (root / name).mkdir()
        run_here(short, root / name, "deepspeed=zero0_fp32")
    places = [f"{name}/{stage}" for name in recipes for stage in stages]
    run_ranks(["ranks.py", *places], 2, warm, root)
    return {name: root / name for name in recipes}


def check_same_losses(folder: Path, training: str, stage: int = 3) -> None:
    """Of a recipe's first steps, on two ranks and alone: later ones carry each rounding on."""
    one, two = losses(folder / "run", training), losses(folder / str(stage), training)
    assert len(one) == len(two) == STEPS
    assert two[:5] == pytest.approx(one[:5], rel=1e-3)
