"""Passes of encoders without their modules: the same operations on the same weights, in one loop.
As modules a layer of BERT's kind takes 16 calls, and 3 times the time of the host.

Layers of another kind, activations that are computed again in the backward pass, and weights that
ZeRO stage 3 shards, which are gathered by module, stay transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output

from ds_distill.models.capture import Captured, own_attention
from ds_distill.models.load import seeded
from ds_distill.reads import Reads

Part = Callable[..., torch.Tensor]


class FlatLayer(NamedTuple):
    """What a layer computes, part by part, of states [..., H]."""

    attention: Any
    """The module of its attention, for what that has beside weights."""
    projections: tuple[Part, Part, Part]
    """To queries, keys and values."""
    attended: Part
    """Of the context, and of the states that are added to it."""
    output: Part
    """Of what is attended."""


def _linear(module: Any) -> Part:
    return partial(F.linear, weight=module.weight, bias=module.bias)


def _normed_sum(dense: Any, norm: Any, dropout: Any = None) -> Part:
    projected = _linear(dense)
    scale, shift, shape, eps = norm.weight, norm.bias, norm.normalized_shape, norm.eps

    def part(states: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        states = projected(states)
        if dropout is not None and (rate := _rate(dropout)):
            states = F.dropout(states, rate)
        return F.layer_norm(states + added, shape, scale, shift, eps)

    return part


def _rate(dropout: Any) -> float:
    return float(dropout.p) if dropout.training else 0.0


def _layer(module: Any, ending: str) -> FlatLayer:
    if hasattr(module, "ffn"):
        return _layer_of_distilbert(module)
    attention, attended, output = module.attention.self, module.attention.output, module.output
    widen, act = _linear(module.intermediate.dense), module.intermediate.intermediate_act_fn
    narrow = _normed_sum(output.dense, output.LayerNorm, output.dropout)
    return FlatLayer(
        attention,
        projections=tuple(  # type: ignore[arg-type]
            _linear(getattr(attention, name + ending)) for name in ("query", "key", "value")
        ),
        attended=_normed_sum(attended.dense, attended.LayerNorm, attended.dropout),
        output=lambda states: narrow(act(widen(states)), states),
    )


def _layer_of_distilbert(module: Any) -> FlatLayer:
    attention, wide = module.attention, module.ffn
    widen, act = _linear(wide.lin1), wide.activation
    narrow = _normed_sum(wide.lin2, module.output_layer_norm, wide.dropout)
    return FlatLayer(
        attention,
        projections=(_linear(attention.q_lin), _linear(attention.k_lin), _linear(attention.v_lin)),
        attended=_normed_sum(attention.out_lin, module.sa_layer_norm),
        output=lambda states: narrow(act(widen(states)), states),
    )


def runs_flat(encoder: Any) -> bool:
    """Whether a pass needs none of an encoder's modules: nothing is gathered, and no activations
    are computed again."""
    again = encoder.training and getattr(encoder.layer[0], "gradient_checkpointing", False)
    return not again and not hasattr(next(encoder.parameters()), "ds_id")


_KEPT = "_flat_layers"
"""The name of the layers that an encoder keeps: which encoder's they are, for a copy of it has the
weights of the first in them, and by `ending`. What is built of weights may hold their model, so no
dictionary of encoders could let one go."""


def _kept(encoder: nn.Module) -> dict[str, list[FlatLayer]]:
    whose, layers = vars(encoder).get(_KEPT, (None, {}))
    if whose is None or whose() is not encoder:
        layers = {}
        vars(encoder)[_KEPT] = ref(encoder), layers
    return cast(dict[str, list[FlatLayer]], layers)


def flat_layers(encoder: Any, ending: str = "") -> list[FlatLayer]:
    """An encoder's layers; none where they have other parts than BERT's: two projections, with a
    sum and a norm behind each half. ending: of the names of attention's projections."""
    kept = _kept(encoder)
    if ending not in kept:
        try:
            kept[ending] = [_layer(module, ending) for module in encoder.layer]
        except AttributeError:
            kept[ending] = []
    return kept[ending]


def layers_to_run_flat(model: PreTrainedModel) -> list[FlatLayer]:
    """The layers of a model of BERT's kind for a pass that calls none of them; none where it must.
    The first time it looks at a few tokens whether both ways say the same."""
    encoder = _encoder(model)
    if encoder is None or not runs_flat(encoder):
        return []
    known = "" in _kept(encoder) or model.device.type == "meta"  # a plan's has no numbers
    layers = flat_layers(encoder)
    if layers and not known and _differs(model, encoder, layers):
        layers = _kept(encoder)[""] = []
    return layers


def _encoder(model: PreTrainedModel) -> Any:
    """What holds a model's layers, `layer`; None where it has another form."""
    body = model.base_model
    found = getattr(body, "encoder", None) or getattr(body, "transformer", None)
    return found if hasattr(found, "layer") else None


@contextmanager
def flat(model: PreTrainedModel, layers: list[FlatLayer], captured: Captured) -> Iterator[None]:
    """Within, a pass through a model runs `layers` in place of its own, if there are any.

    captured: of the model, which takes what it is asked for.
    """
    if not layers:
        yield
        return
    encoder = _encoder(model)
    encoder.forward = partial(_states, layers, captured)
    try:
        yield
    finally:
        del encoder.forward


def _differs(model: PreTrainedModel, encoder: Any, layers: list[FlatLayer]) -> bool:
    width = model.config.hidden_size
    tokens = torch.linspace(-2, 2, 8 * width, device=model.device).sin()
    tokens = tokens.to(model.dtype).view(1, 8, width)
    nothing = Captured(Reads(), len(layers), own_attention(model.config))
    with torch.no_grad():
        with seeded(0):  # dropout draws
            expected = encoder(tokens).last_hidden_state
        with seeded(0):
            found = _states(layers, nothing, tokens).last_hidden_state
    same = float((found - expected).abs().max()) <= float(expected.abs().max()) * (
        1e-5 if expected.dtype == torch.float32 else 1e-2
    )
    return not same


def _states(
    layers: list[FlatLayer],
    captured: Captured,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    encoder_hidden_states: None = None,
    encoder_attention_mask: None = None,
    past_key_values: None = None,
    use_cache: bool | None = None,
    **options: Any,
) -> Output:
    """What the forward of an encoder gives: of states [B, S, H]."""
    hidden = hidden_states
    captured.keep(0, hidden)
    for layer in layers:
        number = captured.enter()
        context = _context(layer, captured, number, hidden, attention_mask, options)
        attended = layer.attended(context, hidden)
        del context  # as many numbers as the states
        hidden = layer.output(attended)
        captured.keep(number, hidden)
    return Output(last_hidden_state=hidden)


def _context(
    layer: FlatLayer,
    captured: Captured,
    number: int,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """What the attention of a layer gives of states [B, S, H], by transformers' interface."""
    module = layer.attention
    heads = (*hidden.shape[:-1], -1, module.attention_head_size)
    queries, keys, values = (part(hidden).view(heads).transpose(1, 2) for part in layer.projections)
    if number in captured.attended:
        parts = {"queries": queries, "keys": keys, "values": values}
        captured.take(parts, module.scaling)
    attend, options["dropout"] = captured.attend_of(module), _rate(module.dropout)
    context, _ = attend(module, queries, keys, values, mask, scaling=module.scaling, **options)
    return context.flatten(2)
