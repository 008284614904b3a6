"""Start a run on many ranks through the deepspeed launcher."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_distill.data.sources import open_source
from ds_distill.environment import free_port
from ds_distill.errors import UserError
from ds_distill.phases.check import check_data, check_recipe
from ds_distill.phases.folder import RunFolder
from ds_distill.recipe import Recipe


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

    def options(self) -> list[str]:
        """As a user gives them."""
        if self.hostfile is not None:
            return ["--hostfile", str(self.hostfile)]
        return ["--num-gpus", str(self.num_gpus)]


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
    what = [reference, *overrides]
    place = ["--folder", str(folder.path)]
    each = ["run", *what, *place, *(["--resume"] if resume else [])]
    again = ["launch", *what, *ranks.options(), *place, "--resume"]
    _launch(recipe, folder, ranks, each, again, resume=resume, proof=folder.results)


def launch_build(
    reference: str, recipe: Recipe, overrides: list[str], folder: RunFolder, ranks: Ranks
) -> None:
    """Run a recipe's phases through its last cache phase on many ranks, or the rest of them.
    Raises as `_launch` does."""
    what = ["cache", "build", reference, *overrides]
    place = ["--folder", str(folder.path)]
    [*_, (number, name)] = (
        (number, name)
        for number, name in enumerate(recipe.phase_names())
        if recipe.phases[number].kind == "cache"
    )
    _launch(
        recipe,
        folder,
        ranks,
        [*what, *place],
        [*what, *ranks.options(), *place],
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
    """Check the run here, where an error is one paragraph, then hand it to `deepspeed`.

    each: the `ds-distill` command of each rank; again: the user's, to continue after a stop.
    proof: a file that is there when all went well.

    Raises UserError for mistakes, and SystemExit(1) when the run fails.
    """
    count = ranks.count()
    folder.check_new_or_same(recipe, resume)
    check_recipe(recipe, num_ranks=count)
    if not resume:
        check_data(recipe, open_source(recipe.task))
    command = [_deepspeed(), *_placement(ranks), "--no_local_rank"]
    command += ["--log_level", "error", "--module", "ds_distill", *each]
    environment = dict(os.environ)
    if not torch.cuda.device_count():
        environment["DS_ACCELERATOR"] = "cpu"
        environment["LOCAL_SIZE"] = str(ranks.num_gpus or 1)
    status = subprocess.run(command, env=environment).returncode
    # The launcher can return 0 after a rank was killed by a signal: results are the proof.
    if status == 2 or (status != 0 and not folder.path.exists()):
        raise SystemExit(2)
    if status != 0 or not proof.is_file():
        print(
            f"ds-distill: the run stopped (launcher's exit code {status}). What is done is kept; "
            f"continue with: {shlex.join(['ds-distill', *again])}",
            file=sys.stderr,
        )
        raise SystemExit(1)


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
