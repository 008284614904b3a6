"""`ds-distill launch` on one of two hosts, and its ranks."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
from processes import left_of
from runs import DS_DISTILL, SETTINGS, after_steps
from two_hosts.network import TwoHosts, inner

METACHARACTERS = "a b;c$(touch canary)`touch canary`{1,2}*?'\"\\&|<>~#!é"
SHARDED = ["deepspeed=zero3_fp32", f"description={METACHARACTERS}"]
LIMIT = 900
SESSION = ("PYTHONPATH", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
"""Variables of sessions on a host."""


class Run:
    """`ds-distill launch`, on the login host or another one."""

    def __init__(
        self,
        hosts: TwoHosts,
        folder: Path,
        environment: dict[str, str],
        *options: str,
        host: str = "login",
    ) -> None:
        self.folder = folder
        self.environment = hosts.environment(environment)
        command = [*DS_DISTILL, "launch", "toy.yaml", *SETTINGS, *SHARDED, *options]
        self.process = subprocess.Popen(
            hosts.at(host, *command, "--folder", folder),
            env=self.environment,
            cwd=folder.parent,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._wait_for = after_steps(8, 0.0)

    def is_training(self) -> None:
        """Wait for some steps more."""
        deadline = time.monotonic() + LIMIT
        while not self._wait_for(self.folder):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def terminate(self) -> None:
        inner(self.process).terminate()

    def end(self, code: int, seconds: float = LIMIT) -> str:
        output, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode == code, output
        return output


def start_both(
    hosts: TwoHosts, folder: Path, environment: dict[str, str], *options: str
) -> list[Run]:
    """The same command on each host."""
    meet = ["--num-gpus", "1", "--nnodes", "2", "--rdzv-endpoint", "node-a:29400"]
    return [
        Run(hosts, folder, environment, *meet, *options, host=name) for name in ("node-a", "node-b")
    ]


def rank(environment: dict[str, str], number: int) -> psutil.Process:
    ranks = [one for one in left_of(environment) if one.environ().get("RANK") == str(number)]
    return ranks[0]
