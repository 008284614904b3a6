"""Ranks end with the launcher of others that has started them, also when that is killed and cannot
see to it. test_launch.py kills our own."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from processes import events, left_of, marked, within
from runs import written

from ds_distill.process.identity import free_port

SCRIPTS = Path(sys.executable).parent
RUN = ["-m", "ds_distill", "run", "toy.yaml"]


def commands(folder):
    """How a user starts two ranks of a run in a folder of each launcher."""
    port = str(free_port())
    python, script = sys.executable, [sys.executable, str(SCRIPTS / "deepspeed")]
    return {
        "deepspeed": [
            *(*script, "--num_gpus", "2", "--master_port", port, "--module", "ds_distill", "run"),
            *("toy.yaml", "--folder", str(folder / "deepspeed")),
        ],
        "torchrun": [
            *(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(*RUN, "--folder", str(folder / "torchrun")),
        ],
    }


def test_a_killed_launcher_leaves_nothing(toy_settings, command_environment, tmp_path):
    """One of its processes, the one that a user knows of, is killed in mid-training."""
    training = {**toy_settings["training"], "epochs": 1000}
    written({**toy_settings, "training": training}, tmp_path, "toy")
    environments = {}
    started = {}
    try:
        for name, command in commands(tmp_path).items():
            path = f"{SCRIPTS}:{os.environ['PATH']}"
            environments[name] = {**command_environment, **marked(), "PATH": path}
            with (tmp_path / f"{name}.log").open("w") as log:
                how = {"env": environments[name], "cwd": tmp_path, "stdout": log, "stderr": log}
                started[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, **how)
        for name, process in started.items():
            folder = tmp_path / name

            def trains(folder=folder, process=process):
                assert process.poll() is None, (tmp_path / f"{folder.name}.log").read_text()
                return any("loss" in event for event in events(folder))

            assert within(240, trains), (tmp_path / f"{name}.log").read_text()
            environment = environments[name]
            ranks = [one for one in left_of(environment) if "RANK" in one.environ()]
            assert len({one.environ()["RANK"] for one in ranks}) == 2
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            gone = within(5, lambda: not left_of(environment))  # noqa: B023
            assert gone, (name, [one.cmdline() for one in left_of(environment)])
    finally:
        for environment in environments.values():
            for one in left_of(environment):
                with suppress(psutil.Error):
                    one.kill()
