"""Routing that learns: fitted, compared, chosen and followed, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, toy_settings: dict[str, Any], ds_distill: Any
) -> Path:
    """A run whose table comes from the cache, with students of cached and of live teachers."""
    here = tmp_path_factory.mktemp("here")
    how = {"split": "transfer", "epochs": 1, "losses": {"kl": {"temperature": 2.0}}}
    phases = [
        *toy_settings["phases"][:2],
        {"cache": {"splits": ["validation", "transfer"], "hidden": [-1], "dtype": "float32"}},
        {"expertise": {"split": "validation"}},
        {"distil": {**how, "teachers": "cached", "routing": ["gate", "chosen"]}},
        {"distil": {**how, "teachers": "live", "routing": "gate", "save_as": "live-gate"}},
        {"evaluate": {"split": "test"}},
    ]
    settings = {**toy_settings, "phases": phases}
    (here / "toy.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    done = ds_distill("run", "toy.yaml", "--folder", "run", cwd=here)
    assert done.returncode == 0, done.stderr
    return here


def losses(folder: Path, student: str) -> list[float]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [e["loss"] for e in events if e["event"] == "train" and e["phase"] == student]


def test_the_choice_is_recorded_shown_and_followed(finished):
    run = finished / "run"
    record = json.loads((run / "phases" / "03-expertise.json").read_text())
    comparison = record["comparison"]
    assert comparison == json.loads((run / "routing.json").read_text())
    assert comparison["choice"] in comparison["policies"]
    page = (run / "report.html").read_text()
    assert "Which target is right?" in page
    assert f"{comparison['choice']} (chosen)" in page
    with safe_open(run / "routing.safetensors", "pt") as file:
        assert "gate.weight" in file.keys()  # noqa: SIM118
    if comparison["choice"] == "gate":
        assert losses(run, "chosen") == losses(run, "gate")


def test_the_gate_reads_the_same_from_the_cache_as_from_live_teachers(finished):
    cached, live = losses(finished / "run", "gate"), losses(finished / "run", "live-gate")
    assert len(cached) > 0
    assert cached == pytest.approx(live, rel=1e-3)


def test_route_tells_the_same_as_the_run_and_changes_nothing(finished, ds_distill):
    run = finished / "run"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = ds_distill("route", "toy.yaml", "--folder", "run", cwd=finished)
    assert done.returncode == 0, done.stderr
    comparison = json.loads((run / "routing.json").read_text())
    assert f"Choice: {comparison['choice']}." in done.stdout
    for name, score in comparison["policies"].items():
        [line] = [line for line in done.stdout.splitlines() if line.startswith(f"  {name}  ")]
        assert f"{score['accuracy']:.1%}" in line
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
