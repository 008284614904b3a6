"""What models are asked for, what is kept of them, and encoders that run without their
modules, where nothing needs these: with the same numbers."""

import copy
import gc
import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from families import LAYERS, WIDTH, built, config_of, padded_view
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from unit.test_packed import FAMILIES, HEADS, models

from ds_distill.models import encoder, packed_deberta
from ds_distill.models.capture import CAPTURED, capturing
from ds_distill.models.configuration import SEEN_FAMILIES, unseen_attention
from ds_distill.models.encoder import read_signals, read_weights
from ds_distill.models.load import checkpoint_activations, layers_of, set_dropout
from ds_distill.models.packed import ATTENTION, parts_called
from ds_distill.reads import Reads
from ds_distill.views import PackedView

LENGTHS = [9, 4, 12]
COMPARED = ("bert", "roberta", "electra", "distilbert", "albert", "mobilebert")


IMPLEMENTED = [
    *((family, attention) for family in COMPARED for attention in ("eager", "sdpa")),
    *((family, ATTENTION) for family in COMPARED if family not in ("albert", "mobilebert")),
]


@pytest.mark.parametrize(("family", "attention"), IMPLEMENTED)
def test_attention_computed_again_is_what_the_model_gives(family, attention):
    given, layers = padded_view(LENGTHS), {1, 2, -1}
    with torch.no_grad():
        wanted = built(family)(**given.model_inputs(), output_attentions=True).attentions
        model = built(family, attention=attention)
        plain = model(**given.model_inputs()).last_hidden_state
        with capturing(model, Reads(queries=layers, keys=layers, values={2})) as captured:
            last = model(**given.model_inputs()).last_hidden_state
    assert torch.equal(last, plain), "the model computes the same beside the capture"
    found = captured.attention(given)
    assert found.keys() == layers and model.config._attn_implementation == attention
    for layer, of in found.items():
        assert (
            of.queries is not None and of.keys is not None and (of.values is None) == (layer != 2)
        )
        scores = of.scale * of.queries @ of.keys.mT
        maps = scores.masked_fill(~of.mask[:, None, None], -torch.inf).softmax(-1)
        real = of.mask[:, None, :, None] & of.mask[:, None, None]
        own = wanted[layer - 1 if layer > 0 else layer]
        torch.testing.assert_close(maps * real, own * real, rtol=1e-5, atol=1e-6)


def test_the_families_that_are_seen_were_compared():
    same_code = {"xlm-roberta", "camembert"}  # RoBERTa's
    assert set(SEEN_FAMILIES) - same_code == set(COMPARED)


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("deberta-v2", {}, "relative positions"),
        ("mpnet", {}, "relative positions"),
        ("modernbert", {}, "window"),
        ("squeezebert", {}, "not compared"),
        ("bert", {"hidden_size": 2048}, "512 wide.*at most 256"),
    ],
)
def test_attention_that_the_kernel_cannot_see_is_refused(family, more, reason):
    config = config_of(family, **more)
    why = unseen_attention(config)
    assert why is not None and re.search(reason, why)
    config.model_type, config.num_key_value_heads, config.hidden_size = "bert", 1, 32
    assert "share 1 heads" in str(unseen_attention(config))


@pytest.mark.parametrize("family", [*COMPARED, "deberta-v2"])
def test_states_of_layers_are_those_of_transformers(family):
    given, layers = padded_view(LENGTHS, rows=True), {0, 1, 2, 3, -1, -2}
    kind = AutoModel if family == "mobilebert" else AutoModelForMaskedLM
    model = built(family, kind, attention="eager")
    with torch.no_grad():
        wanted = model(**given.model_inputs(), output_hidden_states=True).hidden_states
        found = read_signals(model, given, Reads(layers, logits=False))
    assert found.output is None and found.hidden.keys() == layers
    for layer, state in found.hidden.items():
        assert torch.equal(state, wanted[layer].flatten(0, 1)[given.positions])


