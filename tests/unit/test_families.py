"""The families that configuration.py names, each built small and asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedConfig

from ds_distill.errors import UserError
from ds_distill.losses import KL, CrossEntropy
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import (
    MASKED_LM_FAMILIES,
    MIXES_PADDING,
    POSITIONS_BEHIND_PADDING,
    check_encoder,
    usable_length,
)
from ds_distill.models.encoder import read_weights, vocabulary_head
from ds_distill.models.load import hide_padding, keep_layers
from ds_distill.reads import Reads
from ds_distill.types import Batch
from ds_distill.views import PaddedView

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "embedding_size": 32,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE = {
    "big_bird": {"attention_type": "original_full"},
    "esm": {"position_embedding_type": "absolute", "pad_token_id": 1, "mask_token_id": 4},
    "eurobert": {"num_key_value_heads": 4, **TOKENS},
    "funnel": {
        **{"vocab_size": 60, "block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16},
        "architectures": ["FunnelModel"],
    },
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 5, "shape_size": 6},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4},
    "longformer": {"attention_window": [8, 8]},
    "mobilebert": {"true_hidden_size": 16, "intra_bottleneck_size": 16},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4, **TOKENS},
    "reformer": {
        **{"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (5, 16), "attn_layers": ["local"]},
        **{"hidden_size": 32, "feed_forward_size": 64, "is_decoder": False, "vocab_size": 60},
        **{"local_attn_chunk_length": 5, "num_attention_heads": 2, "attention_head_size": 16},
    },
    "xmod": {"default_language": "en_XX"},
}


def config_of(family: str, **more: object) -> PreTrainedConfig:
    sizes = {} if family in ("funnel", "reformer") else SIZES
    return AutoConfig.for_model(family, **{**sizes, **MORE.get(family, {}), **more})


USUAL = {
    *("albert", "bert", "deberta-v2", "distilbert", "electra", "roberta", "xlm-roberta"),
    *("eurobert", "mobilebert", "modernbert"),
}
UNUSUAL = [
    ("eurobert", {"mlp_bias": True, "num_key_value_heads": 2}),
    ("eurobert", {"tie_word_embeddings": True}),
    ("mobilebert", {"embedding_size": 8}),
    ("mobilebert", {"embedding_size": 8, "tie_word_embeddings": False}),
    ("modernbert", {"decoder_bias": False, "classifier_bias": True, "norm_bias": True}),
    ("modernbert", {"tie_word_embeddings": False, "classifier_activation": "relu"}),
]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        *((name, {}) for name in MASKED_LM_FAMILIES if name in USUAL),
        *UNUSUAL,
    ],
)
def test_the_head_at_rows_is_the_models_own(family: str, more: dict[str, object]) -> None:
    check_head_at_rows(family, more)


def check_head_at_rows(family: str, more: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config_of(family, **more)).eval()
    check_encoder("m", model.config)
    rows = torch.tensor([0, 4, 17, 40])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        given = {"input_ids": torch.randint(5, 60, (3, 16)), "attention_mask": torch.ones(3, 16)}
        whole = model(**given).logits.flatten(0, 1)[rows]
        states = model.base_model(**given).last_hidden_state.flatten(0, 1)[rows]
        torch.testing.assert_close(vocabulary_head(model, states).logits(), whole)
    # A state's weights are those that it has a gradient for.
    output = model.base_model(**given, output_hidden_states=True)
    output.hidden_states[-1][:, 0].sum().backward()
    read = {weight for weight in model.parameters() if weight.grad is not None}
    assert read and read_weights(model, Reads({-1})) == read


@pytest.mark.parametrize(
    ("teacher", "student"),
    [("mobilebert", "modernbert"), ("modernbert", "eurobert"), ("eurobert", "mobilebert")],
)
def test_losses_through_a_head_are_those_on_the_models_logits(teacher: str, student: str) -> None:
    """Cross-entropy and KL, and the gradient of each weight of the student."""
    more: dict[str, dict[str, object]] = {"mobilebert": {"embedding_size": 8}}
    torch.manual_seed(0)
    models = [
        AutoModelForMaskedLM.from_config(config_of(family, **more.get(family, {}))).double().eval()
        for family in (teacher, student)
    ]
    rows, labels = torch.tensor([0, 4, 17, 40]), torch.tensor([7, 8, 9, 10])
    ids = torch.randint(5, 60, (3, 16))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    view = PaddedView(**given, positions=rows)
    terms = {"cross_entropy": CrossEntropy(), "kl": KL({"temperature": 2.0})}
    bundle = Bundle(models[1], {"teacher": models[0]}, terms)
    batch = Batch.from_views({"student": view, "teacher": view}, labels)
    found = bundle(batch)["loss"]
    found.backward()
    gradients = {name: weight.grad for name, weight in models[1].named_parameters()}
    models[1].zero_grad()
    theirs, own = (model(**given).logits.flatten(0, 1)[rows] for model in models)
    expected = torch.nn.functional.cross_entropy(own, labels) + 4 * torch.nn.functional.kl_div(
        torch.log_softmax(own / 2, dim=-1),
        torch.softmax(theirs.detach() / 2, dim=-1),
        reduction="batchmean",
    )
    expected.backward()
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=0)
    whole = {name: weight.grad for name, weight in models[1].named_parameters()}
    size = torch.stack([gradient.norm() for gradient in whole.values()]).max()
    for name, gradient in whole.items():
        assert (gradients[name] - gradient).norm() < 1e-3 * size, name  # losses are in float32


def alone_and_padded(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of a text by itself, and beside a longer one."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config_of(family)).eval()
    length, longer = (40, 80) if family == "reformer" else (9, 16)
    ids = torch.full((2, longer), int(model.config.pad_token_id or 0))
    ids[0, :length] = torch.randint(5, 60, (length,))
    ids[1] = torch.randint(5, 60, (longer,))
    mask = torch.ones_like(ids)
    mask[0, length:] = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if family == "mobilebert":
            hide_padding(model)
        alone = model(input_ids=ids[:1, :length], attention_mask=mask[:1, :length])
        beside = model(input_ids=ids, attention_mask=mask)
    return alone.last_hidden_state[0], beside.last_hidden_state[0, :length]


@pytest.mark.parametrize("family", [*MASKED_LM_FAMILIES, "rembert"])
def test_padding_says_nothing(family: str) -> None:
    torch.testing.assert_close(*alone_and_padded(family), rtol=1e-3, atol=1e-4)


def test_kept_layers_are_those_of_the_model_that_is_loaded_again(tmp_path: Path) -> None:
    check_kept_layers("bert", tmp_path)


def check_kept_layers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    windows = {"attention_window": [4, 8, 12]} if family == "longformer" else {}
    config = config_of(family, num_hidden_layers=3, **windows)
    model = AutoModel.from_config(config).eval()
    keep_layers(model, [0, 2])
    given = {"input_ids": torch.randint(5, 60, (2, 16)), "attention_mask": torch.ones(2, 16)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        wanted = model(**given).last_hidden_state
        model.save_pretrained(tmp_path)
        again = AutoModel.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(**given).last_hidden_state, wanted)


@pytest.mark.parametrize("family", MIXES_PADDING)
def test_a_family_that_reads_padding_is_refused(family: str) -> None:
    """FNet, for one, was a teacher that said one thing live and another from a cache."""
    alone, beside = alone_and_padded(family)
    assert (alone - beside).abs().max() > 0.01
    with pytest.raises(UserError, match=rf"\({family}\) reads the padding"):
        check_encoder("m", config_of(family))


def test_a_big_bird_that_changes_its_attention_is_refused() -> None:
    with pytest.raises(UserError, match="Set attention_type to original_full"):
        check_encoder("m", AutoConfig.for_model("big_bird"))
    check_encoder("m", config_of("big_bird"))


@pytest.mark.parametrize("family", POSITIONS_BEHIND_PADDING)
def test_a_model_takes_as_many_tokens_as_it_is_said_to(family: str) -> None:
    """LUKE and I-BERT failed on the last two."""
    model = AutoModel.from_config(config_of(family)).eval()
    limit = usable_length(model.config)
    assert limit is not None
    for length in (limit, limit + 1):
        ids = torch.randint(5, 60, (1, length))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if length == limit:
            model(**given)
            continue
        with pytest.raises((IndexError, RuntimeError)):
            model(**given)


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "electra", "distilbert", "deberta-v2", "modernbert"]
)
def test_encoders_pass(family: str) -> None:
    check_encoder("m", AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bart", "t5", "clip", "xlnet"])
def test_other_models_are_refused(family: str) -> None:
    with pytest.raises(UserError, match=rf"\({family}\) is "):
        check_encoder("m", AutoConfig.for_model(family))
