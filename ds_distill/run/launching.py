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

from ds_distill.check.recipe import check_data, check_recipe
from ds_distill.data.sources import open_source
from ds_distill.engine.ports import free_port
from ds_distill.errors import UserError
from ds_distill.recipe import Recipe
from ds_distill.run.folder import RunFolder
from ds_distill.run.stopping import LAUNCHED, last_words, say

TERM_SECONDS = 5


@dataclass(frozen=True)
class Ranks:
    """Where a run's processes are: on this machine, or on those of a hostfile."""

    num_gpus: int | None
    hostfile: Path | None

    def count(self) -> int:
        """Raises UserError when they cannot be had."""
        if (self.num_gpus is None) == (self.hostfile is None):
            raise UserError("launch: give either --num-gpus N (this machine) or --hostfile FILE.")
        if self.hostfile is not None:
            return _slots(self.hostfile)
        assert self.num_gpus is not None
        gpus = torch.cuda.device_count()
        if gpus and self.num_gpus > gpus:
            raise UserError(f"launch: --num-gpus {self.num_gpus}, and this machine has {gpus}.")
        return self.num_gpus


def launch_run(
    reference: str,
    recipe: Recipe,
    overrides: list[str],
    folder: RunFolder,
    ranks: Ranks,
    *,
    resume: bool,
) -> None:
    """Run a recipe on many ranks. Raises as `_launch` does."""
    each = ["run", reference, *overrides, "--folder", str(folder.path)]
    each += ["--resume"] if resume else []
    again = ["--resume"]
    _launch(recipe, folder, ranks, each, again, resume=resume, proof=folder.results)


def launch_build(
    reference: str, recipe: Recipe, overrides: list[str], folder: RunFolder, ranks: Ranks
) -> None:
    """Run a recipe's phases through its last cache phase on many ranks, or the rest of them.
    Raises as `_launch` does."""
    each = ["cache", "build", reference, *overrides, "--folder", str(folder.path)]
    [*_, (number, name)] = (
        (number, name)
        for number, name in enumerate(recipe.phase_names())
        if recipe.phases[number].kind == "cache"
    )
    _launch(
        recipe,
        folder,
        ranks,
        each,
        [],
        resume=folder.holds_run(),
        proof=folder.record(number, name),
    )


def _launch(
    recipe: Recipe,
    folder: RunFolder,
    ranks: Ranks,
    each: list[str],
    again: list[str],
    *,
    resume: bool,
    proof: Path,
) -> None:
    """Check the run here, where an error is one paragraph, then hand it to `deepspeed`. Told to
    stop, it ends all ranks.

    each: the `ds-distill` command of each rank; again: what the user's own needs to continue after
    a stop. proof: a file that is there when all went well.

    Raises UserError for mistakes, SystemExit(2) for those that a rank found and said, and
    SystemExit(1) when the run fails.
    """
    launcher: subprocess.Popen[bytes] | None = None

    def end(hurry: bool) -> None:
        if launcher is not None:
            _end_all(launcher, hurry)

    with last_words(lambda: folder.how_to_go_on(*again), end):
        count = ranks.count()
        folder.check_new_or_same(recipe, resume)
        check_recipe(recipe, num_ranks=count, on_gpu=torch.cuda.is_available())
        if not resume:
            check_data(recipe, open_source(recipe.task))
        print(f"Starting {count} ranks ...", flush=True)
        command = [_deepspeed(), *_placement(ranks), "--no_local_rank"]
        command += ["--log_level", "critical", "--module", "ds_distill", *each]
        # In a session of its own no signal from the terminal gets past this process to a rank;
        # ranks take the end of their standard input for the end of this process.
        launcher = subprocess.Popen(
            command, env=_environment(ranks), stdin=subprocess.PIPE, start_new_session=True
        )
        status = launcher.wait()
        if status == 2:
            raise SystemExit(2)
        # The launcher can return 0 after a rank was killed by a signal: results are the proof.
        if status != 0 or not proof.is_file():
            _end_all(launcher)
            say(f"the run stopped: {_reason(status)}. {folder.how_to_go_on(*again)}")
            raise SystemExit(1)


def _environment(ranks: Ranks) -> dict[str, str]:
    """Of the launcher and its ranks."""
    # `python -m` would take a user's random.py for the library of that name.
    environment = {**os.environ, LAUNCHED: "1", "PYTHONSAFEPATH": "1"}
    if not torch.cuda.device_count():
        environment |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(ranks.num_gpus or 1)}
    return environment


def _reason(status: int) -> str:
    """What the launcher's exit code says: it is that of the first rank which failed, and counts
    down from 256 where a signal ended that."""
    ended = "the launcher" if status < 0 else "a rank"
    try:
        name = signal.Signals(-status if status < 0 else 256 - status).name
    except ValueError:
        return f"the launcher's exit code is {status}"
    memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"{ended} was ended by {name}{memory}"


def _end_all(launcher: subprocess.Popen[bytes], hurry: bool = False) -> None:
    """End a launcher and all that it started: SIGTERM, and SIGKILL to what is there after
    TERM_SECONDS, or at once in a hurry."""
    assert launcher.stdin is not None
    readers = select.poll()  # an error: nobody is left who reads from the pipe
    readers.register(launcher.stdin, 0)
    for number in [signal.SIGKILL] if hurry else [signal.SIGTERM, signal.SIGKILL]:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, number)
        if readers.poll(TERM_SECONDS * 1000):
            return


def _placement(ranks: Ranks) -> list[str]:
    if ranks.hostfile is not None:
        return ["--hostfile", str(ranks.hostfile)]
    # A port of its own: two runs on one machine must not meet.
    return ["--num_gpus", str(ranks.num_gpus), "--master_port", str(free_port())]


def _slots(hostfile: Path) -> int:
    """Ranks that a hostfile asks for. Raises UserError when it is not one."""
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"launch: --hostfile {hostfile} cannot be read: {error}.") from error
    total = 0
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not words[1].removeprefix("slots=").isdigit():
            raise UserError(f"{hostfile}:{number}: not of the form `host slots=N`: {line!r}.")
        total += int(words[1].removeprefix("slots="))
    if total == 0:
        raise UserError(f"launch: --hostfile {hostfile} names no host.")
    return total


def _deepspeed() -> str:
    """The launcher of this environment, also when it is not on PATH."""
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.is_file() else shutil.which("deepspeed")
    if found is None:
        raise UserError("launch: the `deepspeed` launcher is not installed: pip install deepspeed")
    return found
