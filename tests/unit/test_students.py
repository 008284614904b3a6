"""What a student is before any training: the same in check, plan and run."""

import copy

import pytest
import torch
import transformers as tr
from families import WIDTH, built, config_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.errors import UserError
from ds_distill.models.load import CLASSIFIER, MASKED_LM, keep_layers, load_model
from ds_distill.models.student import RESIZED, TRUNCATED, student_of
from ds_distill.planning.models import PlannedModel
from ds_distill.recipe.schema import Sizes, Student

SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES["intermediate_size"] = 44
USUAL = {"bert", "deberta-v2", "distilbert", "modernbert"}


def student(**sizes):
    return Student.model_validate({"model": "m", "config": sizes})


@pytest.mark.parametrize("family", [one for one in RESIZED if one in USUAL])
def test_a_random_student_has_the_sizes_that_were_asked_for(family, tmp_path):
    check_resized(family, tmp_path)


def check_resized(family, tmp_path):
    """And follows from the seed; it is loaded again as what it is; its plan has its parameters."""
    given = config_of(family)
    before = given.to_dict()
    config = student_of(given, student(**SIZES))
    assert given.to_dict() == before
    one, again, other = (
        load_model(MASKED_LM, "m", config=config, new_head=True, seed=seed).eval()
        for seed in (1, 1, 2)
    )
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(one.config, key) == SIZES[key]
    assert any({44, 88} & {*weight.shape} for weight in one.parameters())
    alike = [torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True)]
    assert all(alike)
    assert not torch.equal(one.get_input_embeddings().weight, other.get_input_embeddings().weight)
    inputs = {"input_ids": torch.randint(5, 60, (2, 9)), "attention_mask": torch.ones(2, 9)}
    wanted = one(**inputs).logits
    one.save_pretrained(tmp_path)
    loaded = tr.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs).logits, wanted)
    planned = PlannedModel("student", "m", config, False, MASKED_LM, None)
    assert planned.parameters == sum(weight.numel() for weight in one.parameters())


def test_a_mobilebert_may_have_another_depth_alone():
    given = tr.MobileBertConfig(num_hidden_layers=3)
    assert student_of(given, student(num_hidden_layers=5)).num_hidden_layers == 5
    with pytest.raises(UserError, match="may have another num_hidden_layers alone"):
        student_of(given, student(num_hidden_layers=5, hidden_size=256))


@pytest.mark.parametrize("family", [one for one in TRUNCATED if one in USUAL])
def test_a_truncated_student_has_the_first_rows_and_columns(family, tmp_path):
    check_truncated(family, tmp_path)


def check_truncated(family, tmp_path):
    """Of its layers' weights; as wide as the model it is that model."""
    whole = built(family, tr.AutoModelForMaskedLM, embedding_size=WIDTH)
    given = config_of(family, embedding_size=WIDTH)
    whole.save_pretrained(tmp_path)
    chosen = None if family == "albert" else [2, 0]  # whose layers share weights
    for sizes, layers in ((SMALLER, chosen), (SMALLER, None), ({}, None)):
        asked = Student.model_validate(
            {"model": "m", "config": sizes, "layers": layers, "start": "truncated"}
        )
        config = student_of(given, asked)
        options = {"config": config, "layers": layers, "truncated": True, "new_head": False}
        made = load_model(MASKED_LM, str(tmp_path), **options).eval()
        assert made.config.num_hidden_layers == (3 if layers is None else 2)
        kept = load_model(MASKED_LM, str(tmp_path), new_head=False, layers=layers)
        wanted = dict(kept.named_parameters())
        for name, weight in made.named_parameters():
            part = wanted[name][tuple(slice(size) for size in weight.shape)]
            assert torch.equal(weight, part), name
            assert sizes == {} or weight.ndim < 2 or weight.shape != wanted[name].shape, name
    inputs = {"input_ids": torch.randint(5, 60, (2, 9)), "attention_mask": torch.ones(2, 9)}
    torch.testing.assert_close(made(**inputs).logits, whole(**inputs).logits)


SMALLER = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 40}


def test_what_cannot_be_truncated_is_refused():
    asked = Student.model_validate({"model": "m", "config": {}, "start": "truncated"})
    with pytest.raises(UserError, match="modernbert has several projections in one weight"):
        student_of(config_of("modernbert"), asked)


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 64),
    heads=st.integers(1, 8),
    depth=st.integers(1, 3),
    family=st.sampled_from(["bert", "modernbert", "deberta-v2"]),
)
def test_sizes_make_a_student_or_are_refused(width, heads, depth, family):
    """What `check` lets through can be built."""
    given = config_of(family)
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": depth}
    fits = width % (2 * heads if family == "modernbert" else heads) == 0
    try:
        config = student_of(given, unchecked(sizes))
    except UserError as error:
        assert not fits and "do not divide" in str(error)
        return
    assert fits
    model = tr.AutoModelForSequenceClassification.from_config(config)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), family=st.sampled_from(["bert", "modernbert", "longformer"]))
def test_a_shortened_students_configuration_is_that_of_the_shortened_model(data, family):
    windows = {"attention_window": [4, 8, 16, 32]} if family == "longformer" else {}
    given = config_of(family, num_hidden_layers=4, **windows)
    others = data.draw(st.lists(st.integers(1, 3), unique=True, max_size=3))
    layers = [0, *others]
    model = tr.AutoModel.from_config(copy.deepcopy(given))
    keep_layers(model, layers)
    found = student_of(given, Student(model="m", layers=layers))
    for key in ("num_hidden_layers", "layer_types", "attention_window"):
        assert getattr(found, key, None) == getattr(model.config, key, None)


def unchecked(sizes):
    """Sizes that the schema, which sees two of them, would refuse."""
    made = Sizes.model_construct(**{**dict.fromkeys(Sizes.model_fields), **sizes})
    return Student.model_construct(model="m", layers=None, config=made)


def test_more_layers_than_a_modernbert_says_the_attention_of_are_refused():
    with pytest.raises(UserError, match="Set num_hidden_layers=3 or less"):
        student_of(config_of("modernbert"), student(num_hidden_layers=4))


def test_the_head_of_a_random_classifier_is_of_the_labels():
    config = student_of(config_of("bert"), student(hidden_size=24))
    how = {"new_head": True, "output_bias": lambda: torch.tensor([1.0, 2.0, 3.0])}
    model = load_model(CLASSIFIER, "m", ["a", "b", "c"], config=config, **how)
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert model.classifier.bias.tolist() == [1, 2, 3]
