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


LATER = " or ".join(
    (
        "(rows_begin_anywhere and not masked_kl-widths4)",
        *("strides", "hinge", "autocast", "nan_in", "gradcheck", "repeated"),
        "((above_eager or teacher_equals) and torch.float)",  # bfloat16 stays, and the formula's
    )
)
"""Most of the time, for what the others show of other numbers."""

# Two processes at once: the kernels of attention scores take as long as all others.
SCORES = "attention or relation"
PARTS = {
    "an example of each": [f"({SCORES}) and not ({LATER})", f"not ({SCORES} or {LATER})"],
    "the others": [f"({SCORES}) and ({LATER})", f"not ({SCORES}) and ({LATER})"],
}


@pytest.mark.skipif(INTERPRETED, reason="this is the process in the interpreter")
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(parts, id=name, marks=[] if "each" in name else [pytest.mark.further])
        for name, parts in PARTS.items()
    ],
)
def test_triton_kernels_in_the_interpreter(parts: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "-o", "addopts=", "-m", "not slow"]
    command += [str(HERE / f"test_{name}.py") for name in ("ops", "edges", "indices")] + ["-k"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    runs = [
        subprocess.Popen([*command, part], stdout=pipe, stderr=pipe, text=True, env=environment)
        for part in parts
    ]
    for run in runs:
        out, errors = run.communicate()
        assert run.returncode == 0, out[-6000:] + errors[-2000:]
        passed = re.search(r"(\d+) passed", out)
        assert passed and int(passed[1]) > 5, out[-500:]
