"""Run the ops' tests on their Triton kernels in Triton's interpreter, in a process of its own:
TRITON_INTERPRET must be set before Triton is imported, and holds for the whole process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import INTERPRETED

pytest.importorskip("triton", reason="the interpreter needs Triton")
HERE = Path(__file__).parent


@pytest.mark.skipif(INTERPRETED, reason="this is the process in the interpreter")
@pytest.mark.parametrize("module", ["test_ops.py", "test_edges.py"])
def test_triton_kernels_in_the_interpreter(module: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--import-mode=importlib", "-o", "addopts=", str(HERE / module)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 30, done.stdout[-500:]
