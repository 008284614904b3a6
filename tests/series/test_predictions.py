"""Teachers whose predictions are in a file."""

import copy
import json
import random
import tracemalloc

import numpy as np
import pytest
from runs import alone_and_on_two_ranks, check_same_losses
from unit.test_predictions import logits_of, opened, with_answers


def test_a_large_file_takes_little_memory(tmp_path):
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
    toy_settings, warm, tmp_path, in_this_process
):
    """At stage 0 on one rank and at the others on two, with a model and a file; and a lone file."""
    both = {**with_answers(toy_settings, tmp_path, transfer=37), "logging": {"every": 1}}
    both["training"] = {**both["training"], "dropout": 0.0}
    alone = copy.deepcopy(both)
    del alone["teachers"]["second"], alone["phases"][0], alone["phases"][1]
    alone["phases"][1]["distil"]["routing"] = "average"
    recipes, stages = {"both": both, "alone": alone}, (1, 2, 3)
    folders = alone_and_on_two_ranks(recipes, warm, tmp_path, stages)
    for stage in stages:
        check_same_losses(folders["alone"], "student", stage)
        for student in ("average", "expertise"):
            check_same_losses(folders["both"], student, stage)
