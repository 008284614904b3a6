"""The families that configuration.py names, each built small and asked."""

import pytest
import torch
from families import built, config_of, padded_view
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, BertTokenizer

from ds_distill.errors import UserError
from ds_distill.losses import KL, CrossEntropy
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import (
    MASKED_LM_FAMILIES,
    MIXES_PADDING,
    POSITIONS_BEHIND_PADDING,
    check_encoder,
    check_masked_lm,
    usable_length,
)
from ds_distill.models.encoder import read_signals, read_weights
from ds_distill.models.load import hide_padding, keep_layers
from ds_distill.reads import Reads
from ds_distill.types import Batch

USUAL = {
    *("albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "eurobert"),
    *("mobilebert", "modernbert", "mpnet", "roberta", "xlm-roberta"),
}
UNUSUAL = [
    *((f"deberta-v{version}", {"legacy": old}) for version in (2, 3) for old in (True, False)),
    ("deberta-v2 with a convolution", {}),
    ("electra", {"embedding_size": 32}),
    ("eurobert", {"mlp_bias": True, "num_key_value_heads": 2}),
    ("eurobert", {"tie_word_embeddings": True}),
    ("mobilebert", {"embedding_size": 8}),
    ("mobilebert", {"embedding_size": 8, "tie_word_embeddings": False}),
    ("modernbert", {"decoder_bias": False, "classifier_bias": True, "norm_bias": True}),
    ("modernbert", {"tie_word_embeddings": False, "classifier_activation": "relu"}),
]


@pytest.mark.parametrize(
    ("family", "more"),
    [*((name, {}) for name in MASKED_LM_FAMILIES if name in USUAL), *UNUSUAL],
)
def test_the_head_at_rows_is_the_models_own(family, more):
    check_head_at_rows(family, more)


def check_head_at_rows(family, more):
    """And the states below it; a state's weights are those that it has a gradient for."""
    model, view = built(family, AutoModelForMaskedLM, **more), padded_view([16, 9, 13], rows=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    check_masked_lm("m", model.config, tokenizer)
    output = model(**view.model_inputs(), output_hidden_states=True)
    found = read_signals(model, view, Reads({-1}))
    wanted = output.logits.flatten(0, 1)[view.positions]
    torch.testing.assert_close(found.logits, wanted, rtol=1e-5, atol=1e-5)
    wanted = output.hidden_states[-1].flatten(0, 1)[view.positions]
    torch.testing.assert_close(found.hidden[-1], wanted)
    wanted[:, 0].sum().backward()
    read = {weight for weight in model.parameters() if weight.grad is not None}
    assert read and read_weights(model, Reads({-1})) == read


@pytest.mark.parametrize(
    ("teacher", "student"),
    [("mobilebert", "modernbert"), ("modernbert", "eurobert"), ("eurobert", "mobilebert")],
)
def test_losses_through_a_head_are_those_on_the_models_logits(teacher, student):
    """Cross-entropy and KL, and the gradient of each weight of the student."""
    torch.manual_seed(0)
    configs = [config_of(family, initializer_range=0.02) for family in (teacher, student)]
    models = [AutoModelForMaskedLM.from_config(config).double().eval() for config in configs]
    view = padded_view([16] * 3, rows=True)
    labels = torch.arange(5, 5 + len(view.positions))
    terms = {"cross_entropy": CrossEntropy(), "kl": KL({"temperature": 2.0})}
    bundle = Bundle(models[1], {"teacher": models[0]}, terms)
    batch = Batch.from_views({"student": view, "teacher": view}, labels)
    found = bundle(batch)["loss"]
    found.backward()
    gradients = {name: weight.grad for name, weight in models[1].named_parameters()}
    models[1].zero_grad()
    theirs, own = (
        model(**view.model_inputs()).logits.flatten(0, 1)[view.positions] for model in models
    )
    logs, shares = torch.log_softmax(own / 2, dim=-1), torch.softmax(theirs.detach() / 2, dim=-1)
    kl = torch.nn.functional.kl_div(logs, shares, reduction="batchmean")
    expected = torch.nn.functional.cross_entropy(own, labels) + 4 * kl
    expected.backward()
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=0)
    whole = {name: weight.grad for name, weight in models[1].named_parameters()}
    size = torch.stack([gradient.norm() for gradient in whole.values()]).max()
    for name, gradient in whole.items():
        assert (gradients[name] - gradient).norm() < 1e-3 * size, name  # losses are in float32


def alone_and_padded(family):
    """The states of a text by itself, and beside a longer one."""
    model = built(family)
    length, longer = (40, 80) if family == "reformer" else (9, 16)
    ids = torch.full((2, longer), int(model.config.pad_token_id or 0))
    ids[0, :length] = torch.randint(5, 60, (length,))
    ids[1] = torch.randint(5, 60, (longer,))
    mask = torch.ones_like(ids)
    mask[0, length:] = 0
    if family == "mobilebert":
        hide_padding(model)
    with torch.no_grad():
        alone = model(input_ids=ids[:1, :length], attention_mask=mask[:1, :length])
        beside = model(input_ids=ids, attention_mask=mask)
    return alone.last_hidden_state[0], beside.last_hidden_state[0, :length]


@pytest.mark.parametrize("family", [*MASKED_LM_FAMILIES, "rembert"])
def test_padding_says_nothing(family):
    torch.testing.assert_close(*alone_and_padded(family), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "more"),
    [("bert", {}), ("modernbert", {}), ("longformer", {}), ("longformer", {"attention_window": 8})],
)
def test_kept_layers_are_those_of_the_model_that_is_loaded_again(family, more, tmp_path):
    check_kept_layers(family, tmp_path, **more)


