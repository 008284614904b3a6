"""Agents on the nodes of a Slurm job, one task a node, and the job's script."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

from ds_distill.errors import UserError
from ds_distill.launch.hosts import Hosts
from ds_distill.process.ports import PORTS
from ds_distill.process.terminal import say


def in_job() -> bool:
    return "SLURM_JOB_ID" in os.environ


def job_hosts(num_gpus: int | None) -> Hosts:
    """The nodes of this process's job. num_gpus: per node; None: those that Slurm gave."""
    given = num_gpus or int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    if given == 0:
        raise UserError(
            "launch: --slurm: the job has no GPUs (SLURM_GPUS_ON_NODE is not set). Give the ranks "
            "per node with --num-gpus, or ask for GPUs: sbatch --gpus-per-node=8."
        )
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        capture_output=True,
        text=True,
        check=True,
    )
    return {host: list(range(given)) for host in listed.stdout.split()}


def job_port() -> int:
    """The same on all nodes, and another one for each job that may share them."""
    return PORTS[int(os.environ["SLURM_JOB_ID"]) % len(PORTS)]


def srun_command(hosts: Hosts, module: str) -> list[str]:
    """Run a module once on each node; its standard input goes to all. One that fails ends all."""
    # Since Slurm 22.05 srun does not take the job's CPUs per task, and gives one.
    cores = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE", "1")
    nodes = str(len(hosts))
    command = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node=1"]
    command += ["--kill-on-bad-exit=1", "--cpus-per-task", cores, "--cpu-bind=none"]
    return [*command, sys.executable, "-P", "-m", module]


def job_script(
    command: list[str], folder: str | None, nodes: int, num_gpus: int | None, options: list[str]
) -> str:
    """A script for sbatch that runs `ds-distill COMMAND` in a job, and queues it again after 75,
    with which a run ends that has saved its work, unless the job was cancelled.

    folder: of a run that needs --resume to be continued.
    options: of sbatch, without the dashes: `time=4:00:00`.
    """
    if num_gpus is None:
        raise UserError("launch: --slurm: give the GPUs of each node with --num-gpus.")
    if any("\n" in text for text in (*options, *command)):
        raise UserError("launch: --slurm: a line break in an argument; a script cannot hold it.")
    # With the variable the ranks stay on CPUs also where the job's nodes show GPUs to all.
    on_cpus = os.environ.get("DS_ACCELERATOR") == "cpu"
    own = any(text.startswith(("gpus", "gres=gpu")) for text in options)  # such as gres=gpu:a100:4
    asks_for_gpus = not (on_cpus or own) and _may_have_gpus(options)
    # Slurm's own options in `options` come later, and win.
    directives = [
        "job-name=ds-distill",
        "output=%x-%j.log",
        f"nodes={nodes}",
        "ntasks-per-node=1",
        *([f"gpus-per-node={num_gpus}"] if asks_for_gpus else []),
        "signal=B:TERM@120",
        "requeue",
        "open-mode=append",
        *options,
    ]
    lines = "\n".join(f"#SBATCH --{option}" for option in directives)
    program = shlex.join([sys.executable, "-P", "-m", "ds_distill", *command])
    variables = "export DS_ACCELERATOR=cpu\n" if on_cpus else ""
    resume = ""
    if folder is not None:
        recipe = shlex.quote(f"{folder}/recipe.yaml")
        resume = f"if [ -e {recipe} ]; then resume=(--resume); fi\n"
    return f"""#!/bin/bash
{lines}
cd {shlex.quote(os.getcwd())} || exit 1
{variables}resume=()
{resume}\
# In the background, so that this shell hands on the SIGTERM that Slurm sends it.
{program} "${{resume[@]}}" &
trap 'kill -TERM $!' TERM
wait $!
code=$?
while kill -0 $! 2>/dev/null; do
    wait $!
    code=$?
done
# A job that was cancelled ends with 75, too, and is not RUNNING by then.
if [ $code -eq 75 ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def _may_have_gpus(options: list[str]) -> bool:
    """Whether a job with these options of sbatch may get GPUs: not where Slurm lists none, and
    would refuse a job that asks for some."""
    if shutil.which("sinfo") is None:
        return True
    named = [text.partition("=")[2] for text in options if text.startswith("partition=")]
    # To sbatch a variable counts more than the script.
    partition = os.environ.get("SBATCH_PARTITION") or (named[-1] if named else None)
    # Without a partition all count: a cluster may choose one by what a job asks for.
    command = ["sinfo", "--all", "--noheader", "--format=%G"]
    command += [f"--partition={partition}"] if partition else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or not done.stdout.strip() or "gpu" in done.stdout:
        return True
    where = f"partition {partition}" if partition else "this cluster"
    say(f"Note: Slurm lists no GPUs of {where}: the script asks for none", error=True)
    return False


def submit(script: str) -> None:
    """Give a script to sbatch. Raises UserError with what sbatch says when it refuses."""
    if shutil.which("sbatch") is None:
        raise UserError("launch: --submit: no sbatch here. Run it on a login node of the cluster.")
    done = subprocess.run(["sbatch"], input=script, text=True, capture_output=True)
    if done.returncode != 0:
        raise UserError(f"launch: --submit: {done.stderr.strip()}")
    print(done.stdout.strip(), flush=True)
