"""Runs on two hosts: the same student as on one; stopped, lost and continued; and what is visible
of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import yaml
from processes import left_of, marked
from runs import DS_DISTILL, SETTINGS, after_steps, check_same, curves, digests
from two_hosts.network import TwoHosts, inner
from two_hosts.relay import Way

METACHARACTERS = "a b;c$(touch canary)`touch canary`{1,2}*?'\"\\&|<>~#!é"
CANARY = "canary-password-7f3a"
SHARDED = "deepspeed=zero3_fp32"
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
        self.environment = {**hosts.environment(environment), **marked()}
        command = [*DS_DISTILL, "launch", "toy.yaml", *SETTINGS, SHARDED, *options]
        # The mark travels to the ranks, so that none is overlooked.
        command += ["--env", "DS_DISTILL_TEST_MARK"] if "--hostfile" in options else []
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

    def left(self, seconds: float) -> list[psutil.Process]:
        deadline = time.monotonic() + seconds
        while (left := left_of(self.environment)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


class Watcher(threading.Thread):
    """Looks for a text in the command lines of all processes, until it is stopped."""

    def __init__(self, text: str) -> None:
        super().__init__(daemon=True)
        self.text, self.found, self.looks, self.stopped = text, set(), 0, False

    def run(self) -> None:
        while not self.stopped:
            for process in psutil.process_iter(["cmdline"]):
                line = " ".join(process.info["cmdline"] or [])
                if self.text in line:
                    self.found.add(line)
            self.looks += 1
            time.sleep(0.5)


def test_two_hosts(hosts, toy_recipe, command_environment, tmp_path):
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=2\n")
    (tmp_path / "swapped").write_text("node-b slots=2\nnode-a slots=1\n")
    session = {name: command_environment[name] for name in SESSION if name in command_environment}
    over_ssh = ["--hostfile", "hosts", "--include", "node-a@node-b:1", "--grace", "10"]
    over_ssh += ["--env", "WANDB_API_KEY", f"description={METACHARACTERS}"]
    secrets = {**command_environment, "WANDB_API_KEY": CANARY, "DB_PASSWORD": CANARY + "2"}
    whole, cut, one = tmp_path / "whole", tmp_path / "cut", tmp_path / "one"
    watcher = Watcher(CANARY)
    watcher.start()
    with ExitStack() as running:
        for name in ("node-a", "node-b"):
            running.enter_context(hosts.sshd(name, 22, {**session, "CUDA_VISIBLE_DEVICES": ""}))

        # Two runs side by side, over a bad cable; one is stopped and leaves nothing, the other goes
        # on.
        bad = Way(loss=0.02, delay=0.002)
        hosts.cable_of_b(bad, bad)
        first = Run(hosts, whole, secrets, *over_ssh)
        second = Run(hosts, cut, secrets, *over_ssh)
        second.is_training()
        second.terminate()
        output = second.end(75, seconds=60)  # with a checkpoint
        assert output.splitlines()[-1].startswith("ds-distill: stopped by SIGTERM.")
        assert second.left(seconds=30) == []
        assert CANARY not in output and CANARY not in first.end(0)

        hosts.cable_of_b()

        # Nothing comes to the host of rank 0 any more: all ends, and a word says why at once.
        swapped = ["swapped" if option == "hosts" else option for option in over_ssh]
        third = Run(hosts, cut, secrets, *swapped, "--resume")
        third.is_training()
        hosts.cable_of_b(there=Way(loss=1))
        begun = time.monotonic()
        output = third.end(1, seconds=120)
        assert third.left(seconds=120 - (time.monotonic() - begun)) == []
        hosts.cable_of_b()
        lost = "node-b: the connection was lost" in output
        assert lost or "node-a: " in output
        assert "Ending the ranks on the other hosts, within 10 seconds" in output
        assert "Continue with: ds-distill launch" in output and ".. " not in output

        # Its lock is left, and who continues is on another host.
        fourth = Run(hosts, cut, secrets, *over_ssh, "--resume")
        output = fourth.end(0)
        assert "Asking node-b whether process" in output or not lost
        check_same(cut, whole)
    watcher.stopped = True
    watcher.join()

    # One host gives the same.
    local = ["--num-gpus", "2", f"description={METACHARACTERS}"]
    Run(hosts, one, command_environment, *local).end(0)
    assert digests(one) == digests(whole) and curves(one) == curves(whole)

    # Every character arrived, none was a command; no secret is anywhere.
    assert yaml.safe_load((whole / "recipe.yaml").read_text())["description"] == METACHARACTERS
    assert json.loads((whole / "environment.json").read_text())["ranks"] == 2
    assert not list(tmp_path.rglob("canary"))
    assert watcher.looks > 10 and watcher.found == set()
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert CANARY.encode() not in file.read_bytes(), file
    assert first.left(seconds=10) == []


def test_what_does_not_come_through_is_the_networks(
    hosts, toy_recipe, command_environment, tmp_path
):
    """Large frames are lost on the way: both ranks are alive, and wait for each other. Then rank 0
    is killed, and a launch on another host goes on."""
    (tmp_path / "hosts").write_text("node-b slots=1\nnode-a slots=1\n")
    session = {name: command_environment[name] for name in SESSION if name in command_environment}
    options = ["--hostfile", "hosts", "--grace", "5", "timeout_minutes=0.4"]
    with ExitStack() as running:
        for name in ("node-a", "node-b"):
            running.enter_context(hosts.sshd(name, 22, {**session, "CUDA_VISIBLE_DEVICES": ""}))
        first = Run(hosts, tmp_path / "run", command_environment, *options)
        first.is_training()
        hosts.cable_of_b(Way(largest=700), Way(largest=700))
        output = first.end(1, seconds=180)
        hosts.cable_of_b()
        assert "See the network between node-b and node-a" in output, output
        assert "set timeout_minutes" not in output and ".. " not in output

        second = Run(hosts, tmp_path / "run", command_environment, *options, "--resume")
        second.is_training()
        holder = json.loads((tmp_path / "run" / "lock.json").read_text())["process"]
        assert holder["host"] == "node-b"
        subprocess.run(hosts.at("node-b", "kill", "-KILL", str(holder["pid"])), check=True)
        output = second.end(1, seconds=120)
        assert "Continue with: ds-distill launch" in output
        Run(hosts, tmp_path / "run", command_environment, *options, "--resume", host="node-a").end(
            0
        )


def test_without_ssh(hosts, toy_recipe, command_environment, tmp_path):
    """The same command on each host. The end of one is the end of the run."""
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    names = ("node-a", "node-b")

    def start(*more: str) -> list[Run]:
        options = ["--hostfile", "hosts", "--no-ssh", "--grace", "5", *more]
        return [
            Run(
                hosts,
                tmp_path / "run",
                command_environment,
                *(*options, "--node-rank", str(rank)),
                host=name,
            )
            for rank, name in enumerate(names)
        ]

    runs = start()
    runs[0].is_training()
    inner(runs[1].process).kill()
    output, _ = runs[0].process.communicate(timeout=120)
    # Its ranks get SIGTERM then, and save a checkpoint with those of the other host.
    assert runs[0].process.returncode == 75 and "Continue with: ds-distill launch" in output
    assert [run.left(seconds=30) for run in runs] == [[], []]
    for run in start("--resume"):
        run.end(0)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["ranks"] == 2
    assert (tmp_path / "run" / "results.json").is_file()


def test_deepspeeds_own_launcher(hosts, toy_recipe, command_environment, tmp_path):
    """By pdsh. docs/launching.md names what `ds-distill launch` does beyond it."""
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh here (Debian: apt-get install pdsh)")
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    folder = tmp_path / "run"
    session = {name: command_environment[name] for name in SESSION if name in command_environment}
    session |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    session["GLOO_SOCKET_IFNAME"] = "eth0"  # which `ds-distill launch` finds by itself
    deepspeed = [Path(sys.executable).with_name("deepspeed"), "--hostfile", "hosts"]
    deepspeed += ["--master_addr", hosts.address("node-a"), "--module", "ds_distill", "run"]
    with hosts.sshd("node-a", 22, session), hosts.sshd("node-b", 22, session):
        done = subprocess.run(
            hosts.at("login", *deepspeed, "toy.yaml", *SETTINGS, SHARDED, "--folder", folder),
            env=hosts.environment({**command_environment, "DS_ACCELERATOR": "cpu"}),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "environment.json").read_text())["ranks"] == 2
    assert (folder / "results.json").is_file()
