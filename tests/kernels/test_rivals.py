"""The benchmark's rivals compute what ours computes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import problems
import pytest
import torch
import torch.nn.functional as F
from cases import INTERPRETED
from torch import Tensor

OF_PROBABILITIES = "transformers.fused_linear_kl_div.LigerFusedLinearKLDivLoss"


class OfProbabilities:
    """What Liger documents of its class: `torch.nn.KLDivLoss` of the student's tempered logits."""

    def __init__(self, reduction: str, temperature: float) -> None:
        self.reduction, self.temperature = reduction, temperature

    def __call__(self, hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        logs = (F.linear(hidden, head) / self.temperature).log_softmax(-1)
        return F.kl_div(logs, target, reduction=self.reduction)


def toy_linear_kl() -> problems.Problem:
    torch.manual_seed(0)
    return problems.linear_kl(64, 40, 24, 16, torch.float32, torch.device("cpu"))


def check(problem: problems.Problem, name: str) -> None:
    """Loss and gradients, in float32 to the rounding of its sums."""
    found = []
    for path in (name, "ds_kernels"):
        loss = problem.paths[path](problem.leaves, problem.fixed)
        found.append([loss, *torch.autograd.grad(loss, problem.leaves)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("installed", [True, False])
def test_ligers_loss_of_probabilities(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older Liger has none: no path then."""
    classes: dict[str, Any] = {OF_PROBABILITIES: OfProbabilities} if installed else {}
    monkeypatch.setattr(problems, "_liger", classes.get)
    monkeypatch.setattr(problems, "INTERPRETED", True)  # where its kernels can run
    problem = toy_linear_kl()
    assert ("liger_kl_compact" in problem.paths) == installed
    if installed:
        check(problem, "liger_kl_compact")


@pytest.mark.skipif(not INTERPRETED or find_spec("liger_kernel") is None, reason="needs Liger")
@pytest.mark.parametrize("name", ["liger_compact", "liger_kl_compact", "liger_chunked_compact"])
def test_ligers_own(name: str) -> None:
    check(toy_linear_kl(), name)


@pytest.mark.skipif(INTERPRETED, reason="this is the process in the interpreter")
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_ligers_own_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--import-mode=importlib", str(Path(__file__)), "-k", "own"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0 and "3 passed" in run.stdout, run.stdout[-4000:]
