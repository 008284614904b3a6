"""Encoders run without their modules, where nothing needs these: with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import LAYERS, padded_view
from transformers import PreTrainedModel
from unit.test_packed import FAMILIES, HEADS, models

from ds_distill.models.encoder import read_signals
from ds_distill.models.packed import parts_called
from ds_distill.reads import Reads
from ds_distill.views import PackedView, View

FLAT = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
"""Families whose padded and packed passes are flat; of DeBERTa packed ones are."""
CASES = [(name, packed) for name in FLAT for packed in (False, True)]
CASES += [(name, True) for name in FAMILIES if "deberta" in name]


def made(family: str, packed: bool, rows: bool = False) -> tuple[PreTrainedModel, View]:
    view = padded_view([7, 12, 5], rows=rows)
    model: PreTrainedModel = models(family, HEADS[rows])[packed].requires_grad_(False)
    return model, PackedView.of(view) if packed else view


def modules_called(model: PreTrainedModel, view: View, reads: Reads) -> tuple[Any, int]:
    """What a pass gives, and how many of its layers, or their parts, it calls."""
    called: list[int] = []
    hooks = [
        part.register_forward_hook(lambda *_: called.append(1))
        for part in parts_called(model.config, model.base_model.encoder.layer)
    ]
    signals = read_signals(model, view, reads)
    for hook in hooks:
        hook.remove()
    return signals, len(called)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("family", "packed"), CASES)
def test_a_flat_pass_gives_the_numbers_of_the_modules(
    family: str, packed: bool, rows: bool
) -> None:
    """To the bit; also what is taken of its states and its attention."""
    model, view = made(family, packed, rows)
    layers = () if "deberta" in family else (1, -1)
    reads = Reads((0, 1, -1), queries=layers, keys=layers, values=layers)
    own, count = modules_called(model, view, reads)  # with gradients
    assert count >= LAYERS
    with torch.no_grad():
        read_signals(model, view)  # the first pass looks whether it can run flat
        found, count = modules_called(model, view, reads)
    assert count == 0
    assert found.hidden.keys() == own.hidden.keys() == {0, 1, -1}
    for layer, state in own.hidden.items():
        assert torch.equal(found.hidden[layer], state)
    torch.testing.assert_close(found.logits, own.logits, rtol=1e-6, atol=1e-6)  # head as `own`'s
    for layer in layers:
        for name in ("queries", "keys", "values"):
            ours, theirs = (getattr(of.attention[layer], name) for of in (found, own))
            assert torch.equal(ours, theirs)


def shifted(layer: Any) -> None:
    own = layer.forward
    layer.forward = lambda *inputs, **options: own(*inputs, **options) + 1


def is_trained(model: PreTrainedModel) -> None:
    model.base_model.train()


def is_sharded(model: PreTrainedModel) -> None:
    next(model.base_model.encoder.parameters()).ds_id = 0


def computes_more(model: PreTrainedModel) -> None:
    shifted(model.base_model.encoder.layer[1])


@pytest.mark.parametrize("change", [is_trained, is_sharded, computes_more])
def test_layers_are_called_where_they_must(change: Callable[[PreTrainedModel], None]) -> None:
    model, view = made("bert", packed=False)
    change(model)
    with torch.no_grad():
        read_signals(model, view)
        _, count = modules_called(model, view, Reads((-1,)))
    assert count == LAYERS


@pytest.mark.parametrize("family", ["bert", "deberta-v3"])
def test_a_flat_pass_follows_its_weights(family: str) -> None:
    """Changed in place, cast and put elsewhere, as engines do, between two passes."""
    model, view = made(family, packed=True)
    with torch.no_grad():
        before = read_signals(model, view).logits
        model.base_model.encoder.layer[0].output.dense.weight.mul_(2)
        model.double()
        after = read_signals(model, view).logits
    own = read_signals(model, view).logits  # with gradients: modules
    assert after.dtype == torch.float64 and not torch.allclose(before.double(), after)
    torch.testing.assert_close(after, own)


def test_a_copy_runs_by_its_own_weights() -> None:
    model, view = made("bert", packed=False)
    with torch.no_grad():
        before = read_signals(model, view).logits
        other = copy.deepcopy(model)
        other.base_model.encoder.layer[0].output.dense.weight.mul_(2)
        assert not torch.allclose(read_signals(other, view).logits, before)
        assert torch.equal(read_signals(model, view).logits, before)
