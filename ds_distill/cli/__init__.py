"""The command line: one thin function per command.

`options` has the arguments that they share, `loading` reading a recipe, how a run ends. Imports
that take time are inside the functions.
"""

from __future__ import annotations

import errno
import os
import sys

from ds_distill.cli import cache, commands, results, sweep  # noqa: F401
from ds_distill.cli.options import app
from ds_distill.errors import UserError, first_line
from ds_distill.files import is_disk_full
from ds_distill.process.identity import get_world_size, heed_slurm, is_rank
from ds_distill.process.launcher import end_with_launcher
from ds_distill.process.signals import end_as_rank, exit_on_signal
from ds_distill.process.terminal import say

__all__ = ["app", "main"]


def main() -> None:
    """Exit codes: 0 done, 2 the user's input is wrong, 1 a fault of ours; 130 after Ctrl-C, 143
    after SIGTERM, and 75 where work of this start was saved before that, or by a training then."""
    # Two processes on few cores lose half their speed to spinning; must be set before torch.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Tokenizers use all cores. Unless told so they would stop that, with a warning, at a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    heed_slurm()
    several = get_world_size() > 1
    if several:  # what a lost connection means is reported once, in words
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if is_rank():
        # DeepSpeed's launcher adds it to a rank's arguments; LOCAL_RANK says the same.
        sys.argv = [word for word in sys.argv if not word.startswith("--local_rank=")]
        end_with_launcher()
        end_as_rank()
    try:
        with exit_on_signal(lambda: ""):
            app(prog_name="ds-distill", standalone_mode=True)
    except Exception as error:
        if several:
            from ds_distill.run.rank import report_and_exit

            report_and_exit(error)
        text = str(error) if isinstance(error, UserError) else _of_the_system(error)
        if text is None:
            raise
        say(f"ds-distill: {text}", error=True)
        sys.exit(2)


def _of_the_system(error: Exception) -> str | None:
    """What to tell of an error that the user can mend outside of ds_distill; None of others."""
    if is_disk_full(error):
        return f"no space is left: {first_line(error)}. Free some, and give the same command."
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENAMETOOLONG:
        return "a path of the command line is too long"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename is not None:
        return (
            f"{os.fsdecode(error.filename)}: {error.strerror}. Name another one, or see to it that "
            "it can be read and written."
        )
    return None
