"""Teachers whose predictions are in a file."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import events
from runs import (
    alone_and_on_two_ranks,
    check_same_losses_on_two_ranks,
    evaluation,
)
from unit.test_predictions import (
    SPLITS,
    logits_of,
    of_cached_teachers,
    opened,
    run_of,
    students,
    texts_of,
    with_answers,
    written,
)

from ds_distill.cache.reader import CacheReader
from ds_distill.files import read_json
from ds_distill.keys import content_keys


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


def test_a_file_of_a_models_logits_teaches_what_the_model_does(
    toy_settings: dict[str, Any], tmp_path: Path, in_this_process: None
) -> None:
    """Two teachers, of which one is a model in one run, and in the other the file of its logits."""
    settings = of_cached_teachers(toy_settings)
    run = run_of(settings, tmp_path / "models")
    reader, rows = CacheReader(run / "cache" / "02-cache"), {}
    for split in SPLITS:
        texts = texts_of(settings, split)
        indices = reader.indices(torch.from_numpy(content_keys(texts)))
        rows |= dict(zip(texts, reader.read("first", indices).logits.tolist(), strict=True))
    lines = [{"text": text, "logits": logits} for text, logits in sorted(rows.items())]
    file = written(tmp_path / "answers.jsonl", lines)
    settings["teachers"]["first"] = {"predictions": str(file)}
    del settings["phases"][0]
    other = run_of(settings, tmp_path / "file")
    assert students(run) == students(other)
    ours, theirs = (evaluation(each) for each in (run, other))
    assert ours["comparisons"] == theirs["comparisons"]
    compared = [read_json(each / "routing.json") for each in (run, other)]
    assert compared[0] == compared[1]
    assert theirs["models"]["first"]["parameters"] == 0
    card = (other / "student" / "README.md").read_text()
    assert "first (predictions in `answers.jsonl`)" in card


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


def test_a_live_file_teaches_what_a_cached_one_does(
    toy_settings: dict[str, Any], tmp_path: Path, in_this_process: None
) -> None:
    """Alone in the engine beside the student, under the stage that looks a whole step's up at
    once."""
    settings = with_answers(toy_settings, tmp_path)
    del settings["teachers"]["second"], settings["phases"][0]
    settings["phases"][0]["cache"]["dtype"] = "float32"
    settings["phases"][2]["distil"] |= {"routing": "average", "micro_batch_size": 8, "epochs": 1}
    cached = run_of(settings, tmp_path / "cached", "deepspeed=zero3_fp32")
    live = run_of(
        settings, tmp_path / "live", "deepspeed=zero3_fp32", "phases.distil.teachers=live"
    )
    of_cached, of_live = (
        [event["loss"] for event in events(run) if event["event"] == "train"]
        for run in (cached, live)
    )
    assert of_cached == of_live and len(of_live) > 1
