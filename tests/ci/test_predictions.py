"""Teachers whose predictions are in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from processes import events
from runs import (
    evaluation,
)
from unit.test_predictions import (
    SPLITS,
    of_cached_teachers,
    run_of,
    students,
    texts_of,
    with_answers,
    written,
)

from ds_distill.cache.reader import CacheReader
from ds_distill.files import read_json
from ds_distill.keys import content_keys


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
