"""`ds-distill launch`: many ranks, which torchrun or DeepSpeed's runner starts and ends.

This process finds the mistakes of a recipe, writes it resolved into the run's folder, from where
ranks read it, starts the engine and waits. What came of the run it takes from the folder: torchrun
ends with 1 after SIGTERM, and DeepSpeed's runner with 0 where a signal has killed its child.

`python -m ds_distill.launch ENGINE ...` is the engine, in a process of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import typer

from ds_distill.errors import UserError
from ds_distill.files import publish_file
from ds_distill.process.failures import Failure, clear_failures, first_failure
from ds_distill.process.identity import LAUNCHED, PORTS, STOP, address_towards
from ds_distill.process.launcher import ends_with, shell_code
from ds_distill.process.machine import visible_gpus
from ds_distill.process.signals import STOPPED, exit_on_signal, print_error

if TYPE_CHECKING:
    from ds_distill.recipe import Recipe
    from ds_distill.run.folder import Resume, RunFolder

TERMINATED = 128 + signal.SIGTERM
MARGIN_SECONDS = 10.0
"""For what an engine does beside waiting for its ranks."""


@dataclass(frozen=True)
class LaunchOptions:
    """Each field is an option of the command line, by its name, type and default."""

    num_gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on this machine; without GPUs, CPU processes."),
    ] = None
    nnodes: Annotated[
        str,
        typer.Option(metavar="N|MIN:MAX", help="Machines; start the same command on each of them."),
    ] = "1"
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Of several machines: where they meet, on one of them."
        ),
    ] = None
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often ranks are started anew after one has ended.")
    ] = 0
    hostfile: Annotated[
        Path | None,
        typer.Option(help="Lines `host slots=N`: ranks on these, by DeepSpeed's runner and pdsh."),
    ] = None
    include: Annotated[
        str | None, typer.Option(metavar="FILTER", help="Use only these: `HOST:0,1@HOST`.")
    ] = None
    exclude: Annotated[
        str | None, typer.Option(metavar="FILTER", help="Use all but these: `HOST:0,1@HOST`.")
    ] = None
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="The first host as the others reach it.", show_default="its name"
        ),
    ] = None
    master_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Where ranks meet there.", show_default="drawn"),
    ] = None
    grace: Annotated[
        int, typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL when ranks are stopped.")
    ] = 30

    def any_given(self) -> bool:
        return self.num_gpus is not None or self.hostfile is not None

    def check(self) -> None:
        """Raises UserError for options that do not go together, and for a hostfile that is not
        there."""
        if (self.num_gpus is None) == (self.hostfile is None):
            raise UserError("launch: give either --num-gpus N or --hostfile FILE.")
        of_hosts = {"include", "exclude", "master_addr", "master_port"}
        of_this = {"nnodes", "rdzv_endpoint", "max_restarts"}
        wrong, needed = (of_this, "num-gpus") if self.num_gpus is None else (of_hosts, "hostfile")
        for one in fields(self):
            if one.name in wrong and getattr(self, one.name) != one.default:
                raise UserError(f"launch: --{one.name.replace('_', '-')} needs --{needed}.")
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", self.nnodes):
            raise UserError(f"launch: --nnodes {self.nnodes}: is no number N and no MIN:MAX.")
        if self.nnodes != "1" and self.rdzv_endpoint is None:
            raise UserError(
                "launch: --nnodes: say where the machines meet: --rdzv-endpoint HOST:29400, the "
                "same on all of them."
            )
        if self.hostfile is not None and not self.hostfile.is_file():
            raise UserError(f"launch: --hostfile {self.hostfile} cannot be read: is no file.")

    def hosts(self) -> dict[str, list[int]]:
        """The slots to use of each host. Raises UserError for a hostfile or a filter that is
        wrong."""
        from deepspeed.launcher import runner

        try:
            listed = runner.fetch_hostfile(str(self.hostfile))
            found = runner.parse_inclusion_exclusion(listed, self.include or "", self.exclude or "")
        except ValueError as error:
            raise UserError(
                f"launch: --hostfile {self.hostfile}: {error}. A line is `host slots=N`."
            ) from error
        if not found:
            raise UserError("launch: --exclude leaves no slot.")
        return dict(found)


@dataclass(frozen=True)
class Work:
    """A run, or a cache build, that many ranks do."""

    recipe: Recipe
    folder: RunFolder
    command: list[str]
    """The words of `ds-distill` that ranks begin with, and their options: `run`."""
    result: Path
    """A file that exists when all went well."""
    resume: Resume = False
    resume_options: tuple[str, ...] = ("--resume",)
    """What the command needs to continue after a stop."""

    def of_ranks(self) -> list[str]:
        """Arguments of `ds-distill` on each rank: the folder, and nothing of the recipe."""
        first, *more = self.command
        folder = self.folder.path
        words = [more.pop(0)] if first == "cache" else []
        goes_on = ["--resume=auto"] if first == "run" else []
        return [first, *words, str(folder / LAUNCHED), "--folder", str(folder), *goes_on, *more]


def launch(work: Work, options: LaunchOptions) -> None:
    """Find mistakes, then start the ranks, and wait until all have ended.

    Raises UserError for mistakes, SystemExit(2) for those that a rank found and reported,
    SystemExit(75) when the ranks have saved their work on a signal, and SystemExit(1) when the run
    fails.
    """
    from ds_distill.recipe import dump_recipe

    engine: Engine | None = None
    folder = work.folder.path

    def message() -> str:
        return work.folder.how_to_continue(*work.resume_options)

    def end(at_once: bool) -> bool:
        return engine is not None and engine.stop(at_once)

    with exit_on_signal(message, end, work.folder.progress(work.recipe)):
        hosts = {} if options.hostfile is None else options.hosts()
        ranks = sum(map(len, hosts.values())) or (options.num_gpus or 1) * _fewest(options.nnodes)
        _check(work, options, ranks)
        arguments = _deepspeed(work, options, hosts) if hosts else _torchrun(work, options, folder)
        # Of a start before; a machine that joins a run finds none.
        clear_failures(folder)
        (folder / STOP).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_for_ranks(folder, dump_recipe(work.recipe))
        where = f" on {', '.join(hosts)}" if len(hosts) > 1 else ""
        print(f"Starting {options.num_gpus or ranks} ranks{where} ...", flush=True)
        engine = Engine(arguments, _environment(options), folder, options.grace)
        code = engine.wait()
    _conclude(work, code)


def write_for_ranks(folder: Path, recipe: str) -> None:
    """The launches of all machines write this file, at once: each has a name of its own for it
    until it is whole."""
    own = folder / f"{LAUNCHED}.{uuid4().hex}"
    own.write_text(recipe, encoding="utf-8")
    publish_file(own, folder / LAUNCHED)


def _fewest(nnodes: str) -> int:
    return int(nnodes.partition(":")[0])


def _check(work: Work, options: LaunchOptions, ranks: int) -> None:
    if options.rdzv_endpoint is None:  # else another machine may have begun, and this one joins
        work.folder.check_new_or_same(work.recipe, work.resume)
    # Behind what can be told at once: these imports take many seconds.
    from ds_distill.check.check import check_data, check_recipe, open_sources

    here, gpus = options.num_gpus or 0, len(visible_gpus())
    cores = len(os.sched_getaffinity(0))
    if gpus and here > gpus:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UserError(
            f"launch: {here} ranks, but this machine has {gpus} GPUs"
            f"{'' if seen is None else f' (CUDA_VISIBLE_DEVICES={seen})'}. Give a smaller number, "
            "or set DS_ACCELERATOR=cpu for CPU ranks."
        )
    if here > cores and not gpus:
        print(f"Note: {here} ranks share {cores} cores: fewer are faster", flush=True)
    check_recipe(work.recipe, num_ranks=ranks, on_gpu=gpus > 0)
    if not work.folder.holds_run():
        check_data(work.recipe, open_sources(work.recipe))


def _environment(options: LaunchOptions) -> dict[str, str]:
    # With `python -m` a random.py in the current folder would hide the library of that name.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(options.grace)
    if options.num_gpus is not None:
        share = len(os.sched_getaffinity(0)) // options.num_gpus  # torchrun would take 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    if not visible_gpus():
        environment["DS_ACCELERATOR"] = "cpu"  # of other hosts each finds its own
    if options.rdzv_endpoint is not None:
        # In a shared store ranks meet under the number of their agent's restarts, and that of a
        # machine which joins later is another one.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return environment


def _torchrun(work: Work, options: LaunchOptions, folder: Path) -> list[str]:
    meeting = ["--standalone"]
    if options.rdzv_endpoint is not None:
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        meeting = ["--nnodes", options.nnodes, "--rdzv-id", name, "--rdzv-backend", "c10d"]
        meeting += ["--rdzv-endpoint", options.rdzv_endpoint]
        own = address_towards(options.rdzv_endpoint.rpartition(":")[0])
        meeting += ["--local-addr", own] if own is not None else []
    count = ["--nproc-per-node", str(options.num_gpus), "--max-restarts", str(options.max_restarts)]
    program = ["--no-python", sys.executable, "-u", "-P", "-m", "ds_distill"]
    return ["torchrun", *meeting, *count, *program, *work.of_ranks()]


def _deepspeed(work: Work, options: LaunchOptions, hosts: dict[str, list[int]]) -> list[str]:
    """Raises UserError where pdsh is needed and not there, and for paths that a shell would read
    otherwise: DeepSpeed hands them on as they are."""
    first = next(iter(hosts)).rpartition("@")[2]
    several = len(hosts) > 1 or first not in ("localhost", "127.0.0.1", socket.gethostname())
    if several and shutil.which("pdsh") is None:
        raise UserError("launch: --hostfile: needs pdsh, which is not here: install it.")
    for path in (str(work.folder.path), os.getcwd()) if several else ():
        if not re.fullmatch(r"[\w@%+=:,./-]+", path, re.ASCII):
            raise UserError(
                f"launch: --hostfile: {path!r} passes a shell on each host. Use a folder whose "
                "path has only letters, digits and @%+=:,./-_"
            )
    command = ["deepspeed", "--quiet", "--hostfile", str(options.hostfile), "--no_ssh_check"]
    for name in ("include", "exclude"):
        command += [f"--{name}", value] if (value := getattr(options, name)) else []
    port = options.master_port or random.SystemRandom().choice(PORTS)
    command += ["--master_addr", options.master_addr or first, "--master_port", str(port)]
    command += ["--force_multi"] if several else []
    return [*command, "--no_local_rank", "--module", "ds_distill", *work.of_ranks()]


class Engine:
    """The running engine of a launch."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], folder: Path, grace: float
    ) -> None:
        self._folder, self._grace = folder, grace
        self._asks = arguments[0] == "deepspeed"
        # In a session of its own: no signal from the terminal reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ds_distill.launch", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=ends_with(os.getpid()),
        )
        self._handle = os.pidfd_open(self._process.pid)

    def wait(self) -> int:
        """Its exit code, 128 + N after signal N. One that would start ranks anew, or wait for
        those of other machines, after what ends the run is stopped."""
        over = float("inf")
        while not self._has_ended(1.0):
            failure = first_failure(self._folder)
            if failure is None or not failure.is_final:
                over = float("inf")
            elif time.monotonic() > (over := min(over, time.monotonic() + MARGIN_SECONDS)):
                self.stop(at_once=False)
        return shell_code(self._process.wait())

    def stop(self, at_once: bool) -> bool:
        """End all ranks, and say whether they have saved their work."""
        # No `wait` and no `poll`: a signal's handler calls this, also within them.
        seconds = 0.0 if at_once else self._grace + MARGIN_SECONDS
        if self._asks:
            # SIGTERM to DeepSpeed's runner would cut the connections to other hosts first, and end
            # what else DeepSpeed has started there.
            if not at_once:
                (self._folder / STOP).touch()
                self._has_ended(seconds)
            self._send(signal.SIGTERM)
            seconds = MARGIN_SECONDS
        elif not at_once:
            self._send(signal.SIGTERM)
        if not self._has_ended(seconds):
            self._send(signal.SIGKILL)
            self._has_ended(MARGIN_SECONDS)
        (self._folder / STOP).unlink(missing_ok=True)
        failure = first_failure(self._folder)
        return failure is not None and failure.exit_code == STOPPED

    def _has_ended(self, seconds: float) -> bool:
        ends = select.poll()
        ends.register(self._handle, select.POLLIN)
        return bool(ends.poll(seconds * 1000))

    def _send(self, number: signal.Signals) -> None:
        if not self._has_ended(0):
            signal.pidfd_send_signal(self._handle, number)


