"""A job of two nodes under a real Slurm: submitted, cancelled in the middle, submitted again."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from processes import MARK, left_of, marked
from runs import DS_DISTILL, SETTINGS, after_steps
from two_hosts.cluster import slurm
from two_hosts.network import TwoHosts

from ds_distill.files import read_json

LIMIT = 900


class Job:
    """`ds-distill launch --slurm --submit`, and the job."""

    def __init__(
        self, hosts: TwoHosts, folder: Path, environment: dict[str, str], *options: str
    ) -> None:
        self.hosts, self.environment, self.log = hosts, environment, folder.with_name("job.log")
        command = [*DS_DISTILL, "launch", "toy.yaml", *SETTINGS, "--folder", folder, "--slurm"]
        # Both nodes are this machine, so that the name of neither leads to the other.
        command += ["--nodes", "2", "--num-gpus", "1", "--master-addr", "login", "--grace", "5"]
        command += ["--env", MARK, "--sbatch", f"output={self.log}", "--submit", *options]
        output = self.run(*command, cwd=folder.parent)
        assert output.splitlines()[-1].startswith("Submitted batch job "), output
        self.number = output.split()[-1]

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        done = subprocess.run(
            self.hosts.at("login", *command),
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self) -> str:
        shown = self.run("scontrol", "show", "job", self.number)
        return next(word for word in shown.split() if word.startswith("JobState=")).split("=")[1]

    def wait_for(self, *states: str) -> None:
        deadline = time.monotonic() + LIMIT
        while (state := self.state()) not in states:
            assert state in ("PENDING", "RUNNING", "COMPLETING"), self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(1)


def test_a_job_is_cancelled_and_goes_on(hosts, toy_recipe, command_environment, tmp_path):
    settings = tmp_path / "slurm"
    settings.mkdir()
    folder = tmp_path / "run"
    with slurm(hosts, settings) as commands:
        environment = {**command_environment, **marked(), "SLURM_CONF": commands["SLURM_CONF"]}
        environment["PATH"] = commands["PATH"]
        job = Job(hosts, folder, environment)
        moment = after_steps(8, 0.0)
        deadline = time.monotonic() + LIMIT
        while not moment(folder):
            assert job.state() in ("PENDING", "RUNNING"), job.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        job.run("scancel", job.number)
        job.wait_for("CANCELLED")
        deadline = time.monotonic() + 60
        while (left := left_of(environment)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert left == []
        assert not (folder / "results.json").exists()

        Job(hosts, folder, environment, "--resume").wait_for("COMPLETED")
    assert read_json(folder / "environment.json")["ranks"] == 2
    assert (folder / "results.json").is_file()