def test_nothing_else_is_kept():
    """Tensors as large as a layer's states, of a teacher of three layers, while it has answered."""
    model, given = built("bert", AutoModelForMaskedLM, "sdpa"), padded_view(LENGTHS, rows=True)

    def alive(reads):
        gc.collect()
        with torch.no_grad():
            signals = read_signals(model, given, reads)
        size = max(LENGTHS) * len(LENGTHS) * WIDTH
        found = {
            t.untyped_storage().data_ptr()
            for t in gc.get_objects()
            if type(t) is torch.Tensor and t.numel() == size
        }
        assert signals.attention or not reads.attention
        return len(found)

    assert alive(Reads()) == alive(Reads({1, 2, 3, -1})) == 0  # states at four rows, and no others
    assert alive(Reads(queries={2}, logits=False)) == 1
    assert alive(Reads(queries={2}, keys={2, -1}, values={1}, logits=False)) == 4


def test_checkpointing_takes_nothing_twice_and_changes_no_gradient():
    given, gradients = padded_view(LENGTHS, rows=True), []
    of = Reads({1, -1}, *[{1, -1}] * 3, logits=False)
    for checkpoints in (False, True):
        model = built("bert", AutoModelForMaskedLM).train()
        set_dropout(model, 0.0)
        if checkpoints:
            checkpoint_activations(model)
        found = read_signals(model, given, of)
        parts = [p for a in found.attention.values() for p in (a.queries, a.keys, a.values)]
        kept = [*map(torch.Tensor.data_ptr, parts)]
        sum(part.sin().sum() for part in [*parts, *found.hidden.values()]).backward()
        assert kept == [*map(torch.Tensor.data_ptr, parts)]
        assert model.config._attn_implementation == "eager"
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_what_is_read_is_made_of_these_weights():
    model = built("bert")
    for reads in (Reads({2}), Reads(queries={2}, keys={2}), Reads({0}, values={1})):
        model.zero_grad(set_to_none=True)
        found = read_signals(model, padded_view(LENGTHS, rows=True), replace(reads, logits=False))
        parts = [p for a in found.attention.values() for p in (a.queries, a.keys, a.values)]
        sum(p.sum() for p in [*parts, *found.hidden.values()] if p is not None).backward()
        wanted = {weight for weight in model.parameters() if weight.grad is not None}
        assert read_weights(model, reads) == wanted


def test_a_saved_student_does_not_name_the_capture(tmp_path):
    model = built("bert", AutoModelForSequenceClassification, "sdpa")
    read_signals(model, padded_view(LENGTHS), Reads(queries={-1}, keys={1}))
    with pytest.raises(IndexError), capturing(model, Reads(queries={1})):
        model(input_ids=torch.tensor([[99]]), attention_mask=torch.ones(1, 1))
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert CAPTURED not in (tmp_path / "config.json").read_text(encoding="utf-8")


FLAT = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
"""Families whose padded and packed passes are flat; of DeBERTa packed ones are."""
FLAT_CASES = [(name, packed) for name in FLAT for packed in (False, True)]
FLAT_CASES += [(name, True) for name in FAMILIES if "deberta" in name]


def made(family, packed, rows=False):
    view = padded_view([7, 12, 5], rows=rows)
    model = models(family, HEADS[rows])[packed].requires_grad_(False)
    return model, PackedView.of(view) if packed else view


def modules_called(model, view, reads):
    """What a pass gives, and how many of its layers, or their parts, it calls."""
    called = []
    hooks = [
        part.register_forward_hook(lambda *_: called.append(1))
        for part in parts_called(model.config, layers_of(model))
    ]
    signals = read_signals(model, view, reads)
    for hook in hooks:
        hook.remove()
    return signals, len(called)


