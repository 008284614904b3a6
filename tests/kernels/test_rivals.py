"""The benchmark's rivals compute what ours computes."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import problems
import pytest
import torch
from cases import INTERPRETED


def toy_linear_kl():
    torch.manual_seed(0)
    return problems.linear_kl(64, 40, 24, 16, torch.float32, torch.device("cpu"))


def check(problem, name):
    """Loss and gradients, in float32 to the rounding of its sums."""
    found = []
    for path in (name, "ds_kernels"):
        loss = problem.paths[path](problem.leaves, problem.fixed)
        found.append([loss, *torch.autograd.grad(loss, problem.leaves)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not INTERPRETED or find_spec("liger_kernel") is None, reason="needs Liger")
@pytest.mark.parametrize("name", ["liger_compact", "liger_kl_compact", "liger_chunked_compact"])
def test_ligers_own(name):
    check(toy_linear_kl(), name)


@pytest.mark.skipif(INTERPRETED, reason="this is the process in the interpreter")
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_ligers_own_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--import-mode=importlib", str(Path(__file__)), "-k", "own"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0 and "3 passed" in run.stdout, run.stdout[-4000:]
