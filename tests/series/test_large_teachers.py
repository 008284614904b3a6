"""Three real-size 24-layer teachers in one engine on two CPU ranks."""

import json
import os
import sys
from pathlib import Path

import large_teachers
import psutil
import pytest
from processes import ended

from ds_distill.process.identity import free_port

RESULTS = Path(__file__).parents[1] / "results" / "large-teachers.json"

NEEDED_BYTES = 15 * 2**30


def test_the_launchers_own_argument_is_taken():
    """deepspeed gives each rank its number, in front of the module's arguments."""
    assert large_teachers.parse(["--local_rank=1", "--layers", "2"]).layers == 2


def test_three_large_teachers_are_sharded(tmp_path):
    if psutil.virtual_memory().available < NEEDED_BYTES:
        pytest.skip("needs 15 GiB of free memory")
    keep = os.environ.get("DS_DISTILL_WRITE_RESULTS") == "1"
    output = RESULTS if keep else tmp_path / "held.json"
    command = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", "2", "--master_port"]
    command += [free_port(), large_teachers.__file__, "--output", output]
    environment = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}
    done = ended(*command, env={**os.environ, **environment}, timeout=900)
    measured = json.loads(output.read_text())
    assert len(measured["steps"]) == 2
    assert all(0 < step["loss"] < 10 for step in measured["steps"])
    sizes = {"bert-large": 335e6, "roberta-large": 355e6, "deberta-v3-large": 435e6}
    for name, expected in sizes.items():
        numel = measured["parameters"][name]
        assert numel == pytest.approx(expected, rel=0.01)
        for rank in measured["ranks"]:
            assert rank["teacher_bytes"][name] == pytest.approx(2 * numel / 2, rel=0.02)
            assert rank["peak_bytes"] > 0
            assert f"{name}" in done.stdout