def check_kept_layers(family, tmp_path, **more):
    """Longformer's windows kept their number: the model could not run, nor be loaded again."""
    model, inputs = built(family, **more), padded_view([17, 17]).model_inputs()
    keep_layers(model, [0, 2])
    assert model.config.num_hidden_layers == 2
    with torch.no_grad():
        wanted = model(**inputs).last_hidden_state
        model.save_pretrained(tmp_path)
        again = AutoModel.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(**inputs).last_hidden_state, wanted)


@pytest.mark.parametrize("family", MIXES_PADDING)
def test_a_family_that_reads_padding_is_refused(family):
    """FNet, for one, was a teacher that said one thing live and another from a cache."""
    alone, beside = alone_and_padded(family)
    assert (alone - beside).abs().max() > 0.01
    with pytest.raises(UserError, match=rf"\({family}\) reads the padding"):
        check_encoder("m", config_of(family))


def test_a_big_bird_that_changes_its_attention_is_refused():
    with pytest.raises(UserError, match="Set attention_type to original_full"):
        check_encoder("m", AutoConfig.for_model("big_bird"))
    check_encoder("m", config_of("big_bird"))


@pytest.mark.parametrize("family", [*POSITIONS_BEHIND_PADDING, "albert", "bert", "deberta-v2"])
def test_a_model_takes_as_many_tokens_as_it_is_said_to(family):
    """LUKE and I-BERT failed on the last two."""
    model = built(family)
    limit = usable_length(model.config)
    model(**padded_view([limit]).model_inputs())
    with pytest.raises((IndexError, RuntimeError)):
        model(**padded_view([limit + 1]).model_inputs())


def test_relative_positions_alone_have_no_limit():
    model = built("deberta-v3")
    assert usable_length(model.config) is None
    model(**padded_view([400]).model_inputs())


@pytest.mark.parametrize("family", ["gpt2", "llama", "bart", "t5", "clip", "xlnet"])
def test_other_models_are_refused(family):
    with pytest.raises(UserError, match=rf"\({family}\) is "):
        check_encoder("m", AutoConfig.for_model(family))
