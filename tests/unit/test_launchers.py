"""The scripts of launchers/ hand on every argument as it is, and what they call is there."""

import json
import os
import sys
from pathlib import Path

import pytest
import typer.main
import yaml
from processes import ended

from ds_distill.cli import app

LAUNCHERS = Path(__file__).parents[2] / "launchers"
ODD = "name=a b;$(touch x)`touch x`{1,2}*'\""
CASES = yaml.safe_load(Path(__file__).with_name("launchers.yaml").read_text(encoding="utf-8"))

STAND_INS = {
    "ds-distill": f"""#!{sys.executable}
import json, os, sys
print(json.dumps(sys.argv[1:]))
sys.exit(int(os.environ.get("CODE", 0)))
""",
    "srun": '#!/bin/sh\nshift 3; exec "$@"',
    "scontrol": """#!/bin/sh
[ $2 = hostnames ] && exec echo node1
[ $1 = show ] && exec echo JobId=7 JobState=$STATE
echo "scontrol $*"
""",
}


@pytest.fixture
def output(tmp_path, command_environment):
    """Run a script with stand-ins for what it calls."""
    for program, text in STAND_INS.items():
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    environment = {**command_environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}

    def run(name, *given, code=0, **more):
        env = environment | more
        return ended("bash", LAUNCHERS / name, *given, code=code, env=env, cwd=tmp_path).stdout

    return run


def test_every_script_is_tried():
    scripts = {path.name for path in LAUNCHERS.iterdir() if "example" not in path.name}
    assert scripts == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_script_starts_a_launch(name, output, tmp_path):
    given, expected = (
        [ODD if word == "$odd" else word for word in CASES[name][key]]
        for key in ("given", "launches")
    )
    assert json.loads(output(name, *given)) == ["launch", *expected]
    assert not (tmp_path / "x").exists()
    commands = typer.main.get_command(app)
    commands.commands["launch"].make_context("launch", expected)  # it has these options
    assert "usage:" in ended("bash", LAUNCHERS / name, code=1).stderr
    assert os.access(LAUNCHERS / name, os.X_OK) or name.endswith(".sbatch")


def test_a_job_is_queued_again_after_75_unless_it_was_cancelled(output):
    given = ("slurm.sbatch", "my.yaml", "/shared/run")
    ended = output(*given) + output(*given, code=3, CODE="3")
    assert "requeue" not in ended + output(*given, code=75, CODE="75", STATE="COMPLETING")
    assert output(*given, CODE="75", STATE="RUNNING").splitlines()[-1] == "scontrol requeue 7"
