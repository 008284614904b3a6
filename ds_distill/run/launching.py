"""Start a run on many ranks through the deepspeed launcher."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_distill.check.recipe import check_data, check_recipe, open_sources
from ds_distill.engine.ports import free_port
from ds_distill.errors import UserError
from ds_distill.recipe import Recipe
from ds_distill.run.folder import RunFolder
from ds_distill.run.stopping import LAUNCHED, exit_on_signal, print_error

TERM_SECONDS = 5


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run: on this machine, or on those of a hostfile."""

    num_gpus: int | None
    hostfile: Path | None

    def count(self) -> int:
        """The number of ranks. Raises UserError when this machine cannot run them."""
        if (self.num_gpus is None) == (self.hostfile is None):
            raise UserError("launch: give either --num-gpus N (this machine) or --hostfile FILE.")
        if self.hostfile is not None:
            return _slots(self.hostfile)
        assert self.num_gpus is not None
        gpus = torch.cuda.device_count()
        if gpus and self.num_gpus > gpus:
            raise UserError(f"launch: --num-gpus {self.num_gpus}, but this machine has {gpus}.")
        return self.num_gpus


def launch_run(
    given: list[str], recipe: Recipe, folder: RunFolder, ranks: Ranks, *, resume: bool
) -> None:
    """Run a recipe on many ranks. Raises as `_launch` does.

    given: the recipe as the command line has it, with overrides and options.
    """
    command = ["run", *given, "--folder", str(folder.path)]
    command += ["--resume"] if resume else []
    _launch(recipe, folder, ranks, command, ["--resume"], resume=resume, result=folder.results)


def launch_build(given: list[str], recipe: Recipe, folder: RunFolder, ranks: Ranks) -> None:
    """Run a recipe's phases up to its last cache phase on many ranks; finished phases are skipped.
    Raises as `_launch` does."""
    command = ["cache", "build", *given, "--folder", str(folder.path)]
    [*_, (number, name)] = (
        (number, name)
        for number, name in enumerate(recipe.phase_names())
        if recipe.phases[number].kind == "cache"
    )
    _launch(
        recipe,
        folder,
        ranks,
        command,
        [],
        resume=folder.holds_run(),
        result=folder.record(number, name),
    )


def _launch(
    recipe: Recipe,
    folder: RunFolder,
    ranks: Ranks,
    rank_command: list[str],
    resume_options: list[str],
    *,
    resume: bool,
    result: Path,
) -> None:
    """Check the run in this process, where an error is one paragraph, then start the ranks with
    `deepspeed`. A signal ends all ranks.

    rank_command: the `ds-distill` command of each rank.
    resume_options: options that the user's command needs to continue after a stop.
    result: a file that exists when all went well.

    Raises UserError for mistakes, SystemExit(2) for those that a rank found and reported, and
    SystemExit(1) when the run fails.
    """
    launcher: subprocess.Popen[bytes] | None = None

    def end(at_once: bool) -> None:
        if launcher is not None:
            _end_all(launcher, at_once)

    with exit_on_signal(lambda: folder.how_to_continue(*resume_options), end):
        count = ranks.count()
        folder.check_new_or_same(recipe, resume)
        check_recipe(recipe, num_ranks=count, on_gpu=torch.cuda.is_available())
        if not resume:
            check_data(recipe, open_sources(recipe))
        print(f"Starting {count} ranks ...", flush=True)
        command = [_deepspeed(), *_placement(ranks), "--no_local_rank"]
        command += ["--log_level", "critical", "--module", "ds_distill", *rank_command]
        # In a session of its own, no signal from the terminal reaches a rank. A rank ends when its
        # standard input closes, as it does when this process ends.
        launcher = subprocess.Popen(
            command, env=_environment(ranks), stdin=subprocess.PIPE, start_new_session=True
        )
        status = launcher.wait()
        if status == 2:
            raise SystemExit(2)
        # The launcher can return 0 after a rank was killed by a signal: check the result, too.
        if status != 0 or not result.is_file():
            _end_all(launcher)
            print_error(
                f"the run stopped: {_reason(status)}. {folder.how_to_continue(*resume_options)}"
            )
            raise SystemExit(1)


def _environment(ranks: Ranks) -> dict[str, str]:
    """Environment variables of the launcher and its ranks."""
    # With `python -m` a random.py in the current folder would hide the library of that name.
    environment = {**os.environ, LAUNCHED: "1", "PYTHONSAFEPATH": "1"}
    if not torch.cuda.device_count():
        environment |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(ranks.num_gpus or 1)}
    return environment


def _reason(status: int) -> str:
    """The meaning of the launcher's exit code: that of the first failed rank, or 256 minus the
    number of the signal that ended that rank."""
    ended = "the launcher" if status < 0 else "a rank"
    try:
        name = signal.Signals(-status if status < 0 else 256 - status).name
    except ValueError:
        return f"the launcher's exit code is {status}"
    memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"{ended} was ended by {name}{memory}"


def _end_all(launcher: subprocess.Popen[bytes], at_once: bool = False) -> None:
    """End a launcher and all its processes: SIGTERM, then SIGKILL after TERM_SECONDS. With
    `at_once`, SIGKILL only."""
    assert launcher.stdin is not None
    readers = select.poll()  # POLLERR: no process reads from the pipe any more
    readers.register(launcher.stdin, 0)
    for number in [signal.SIGKILL] if at_once else [signal.SIGTERM, signal.SIGKILL]:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, number)
        if readers.poll(TERM_SECONDS * 1000):
            return


def _placement(ranks: Ranks) -> list[str]:
    if ranks.hostfile is not None:
        return ["--hostfile", str(ranks.hostfile)]
    # Each run needs its own port: two may run on one machine.
    return ["--num_gpus", str(ranks.num_gpus), "--master_port", str(free_port())]


def _slots(hostfile: Path) -> int:
    """Number of ranks in a hostfile. Raises UserError when it is not a valid one."""
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"launch: --hostfile {hostfile} cannot be read: {error}.") from error
    total = 0
    for number, line in enumerate(lines, 1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        if len(fields) != 2 or not fields[1].removeprefix("slots=").isdigit():
            raise UserError(f"{hostfile}:{number}: not of the form `host slots=N`: {line!r}.")
        total += int(fields[1].removeprefix("slots="))
    if total == 0:
        raise UserError(f"launch: --hostfile {hostfile} names no host.")
    return total


def _deepspeed() -> str:
    """The deepspeed launcher of this environment, also when it is not on PATH."""
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.is_file() else shutil.which("deepspeed")
    if found is None:
        raise UserError("launch: the `deepspeed` launcher is not installed: pip install deepspeed")
    return found
