"""Jobs of Slurm on two hosts: `launchers/slurm.sbatch`, and ranks as tasks of srun."""

import os
import shutil
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import left_of, within
from runs import DS_DISTILL, SETTINGS, after_steps, check_same, digests
from two_hosts.launches import SHARDED, rank
from two_hosts.network import PATH

SCRIPT = Path(__file__).parents[2] / "launchers" / "slurm.sbatch"
DAEMONS = ("munged", "slurmctld", "slurmd")

CONFIGURATION = """
ClusterName=two
SlurmctldHost=login({login})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName=node-a NodeAddr={a} CPUs=2 RealMemory=1000
NodeName=node-b NodeAddr={b} CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""

SLURMD = """exec nsenter --target "$0" --net --pid --uts -- unshare --mount sh -c '
mount -t proc proc /proc && mount --bind "$0" /etc/hosts && exec slurmd -D -N "$1"' "$1" "$2" """
"""On a host, but with this machine's /sys: it looks for control groups there, also to use none."""


class Slurm:
    """Its commands, on the login host."""

    def __init__(self, hosts, folder, environment):
        self.hosts = hosts
        self.environment = {**environment, "SLURM_CONF": str(folder / "slurm.conf"), "RANKS": "1"}
        self.environment["PATH"] = f"{Path(DS_DISTILL[0]).parent}:{PATH}"

    def __call__(self, *command):
        done = subprocess.run(
            self.hosts.at("login", *command), env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job):
        return self("scontrol", "--oneliner", "show", "job", job).split("JobState=")[1].split()[0]

    @staticmethod
    def is_training(folder):
        """Wait for some steps more."""
        more = after_steps(8, 0.0)
        assert within(300, lambda: more(folder)), Path(f"{folder}.log").read_text()

    def submit(self, folder):
        output = [f"--output={folder}.log", f"--chdir={folder.parent}"]
        work = [folder, *SETTINGS, *SHARDED]
        return self("sbatch", "--parsable", "--nodes=2", *output, SCRIPT, "toy.yaml", *work)


@contextmanager
def daemon(command, environment):
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def slurm(hosts, environment, tmp_path):
    for name in DAEMONS:
        if shutil.which(name, path=PATH) is None:
            pytest.skip(f"no {name} here (Debian: apt-get install slurm-wlm)")
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    names = {"login": "login", "a": "node-a", "b": "node-b"}
    addresses = {key: hosts.address(name) for key, name in names.items()}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, **addresses))
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    found = Slurm(hosts, folder, environment)
    where = [f"--socket={folder}/munge", f"--key-file={folder}/key", f"--pid-file={folder}/m.pid"]
    where += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed", "--force"]
    with ExitStack() as running:
        start = (
            hosts.at("login", "munged", "--foreground", *where),
            hosts.at("login", "slurmctld", "-D"),
            *(
                ["sh", "-c", SLURMD, str(hosts.holders[name]), hosts.etc_hosts(name), name]
                for name in ("node-a", "node-b")
            ),
        )
        plain = {**os.environ, "SLURM_CONF": found.environment["SLURM_CONF"], "PATH": PATH}
        for command in start:
            running.enter_context(daemon(command, plain))
        ready = within(60, lambda: found("sinfo", "--noheader", "-o", "%D %T") == "2 idle")
        assert ready, found("sinfo", "--long", "--Node")
        yield found


def test_a_job_that_is_stopped_is_queued_again_and_goes_on(slurm, whole, environment, tmp_path):
    """A rank is killed in it, too."""
    folder = tmp_path / "run"
    job = slurm.submit(folder)
    slurm.is_training(folder)
    slurm("scancel", "--signal=TERM", job)  # as Slurm itself before the time is over
    assert within(120, lambda: slurm.state(job) == "PENDING"), Path(f"{folder}.log").read_text()
    slurm("scontrol", "update", f"jobid={job}", "StartTime=now")
    slurm.is_training(folder)
    rank(environment, 1).kill()
    assert within(300, lambda: slurm.state(job) == "COMPLETED"), Path(f"{folder}.log").read_text()
    check_same(folder, whole)
    assert within(30, lambda: not left_of(environment))


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(
    slurm, toy_recipe, environment, tmp_path
):
    folder = tmp_path / "run"
    job = slurm.submit(folder)
    slurm.is_training(folder)
    slurm("scancel", job)
    assert within(120, lambda: not left_of(environment))
    assert within(30, lambda: slurm.state(job) == "CANCELLED")
    assert "Continue with: " in Path(f"{folder}.log").read_text()


def test_ranks_are_tasks_of_srun(slurm, whole, environment, tmp_path):
    folder = tmp_path / "run"
    run = [*DS_DISTILL, "run", "toy.yaml", *SETTINGS, *SHARDED, "--folder", folder]
    slurm("srun", "--nodes=2", "--ntasks=2", f"--chdir={tmp_path}", *run)
    assert digests(folder) == digests(whole)
    assert within(30, lambda: not left_of(environment))
