"""`ds-distill sweep`: shared phases run once, every run is what it would be alone, a stopped sweep
goes on, and a run that fails leaves the others be."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

SETTINGS = ["seed=1,2", "phases.distil.learning_rate=1e-2,1e30"]
"""Under the second rate the loss is not finite."""
GOOD = ["seed=1,learning_rate=1e-2", "seed=2,learning_rate=1e-2"]


@pytest.fixture
def recipe(toy_settings: dict[str, Any], tmp_path: Path) -> Path:
    settings = copy.deepcopy(toy_settings)
    del settings["teachers"]["second"]
    distil = {"split": "transfer", "teachers": "cached", "losses": {"kl": {}}, "epochs": 2}
    teach = {"models": "first", "epochs": 2}
    phases = [{"fine-tune": teach}, {"cache": {"splits": "transfer"}}, {"distil": distil}]
    settings |= {"phases": [*phases, {"evaluate": {"split": "test"}}], "logging": {"every": 1}}
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def test_a_sweep_is_stopped_and_continued_and_tells_what_failed(
    recipe: Path, tmp_path: Path, ds_distill: Any, command_environment: dict[str, str]
) -> None:
    folder = tmp_path / "sweep"
    command = ["sweep", str(recipe), *SETTINGS, "--folder", str(folder), "--jobs", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "ds_distill", *command],
        env=command_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as stopped:
        until = time.monotonic() + 120
        while not list(folder.glob("shared/*/models/*")) and time.monotonic() < until:
            time.sleep(0.1)
        stopped.send_signal(signal.SIGINT)
        _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, errors
    assert "Continue with: " in errors and "--resume" in errors
    assert not list(folder.glob("*/*/lock.json")), "a run goes on"

    done = ds_distill(*command, "--resume")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("2 of them share, and run once: fine-tune, cache") == 2
    assert done.stdout.count("failed with exit code 2") == 2
    found = json.loads((folder / "results.json").read_text())
    assert found["missing"] == [name.replace("1e-2", "1e30") for name in GOOD]
    [row] = found["settings"]
    assert row["seeds"] == ["1", "2"] and row["score"]["interval"] is not None
    for name in GOOD:
        # Of shared phases nothing ran again; weights are gone, the rest of a run is there.
        assert "fine-tune: done before" in (folder / "logs" / f"{name}.txt").read_text()
        run = folder / "runs" / name
        assert (run / "report.html").is_file() and not (run / "models").exists()

    other = ds_distill("sweep", recipe, "seed=1,2", "--folder", folder, "--resume")
    assert other.returncode == 2 and "other settings" in other.stderr

    rest = ["seed=2", "phases.distil.learning_rate=1e-2", "--folder", tmp_path / "alone"]
    assert ds_distill("run", recipe, *rest).returncode == 0
    ours, alone = folder / "runs" / GOOD[1], tmp_path / "alone"
    assert judged(ours) == judged(alone)
    assert events(ours) == events(alone)


def judged(run: Path) -> dict[str, Any]:
    phases = json.loads((run / "results.json").read_text())["phases"]
    [models] = [one["models"] for one in phases if one["kind"] == "evaluate"]
    return dict(models)


def events(run: Path) -> list[tuple[str, int, float]]:
    """Every loss of every training."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(one["phase"], one["step"], one["loss"]) for one in lines if one["event"] == "train"]