def _conclude(work: Work, code: int) -> None:
    """Return when the run is finished; otherwise raise SystemExit with its exit code."""
    first = first_failure(work.folder.path)
    if code == 0 and first is None and work.result.is_file():
        return
    if (first.exit_code if first else code) == 2:
        raise SystemExit(2)  # a rank has reported it
    advice = work.folder.how_to_continue(*work.resume_options)
    if first is not None and first.exit_code == STOPPED:
        print_error(f"stopped. {advice}")
        raise SystemExit(STOPPED)
    print_error(f"the run stopped: {_reason(work, first, code).rstrip('.')}. {advice}")
    raise SystemExit(TERMINATED if code == TERMINATED else 1)


def _reason(work: Work, first: Failure | None, code: int) -> str:
    if first is not None:
        return str(first)
    if code == 0:
        return f"there is no {work.result}"
    if code - 128 not in [*signal.Signals]:
        return f"the exit code of its ranks is {code}"
    name = signal.Signals(code - 128).name
    memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"its ranks were ended by {name}{memory}"


def main() -> int:
    engine, *arguments = sys.argv[1:]
    if engine == "deepspeed":
        from deepspeed.launcher import runner

        # What it starts ends with it, also where all ranks are frozen and cannot see to that.
        started = functools.partial(subprocess.Popen, preexec_fn=ends_with(os.getpid()))
        subprocess.Popen = started  # type: ignore[assignment,misc]
        runner.main(arguments)
        return 0
    import logging

    import psutil
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    # Ranks say why they end, once; this would add a table and a traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return shell_code(failure.exitcode)
    except RendezvousError as error:
        print_error(f"torchrun: {type(error).__name__}: {error}")
        return 1
    except SignalException as error:
        # A second signal, as Slurm's to all processes of a step, ends torchrun's own wait.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grace = float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        psutil.wait_procs(psutil.Process().children(), timeout=grace)
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
