"""The scripts of launchers/ hand on every argument as it is, and what they call is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ds_distill.cli import app

LAUNCHERS = Path(__file__).parents[2] / "launchers"
ODD = "name=a b;$(touch x)`touch x`{1,2}*'\""

CASES = {
    "local.sh": (
        ["my.yaml", "8", ODD, "--resume"],
        ["my.yaml", "--num-gpus", "8", ODD, "--resume"],
    ),
    "multi_node.sh": (
        ["my.yaml", "hosts", "/shared/run", ODD, "--exclude", "node2"],
        ["my.yaml", "--hostfile", "hosts", "--folder", "/shared/run", ODD, "--exclude", "node2"],
    ),
    "each_node.sh": (
        ["2:3", "10.0.0.1:29400", "8", "my.yaml", "/shared/run", ODD],
        [
            *("my.yaml", "--num-gpus", "8", "--nnodes", "2:3", "--rdzv-endpoint"),
            *("10.0.0.1:29400", "--max-restarts", "3", "--folder", "/shared/run", ODD),
        ],
    ),
    "slurm.sbatch": (
        ["my.yaml", "/shared/run", ODD],
        [
            *("my.yaml", "--folder", "/shared/run", "--resume=auto", "--nnodes", "2"),
            *("--num-gpus", "8", "--rdzv-endpoint", "node1:10007", "--max-restarts", "3"),
            *("--grace", "100", ODD),
        ],
    ),
}
"""Arguments of each script, and those of `ds-distill launch` in it."""


def test_every_script_is_tried():
    scripts = {path.name for path in LAUNCHERS.iterdir() if "example" not in path.name}
    assert scripts == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_script_starts_a_launch(name, tmp_path, command_environment):
    given, expected = CASES[name]
    stand_in = tmp_path / "ds-distill"
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o755)
    environment = {**command_environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for name_of, text in (("srun", 'shift 3; exec "$@"'), ("scontrol", "echo node1")):
        (tmp_path / name_of).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name_of).chmod(0o755)
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(LAUNCHERS / name), *arguments]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True
        )

    done = run(*given)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["launch", *expected]
    assert not (tmp_path / "x").exists()
    commands: Any = typer.main.get_command(app)
    commands.commands["launch"].make_context("launch", expected)  # it has these options
    assert "usage:" in run().stderr
    assert os.access(LAUNCHERS / name, os.X_OK) or name.endswith(".sbatch")
