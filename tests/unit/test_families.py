"""The families that configuration.py names, each built small and asked."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from ds_distill.errors import UserError
from ds_distill.models.configuration import MASKED_LM_FAMILIES, PACKED_FAMILIES, check_encoder
from ds_distill.models.encoder import vocabulary_head

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "embedding_size": 32,
}
USUAL = {"albert", "bert", "deberta-v2", "distilbert", "electra", "roberta", "xlm-roberta"}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in USUAL else pytest.mark.slow)
        for name in MASKED_LM_FAMILIES
    ],
)
def test_the_head_at_rows_is_the_models_own(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **SIZES)).eval()
    check_encoder("m", model.config)
    rows = torch.tensor([0, 4, 17, 40])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        given = {"input_ids": torch.randint(5, 60, (3, 16)), "attention_mask": torch.ones(3, 16)}
        whole = model(**given).logits.flatten(0, 1)[rows]
        states = model.base_model(**given).last_hidden_state.flatten(0, 1)[rows]
        torch.testing.assert_close(vocabulary_head(model, states).logits(), whole)


@pytest.mark.parametrize("family", [*PACKED_FAMILIES, "deberta-v2", "modernbert"])
def test_encoders_pass(family: str) -> None:
    check_encoder("m", AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bart", "t5", "clip", "xlnet"])
def test_other_models_are_refused(family: str) -> None:
    with pytest.raises(UserError, match=rf"\({family}\) is "):
        check_encoder("m", AutoConfig.for_model(family))
