"""The comparison of teachers' speed: what it counts, and that all its paths say the same."""

import numpy as np
import pytest
import torch
from flops import encoder_flops
from large_teachers import configurations
from teacher_speed import measure, padded
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

NAMES = list(configurations())


def small(name):
    config = configurations()[name]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config.update({**sizes, "intermediate_size": 80, "vocab_size": 120})
    if config.model_type == "deberta-v2":
        config.update({"pooler_hidden_size": 32, "position_buckets": 16})
    return config


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_those_that_torch_counts(name):
    config = small(name)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    model.pooler = None  # not part of the body
    view = padded([np.full(21, 7)] * 3)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**view.model_inputs())
    of_a_call = 0
    if config.model_type == "deberta-v2":  # its table's projections do not grow with the text
        of_a_call = 2 * 2 * (2 * 2 * config.position_buckets * config.hidden_size**2)
    assert encoder_flops(config, np.full(3, 21)) == counter.get_total_flops() - of_a_call


@pytest.mark.parametrize("name", NAMES)
def test_all_paths_say_the_same(name, world):
    draw = np.random.default_rng(0)
    ids = [draw.integers(5, 120, length) for length in (30, 4, 17, 17, 9)]
    result = measure(small(name), ids, 40, 1, world, peak=1e9)
    assert set(result["paths"]) == {"plain", "padded", "packed"}
    for row in result["paths"].values():
        assert row["largest_logit_difference"] < 1e-5
        assert row["tokens_per_second"] > 0 and row["of_plain_range"][0] > 0
    assert result["paths"]["plain"]["of_plain"] == 1.0
