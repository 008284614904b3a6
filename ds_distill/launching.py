"""Start a run on many ranks through the deepspeed launcher."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from ds_distill.data.sources import open_source
from ds_distill.environment import free_port
from ds_distill.errors import UserError
from ds_distill.phases.check import check_data, check_recipe
from ds_distill.phases.folder import RunFolder
from ds_distill.recipe import Recipe


def launch_run(
    reference: str,
    recipe: Recipe,
    overrides: list[str],
    folder: Path,
    resume: bool,
    num_gpus: int | None,
    hostfile: Path | None,
) -> None:
    """Check the run here, where an error is one paragraph, then hand it to `deepspeed`.

    Raises UserError for mistakes, and SystemExit(1) when the run fails.
    """
    if (num_gpus is None) == (hostfile is None):
        raise UserError("launch: give either --num-gpus N (this machine) or --hostfile FILE.")
    ranks = num_gpus or _slots(hostfile)  # type: ignore[arg-type]
    gpus = torch.cuda.device_count()
    if num_gpus is not None and gpus and num_gpus > gpus:
        raise UserError(f"launch: --num-gpus {num_gpus}, and this machine has {gpus}.")
    run_folder = RunFolder(folder)
    run_folder.check_new_or_same(recipe, resume)
    check_recipe(recipe, num_ranks=ranks)
    if not resume:
        check_data(recipe, open_source(recipe.task))
    command = [_deepspeed(), *_placement(num_gpus, hostfile), "--no_local_rank"]
    command += ["--log_level", "error", "--module", "ds_distill"]
    command += ["run", reference, *overrides, "--folder", str(folder)]
    command += ["--resume"] if resume else []
    environment = dict(os.environ)
    if not gpus:
        environment["DS_ACCELERATOR"] = "cpu"
        environment["LOCAL_SIZE"] = str(num_gpus or 1)
    ranks_option = ["--num-gpus", num_gpus] if hostfile is None else ["--hostfile", hostfile]
    again = ["ds-distill", "launch", reference, *overrides]
    again += [*map(str, ranks_option), "--folder", str(folder), "--resume"]
    status = subprocess.run(command, env=environment).returncode
    # The launcher can return 0 after a rank was killed by a signal: results are the proof.
    if status == 2 or (status != 0 and not folder.exists()):
        raise SystemExit(2)
    if status != 0 or not run_folder.results.is_file():
        print(
            f"ds-distill: the run stopped (launcher's exit code {status}). What is done is kept; "
            f"continue with: {shlex.join(again)}",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _placement(num_gpus: int | None, hostfile: Path | None) -> list[str]:
    if hostfile is not None:
        return ["--hostfile", str(hostfile)]
    # A port of its own: two runs on one machine must not meet.
    return ["--num_gpus", str(num_gpus), "--master_port", str(free_port())]


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
