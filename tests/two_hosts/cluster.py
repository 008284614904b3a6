"""A Slurm of two nodes on one machine: Debian's slurm-wlm and munge, as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from two_hosts.network import PATH, TwoHosts, inner

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel", "scontrol")


SLURMD = """
mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/freezer &&
exec unshare --pid --fork --kill-child --mount-proc slurmd -D -N "$0" -f "$1"
"""
"""It starts on no machine without control groups, which nothing here uses. Its process ids are its
own, as those of a node are."""


@contextmanager
def slurm(hosts: TwoHosts, folder: Path) -> Iterator[dict[str, str]]:
    """Start it on the login host: the environment of its commands."""
    for tool in TOOLS:
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"no {tool} here (Debian: apt-get install slurm-wlm munge)")
    settings = folder / "slurm.conf"
    settings.write_text(_settings(folder))
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null\n")
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(settings)}
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    folder.chmod(0o755)
    at = [f"--{name}={folder / 'munge'}.{name}" for name in ("pid-file", "seed-file", "log-file")]
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", *at]
    with ExitStack() as running:
        for command in (
            [*munge, f"--socket={folder / 'munge.socket'}"],
            ["slurmctld", "-D", "-i", "-f", str(settings)],
            *(
                ["unshare", "--mount", "sh", "-c", SLURMD, node, str(settings)]
                for node in ("node1", "node2")
            ),
        ):
            running.enter_context(_daemon(hosts, command, environment))
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while "2" not in _idle_nodes(hosts, environment):
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            assert time.monotonic() < deadline, logs
            time.sleep(0.5)
        yield environment


def _settings(folder: Path) -> str:
    node = "NodeHostname=login NodeAddr=login CPUs=2 Gres=gpu:1"
    return f"""
ClusterName=test
SlurmctldHost=login
SlurmctldPort=17000
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
GresTypes=gpu
NodeName=node[1-2] Port=[17001-17002] {node}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _idle_nodes(hosts: TwoHosts, environment: dict[str, str]) -> str:
    command = hosts.at("login", "sinfo", "--noheader", "--states=idle", "--format=%D")
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


@contextmanager
def _daemon(hosts: TwoHosts, command: list[str], environment: dict[str, str]) -> Iterator[None]:
    log = Path(environment["SLURM_CONF"]).with_name(f"{command[0]}.output.log")
    with log.open("a") as output:
        process = subprocess.Popen(
            hosts.at("login", *command), env=environment, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        inner(process).terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
