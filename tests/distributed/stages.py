"""Scenarios of one engine on ranks, and what must be true of each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from safetensors.torch import load_file
from warm import Warm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from reference import LOW, SCENARIOS, max_grad_norm, plain_loop  # noqa: E402

FP32, BF16, FP16 = 1e-4, 1.5e-3, 1e-3
"""Relative tolerance of losses. In bf16 a sum over other parts is rounded otherwise: 6e-5 was the
largest difference seen on a processor that computes in it, and others round otherwise. Where Adam
counted a step too many it was 2.4e-3."""

WEIGHTS = 1e-5
"""Absolute tolerance of final weights, a hundredth of the largest rate. Adam divides a gradient by
its own size, rounding included, so that one tolerance holds for all weights; 7e-7 was the
largest difference seen."""

ALL = [*SCENARIOS, *LOW]

BASES = ["zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3_fp32", "zero0_bf16", "partial_zero3"]
"""What others of a launch are compared with."""


class Launch:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, Any] = json.loads((folder / "results.json").read_text())

    def losses(self, scenario: str) -> list[dict[str, float]]:
        return self.results[scenario]["losses"]

    def tensors(self, scenario: str, what: str) -> dict[str, Any]:
        return load_file(self.folder / f"{scenario}-{what}.safetensors")


def launch(folder: Path, ranks: int, scenarios: list[str], warm: Warm) -> Launch:
    path = [HERE, HERE.parent, HERE.parents[1] / "tools/benchmarks"]
    path += filter(None, [warm.environment.get("PYTHONPATH")])
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    run_ranks([str(HERE / "stages_worker.py"), str(folder), *scenarios], ranks, warm, folder, more)
    port = (folder / "port").read_text()
    left = list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
    assert not left, "shared memory is left behind"
    launched = Launch(folder)
    assert launched.results.keys() == {*scenarios}
    return launched


def assert_same_losses(
    first: list[dict[str, float]], second: list[dict[str, float]], tolerance: float
) -> None:
    assert len(first) == len(second) > 0
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance), (step, name)


def assert_fp16_as_fp32(run: Launch, stage: int) -> None:
    assert_same_losses(run.losses(f"zero{stage}_fp16"), run.losses(f"zero{stage}_fp32"), FP16)
    assert run.losses(f"zero{stage}_fp16") != run.losses(f"zero{stage}_fp32")


def assert_equals_a_plain_loop(run: Launch, scenario: str) -> None:
    """Losses of all steps, the gradient of the first over all rows together, and the weights
    after the last: what clipping, weight decay and the schedule made of the gradients."""
    about = SCENARIOS[scenario]
    plain = plain_loop(about.task, about.batches, about.policy)
    assert_same_losses(run.losses(scenario), plain.losses, FP32)
    ours = run.tensors(scenario, "gradients")
    # What no term reads has a gradient of 0 at all stages, and rests.
    assert not any(ours.pop(name).any() for name in ours.keys() - plain.gradients.keys())
    assert ours.keys() == plain.gradients.keys()
    largest = max(gradient.abs().max() for gradient in plain.gradients.values())
    for name, gradient in plain.gradients.items():
        # One scale for all: some gradients are zero but for rounding (a key's bias).
        assert (ours[name] - gradient).abs().max() < 1e-5 * largest, name
    limit = max_grad_norm(about.task, about.batches)
    assert min(plain.norms) < 0.99 * limit and max(plain.norms) > 1.01 * limit, plain.norms
    ours = run.tensors(scenario, "weights")
    assert ours.keys() == plain.weights.keys()
    for name, weight in plain.weights.items():
        assert (ours[name] - weight).abs().max().item() < WEIGHTS, name


def assert_teachers_stay_as_they_are(run: Launch) -> None:
    for scenario, result in run.results.items():
        assert result["teachers_unchanged"], scenario
        assert result["teachers_in_eval"], scenario
        assert result["student_in_train"], scenario
