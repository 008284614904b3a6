"""Teachers whose predictions are in a file."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import (
    alone_and_on_two_ranks,
    check_same_losses_on_two_ranks,
)
from unit.test_predictions import (
    logits_of,
    opened,
    with_answers,
)


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    count, draw = 200_000, random.Random(0)
    with (tmp_path / "large.jsonl").open("w") as file:
        for number in range(count):
            p = round(draw.random(), 6)
            row = {"text": f"text number {number}", "probabilities": [p, 1 - p, 0]}
            file.write(json.dumps(row) + "\n")
    tracemalloc.start()
    found = opened(tmp_path / "large.jsonl")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == count
    # 16 bytes of a key and 12 of logits, a few times; the file is 12 MB.
    assert most < 80e6
    [logits] = logits_of(found, f"text number {count - 1}")
    assert np.exp(logits)[0] == pytest.approx(p, abs=1e-5)


def test_on_two_ranks_rows_that_a_file_lacks_count_alike(
    toy_settings: dict[str, Any], ds_distill: Any, tmp_path: Path, in_this_process: None
) -> None:
    """At stage 0 on one rank and at stages 1, 2 and 3 on two, with a model and a file; and a lone
    file."""
    settings = {**with_answers(toy_settings, tmp_path, transfer=37), "logging": {"every": 1}}
    settings["training"] = {**settings["training"], "dropout": 0.0}
    root = tmp_path / "both"
    root.mkdir()
    folders = alone_and_on_two_ranks(settings, ds_distill, root)
    of_stages = [folders[2]]
    for stage in (1, 2):
        folder = root / f"stage-{stage}"
        parts = ["recipe.yaml", "--num-gpus", "2", "--folder", folder]
        done = ds_distill("launch", *parts, f"deepspeed=zero{stage}_fp32", cwd=root)
        assert done.returncode == 0, done.stdout + done.stderr
        of_stages.append(folder)
    for folder in of_stages:
        for student in ("average", "expertise"):
            check_same_losses_on_two_ranks({1: folders[1], 2: folder}, student)
    del settings["teachers"]["second"], settings["phases"][0], settings["phases"][1]
    settings["phases"][1]["distil"]["routing"] = "average"
    (tmp_path / "alone").mkdir()
    folders = alone_and_on_two_ranks(settings, ds_distill, tmp_path / "alone")
    check_same_losses_on_two_ranks(folders, "student")
