"""Run the ops' tests on their Triton kernels in Triton's interpreter, in a process of its own:
TRITON_INTERPRET must be set before Triton is imported, and holds for the whole process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import CASES, INTERPRETED

pytest.importorskip("triton", reason="the interpreter needs Triton")
HERE = Path(__file__).parent

MARKED = "interpreted"


@pytest.mark.skipif(INTERPRETED, reason="this is the process in the interpreter")
def test_an_example_of_each_kernel_in_the_interpreter():
    interpret([["-m", MARKED]])


def interpret(parts):
    """Run the ops' tests that these options choose, each in a process of its own, at once."""
    command = [sys.executable, "-m", "pytest", "-rp", "--no-header", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "-o", "addopts="]
    command += [str(HERE / f"test_{name}.py") for name in ("ops", "edges", "indices")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    runs = [
        subprocess.Popen([*command, *part], stdout=pipe, stderr=pipe, text=True, env=environment)
        for part in parts
    ]
    for run, part in zip(runs, parts, strict=True):
        out, errors = run.communicate()
        assert run.returncode == 0, out[-6000:] + errors[-2000:]
        (chosen,) = re.findall(r"(\d+) selected", out)
        # What is chosen by its mark is never left out; of the others, what no kernel is part of.
        ended = r"(\d+) passed" if MARKED in part else r"(\d+) (?:passed|skipped|xfailed)\b"
        assert sum(map(int, re.findall(ended, out.splitlines()[-1]))) == int(chosen), out[-500:]
        if MARKED in part:
            cases = {
                *re.findall(r"^PASSED .*::test_error_is_not_above_eager\[cpu-(\w+)-", out, re.M)
            }
            assert cases == {case.name for case in CASES}
