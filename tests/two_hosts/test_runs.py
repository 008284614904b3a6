"""Runs on two hosts, by torchrun and by DeepSpeed's runner: the same student as on one; stopped,
killed and continued."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml
from processes import left_of, marked, within
from runs import DS_DISTILL, SETTINGS, after_steps, check_same
from two_hosts.network import TwoHosts, inner
from two_hosts.relay import Way

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


@pytest.fixture
def environment(command_environment: dict[str, str]) -> dict[str, str]:
    """What is started with it is found by `left_of`."""
    return {**command_environment, **marked()}


@pytest.fixture
def whole(hosts: TwoHosts, toy_recipe: Path, environment: dict[str, str], tmp_path: Path) -> Path:
    """The run of two ranks on one host."""
    Run(hosts, tmp_path / "whole", environment, "--num-gpus", "2").end(0)
    described = yaml.safe_load((tmp_path / "whole" / "recipe.yaml").read_text())["description"]
    assert described == METACHARACTERS
    return tmp_path / "whole"


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


def test_torchrun_on_two_hosts(hosts, whole, environment, tmp_path):
    folder = tmp_path / "run"
    bad = Way(loss=0.02, delay=0.002)
    hosts.cable_of_b(bad, bad)
    first, second = start_both(hosts, folder, environment, "--max-restarts", "3")
    first.is_training()
    second.terminate()
    for output in (first.end(75, seconds=120), second.end(75, seconds=120)):
        assert "stopped" in output.splitlines()[-1] and "Continue with: " in output
    assert within(30, lambda: not left_of(environment))

    hosts.cable_of_b()
    both = start_both(hosts, folder, environment, "--max-restarts", "1")
    both[0].is_training()
    rank(environment, 1).kill()
    for run in both:
        run.end(0)
    assert json.loads((folder / "environment.json").read_text())["ranks"] == 2
    check_same(folder, whole)
    assert within(30, lambda: not left_of(environment))


def test_a_host_that_is_gone_ends_the_run_and_it_goes_on(hosts, whole, environment, tmp_path):
    """By a kill of all that runs there, and by its cable."""
    folder = tmp_path / "run"
    limits = ["--grace", "5", "timeout_minutes=0.5"]
    first, second = start_both(hosts, folder, environment, *limits)
    first.is_training()
    for one in (inner(second.process), *inner(second.process).children(recursive=True)):
        one.kill()
    assert "the run stopped: rank " in first.end(1, seconds=180)
    second.process.wait(30)
    assert within(60, lambda: not left_of(environment))

    # Large frames are lost on the way: both ranks are alive, and wait for each other.
    first, second = start_both(hosts, folder, environment, *limits)
    first.is_training()
    hosts.cable_of_b(Way(largest=700), Way(largest=700))
    output = first.end(1, seconds=240)
    assert "no rank has gone on for 30 seconds" in output, output
    hosts.cable_of_b()
    second.process.wait(240)
    assert within(60, lambda: not left_of(environment))
    for run in start_both(hosts, folder, environment, *limits):
        run.end(0)
    check_same(folder, whole)


def test_deepspeeds_runner_on_two_hosts(hosts, whole, environment, tmp_path):
    """By pdsh. Nothing of the recipe passes its shells."""
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh here (Debian: apt-get install pdsh)")
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=2\n")
    folder = tmp_path / "run"
    session = {name: environment[name] for name in SESSION if name in environment}
    session |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    session |= {name: environment[name] for name in marked()}
    options = ["--hostfile", "hosts", "--include", "node-a@node-b:1"]
    with ExitStack() as running:
        for name in ("node-a", "node-b"):
            running.enter_context(hosts.sshd(name, 22, session))
        first = Run(hosts, folder, environment, *options)
        first.is_training()
        first.terminate()
        output = first.end(75, seconds=120)
        assert output.splitlines()[-1].startswith("ds-distill: stopped by SIGTERM.")
        assert within(30, partial(only_sshd, environment))
        second = Run(hosts, folder, environment, *options, "--resume")
        second.is_training()
        rank(environment, 1).kill()
        assert "the run stopped: rank 1 on node-b: it " in second.end(1, seconds=180)
        assert within(60, partial(only_sshd, environment))
        Run(hosts, folder, environment, *options, "--resume").end(0)
    assert json.loads((folder / "environment.json").read_text())["ranks"] == 2
    check_same(folder, whole)
    assert not list(tmp_path.rglob("canary"))


def only_sshd(environment: dict[str, str]) -> bool:
    return all(one.name() == "sshd" for one in left_of(environment))
