"""Where a run's ranks are and how they are started: the options that commands with ranks share."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.errors import UserError
from ds_distill.launch.hosts import Hosts, choose, read_hostfile
from ds_distill.launch.probe import most_gpus
from ds_distill.process.ports import why_unusable

NO_SSH_PORT = 29500
"""DeepSpeed's own: the launches of several hosts cannot agree on another."""


@dataclass(frozen=True)
class LaunchOptions:
    """Each field is an option of the command line, by its name, type and default."""

    num_gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks on this machine, or on each node of a Slurm job; without GPUs, CPU "
            "processes.",
        ),
    ] = None
    hostfile: Annotated[
        Path | None, typer.Option(help="DeepSpeed hostfile: lines `host slots=N`. Uses ssh.")
    ] = None
    include: Annotated[
        str | None,
        typer.Option(metavar="FILTER", help="Use only these: `HOST:0,1@HOST`."),
    ] = None
    exclude: Annotated[
        str | None, typer.Option(metavar="FILTER", help="Use all but these: `HOST:0,1@HOST`.")
    ] = None
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Where ranks meet: the first host, as the others reach it.",
            show_default="its name",
        ),
    ] = None
    master_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Its port.", show_default="a free one"),
    ] = None
    ssh_port: Annotated[int | None, typer.Option(min=1, max=65535, help="The hosts' ssh port.")] = (
        None
    )
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Give this variable of the environment to ranks on other hosts. May be repeated.",
        ),
    ] = None
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL when ranks are stopped.")
    ] = 20.0
    no_ssh: Annotated[
        bool,
        typer.Option("--no-ssh", help="Run this host's part of a hostfile; repeat on each host."),
    ] = False
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="With --no-ssh: this host's number, from 0.")
    ] = None
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm", help="In a Slurm job: run on its nodes. Elsewhere: print a job's script."
        ),
    ] = False
    nodes: Annotated[int, typer.Option(min=1, help="With --slurm: nodes of the job.")] = 1
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            help="With --slurm: an option of sbatch, like `time=4:00:00`. May be repeated.",
        ),
    ] = None
    submit: Annotated[bool, typer.Option("--submit", help="With --slurm: submit the script.")] = (
        False
    )

    @property
    def by_ssh(self) -> bool:
        """Whether the agents are started by ssh."""
        return self.hostfile is not None and not self.no_ssh

    @property
    def known_port(self) -> int | None:
        """The port where ranks meet, if it is not drawn."""
        return self.master_port or (NO_SSH_PORT if self.no_ssh else None)

    def any_given(self) -> bool:
        return self.num_gpus is not None or self.hostfile is not None or self.slurm

    def check(self) -> None:
        """Raises UserError for options that do not go together, a hostfile that is none, a port of
        this machine that is taken, and more ranks than it has GPUs, where that shows at once."""
        ways = [self.hostfile is not None, self.num_gpus is not None and not self.slurm, self.slurm]
        if sum(ways) != 1:
            raise UserError(
                "launch: give either --num-gpus N (this machine), --hostfile FILE or --slurm."
            )
        needs = {
            "--hostfile": (
                self.hostfile is not None,
                ("include", "exclude", "ssh_port", "no_ssh"),
            ),
            "--no-ssh": (self.no_ssh, ("node_rank",)),
            "--hostfile or --slurm": (self.hostfile is not None or self.slurm, ("master_addr",)),
            "--slurm": (self.slurm, ("nodes", "sbatch", "submit")),
        }
        defaults = {one.name: one.default for one in fields(self)}
        for what, (given, names) in needs.items():
            for name in names:
                if not given and getattr(self, name) != defaults[name]:
                    raise UserError(f"launch: --{name.replace('_', '-')} needs {what}.")
        if self.no_ssh and self.node_rank is None:
            raise UserError("launch: --no-ssh: give this host's number with --node-rank.")
        self.variables()
        here = 0 if self.slurm else self.num_gpus or 0
        if self.hostfile is not None:
            slots = [*self.hosts_of_file().values()]
            here = len(slots[self.node_rank or 0]) if self.no_ssh else 0
        first = self.node_rank == 0 if self.no_ssh else self.hostfile is None and not self.slurm
        if first and self.known_port and (why := why_unusable(self.known_port)) is not None:
            other = ", the same on all hosts" if self.no_ssh else ", or leave it out"
            raise UserError(
                f"launch: --master-port {self.known_port}: cannot be used here: {why}. Name "
                f"another one{other}."
            )
        if here:
            check_gpus(here, most_gpus())

    def hosts_of_file(self) -> Hosts:
        """The hosts of the hostfile that are used. Raises UserError where it is none, and where it
        has not what other options name."""
        assert self.hostfile is not None
        hosts = choose(read_hostfile(self.hostfile), self.include, self.exclude)
        if self.node_rank is not None and self.node_rank >= len(hosts):
            raise UserError(
                f"launch: --node-rank {self.node_rank}, but the hostfile has {len(hosts)} hosts: "
                f"0 to {len(hosts) - 1}."
            )
        return hosts

    def variables(self) -> dict[str, str]:
        """The variables that `env` names. Raises UserError for one that is not set."""
        for name in self.env or ():
            if name not in os.environ:
                raise UserError(
                    f"launch: --env {name}: no such variable in the environment. Set it first: "
                    f"export NAME=VALUE, then give its name alone."
                )
        return {name: os.environ[name] for name in self.env or ()}


def check_gpus(ranks: int, gpus: int | None) -> None:
    """Raises UserError for more ranks on this machine than it has GPUs. Without GPUs they are CPU
    processes, and None is a number that is not known."""
    if gpus and gpus < ranks:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen})"
        raise UserError(
            f"launch: {ranks} ranks, but this machine has {gpus} GPUs{why}. Give a smaller number, "
            "or set DS_ACCELERATOR=cpu for CPU ranks."
        )
