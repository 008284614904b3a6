"""Exported models compute what transformers' do, and a file that loses too much is refused."""

import pytest
import torch
from transformers import AutoConfig

from ds_distill.errors import UserError
from ds_distill.export.onnx_model import make_program
from ds_distill.export.student import logit_difference, loses
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.metrics.numbers import MSE
from ds_distill.types import LACKING

VOCABULARY = 300
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 514,
}


def test_what_cannot_be_exported_is_refused():
    class Odd(torch.nn.Module):
        config = AutoConfig.for_model("bert", **SMALL)

        def forward(self, input_ids, attention_mask):
            return input_ids[: int(attention_mask.sum())]

    with pytest.raises(UserError, match="Odd cannot be exported"):
        make_program(Odd(), ["input_ids", "attention_mask"])


def test_logits_that_differ_are_seen_and_a_nan_is_far():
    first = torch.tensor([[1.0, 0.0], [-2.0, LACKING]])
    assert logit_difference(first, torch.tensor([[0.0, 0.5], [-2.0, 5.0]])) == (1.0, 2.0)
    assert logit_difference(first, first + torch.nan) == (float("inf"), 2.0)


@pytest.mark.parametrize(
    ("metric", "score", "most", "worse", "refused"),
    [
        (Accuracy, 0.8, 1.0, (0.02, 0.03), True),
        (Accuracy, 0.8, 1.0, (0.005, 0.03), False),
        (Accuracy, 0.8, 1.0, (-0.03, 0.03), False),
        (Accuracy, 0.8, 1.0, (-0.03, -0.02), False),
        (Accuracy, 0.8, 3.0, (0.02, 0.03), False),
        (MSE, 10.0, 1.0, (0.2, 0.3), True),
        (MSE, 10.0, 1.0, (0.05, 0.3), False),
        (MSE, 10.0, 1.0, (-0.3, 0.3), False),
        (MSE, 10.0, 1.0, (-0.3, -0.2), False),
        (MSE, 10.0, 3.0, (0.2, 0.3), False),
    ],
)
def test_only_a_loss_beyond_chance_and_the_bound_is_refused(metric, score, most, worse, refused):
    """worse: by how much at least and at most; 1 point, or 1% of 10."""
    low, high = worse
    found = loses([-high, -low] if metric.higher_is_better else [low, high], score, metric, most)
    assert (found is not None) == refused
    assert not refused or ("+" in str(found)) == (metric is MSE)


def test_a_score_that_is_not_defined_is_refused():
    assert loses(None, 10.0, MSE, 1.0) is not None