@contextmanager
def by_modules():
    with (
        patch.object(encoder, "layers_to_run_flat", lambda _: []),
        patch.object(packed_deberta, "runs_flat", lambda _: False),
    ):
        yield


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("family", "packed"), FLAT_CASES)
def test_a_flat_pass_gives_the_numbers_of_the_modules(family, packed, rows):
    """Also what is taken of its states and its attention. One product of frozen weights may add up
    in another order than three, on some machines."""
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    model, view = made(family, packed, rows)
    layers = () if "deberta" in family else (1, -1)
    reads = Reads((0, 1, -1), queries=layers, keys=layers, values=layers)
    with torch.no_grad():
        with by_modules():
            own, count = modules_called(model, view, reads)
        assert count >= LAYERS
        read_signals(model, view)  # the first pass looks whether it can run flat
        found, count = modules_called(model, view, reads)
    assert count == 0
    assert found.hidden.keys() == own.hidden.keys() == {0, 1, -1}
    for layer, state in own.hidden.items():
        close(found.hidden[layer], state)
    close(found.logits, own.logits)
    for layer in layers:
        for name in ("queries", "keys", "values"):
            close(*(getattr(of.attention[layer], name) for of in (found, own)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FLAT)
def test_a_student_trains_flat_by_the_same_numbers(family, attention):
    """With dropout, which draws the same: losses, gradients and what is drawn next, to the bit."""
    view = padded_view([7, 12, 5])
    model = built(family, AutoModelForSequenceClassification, attention).train()
    set_dropout(model, 0.2)
    reads = Reads((1, -1), queries={1}, keys={1})
    modules_called(model, view, reads)

    def step():
        model.zero_grad()
        torch.manual_seed(0)
        signals, count = modules_called(model, view, reads)
        of = signals.attention[1]
        loss = signals.logits.sum() + sum(state.sin().sum() for state in signals.hidden.values())
        (loss + (of.queries * of.keys).sum()).backward()
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        return count, [loss.detach(), *grads, torch.rand(3)]

    with by_modules():
        count, own = step()
    assert count == LAYERS
    count, found = step()
    assert count == 0 and len(found) == len(own) > 16 * LAYERS
    assert all(map(torch.equal, found, own))


def shifted(layer):
    own = layer.forward
    layer.forward = lambda *inputs, **options: own(*inputs, **options) + 1


def computes_again(model):
    checkpoint_activations(model.train())


def is_sharded(model):
    next(model.base_model.encoder.parameters()).ds_id = 0


def computes_more(model):
    shifted(model.base_model.encoder.layer[1])


@pytest.mark.parametrize("change", [computes_again, is_sharded, computes_more])
def test_layers_are_called_where_they_must(change):
    model, view = made("bert", packed=False)
    change(model)
    with torch.no_grad():
        read_signals(model, view)
        _, count = modules_called(model, view, Reads((-1,)))
    assert count == LAYERS


@pytest.mark.parametrize("part", ["output.dense", "attention.self.query"])
@pytest.mark.parametrize("family", ["bert", "deberta-v3"])
def test_a_flat_pass_follows_its_weights(family, part):
    """Changed in place, cast and put elsewhere, as engines do, between two passes."""
    model, view = made(family, packed=True)
    part += "_proj" if part.endswith("query") and family == "deberta-v3" else ""
    with torch.no_grad():
        before = read_signals(model, view).logits
        model.base_model.encoder.layer[0].get_submodule(part).weight.mul_(2)
        model.double()
        after = read_signals(model, view).logits
        with by_modules():
            own = read_signals(model, view).logits
    assert after.dtype == torch.float64 and not torch.allclose(before.double(), after)
    torch.testing.assert_close(after, own)


def test_projections_are_one_product_while_they_are_frozen(tmp_path):
    """Of one tensor, of which a save writes each part by its name; and trained apart after that."""
    model, view = made("bert", packed=True)
    own = model.base_model.encoder.layer[0].attention.self
    parts = own.query.weight, own.key.weight, own.value.weight
    with torch.no_grad():
        frozen = read_signals(model, view).logits
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path).base_model.encoder.layer[0].attention.self
    for name in ("query", "key", "value"):
        assert torch.equal(saved.get_submodule(name).weight, own.get_submodule(name).weight)
    model.requires_grad_(True)
    trained = read_signals(model, view).logits
    torch.testing.assert_close(trained, frozen)
    trained.sin().sum().backward()
    assert all(part.grad is not None for part in parts)


def test_a_copy_runs_by_its_own_weights():
    model, view = made("bert", packed=False)
    with torch.no_grad():
        before = read_signals(model, view).logits
        other = copy.deepcopy(model)
        other.base_model.encoder.layer[0].output.dense.weight.mul_(2)
        assert not torch.allclose(read_signals(other, view).logits, before)
        assert torch.equal(read_signals(model, view).logits, before)
