"""Recipes whose data come from several places, or are windows of long texts, from end to end."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from e2e.test_data import examples, write


def test_a_transfer_set_of_random_text_from_other_data(
    toy_settings: dict[str, Any], toy_task: Path, ds_distill: Any, tmp_path: Path
) -> None:
    shutil.copytree(toy_task, tmp_path / "sets" / "toy")
    (tmp_path / "sets" / "toy" / "transfer.jsonl").rename(tmp_path / "sets" / "other.jsonl")
    settings = copy.deepcopy(toy_settings)
    random = {"path": "data:other.jsonl", "labels": "none", "randomise": {"seed": 1}}
    data = {"path": "data:toy", "splits": {"transfer": random}, "limit": {"transfer": 50}}
    settings["task"]["data"] = data
    settings["training"]["epochs"] = 1
    write(tmp_path, settings)
    refused = ds_distill("check", "recipe.yaml", cwd=tmp_path)
    assert refused.returncode == 2 and "data_folder=DIR" in refused.stderr
    done = ds_distill("run", "recipe.yaml", "data_folder=sets", "--folder", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    transfer = examples(tmp_path / "run", "transfer")
    assert len(transfer) == 50 and set(transfer["label"][:]) == {-1}
    real = [json.loads(line)["text"] for line in (tmp_path / "sets" / "other.jsonl").open()]
    words = {word for text in real for word in text.split()}
    assert not set(transfer["text"][:]) & set(real)
    assert {word for text in transfer["text"][:] for word in text.split()} <= words
