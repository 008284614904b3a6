"""Passes of encoders without their modules: the same operations on the same weights, in one loop.
As modules a layer of BERT's kind takes 16 calls, and 3 times the time of the host.

Layers of another kind, activations that are computed again in the backward pass, and weights that
ZeRO stage 3 shards, which are gathered by module, stay transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
TokenAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]
"""Of queries, keys and values [T, A, D] of a packed view, and of a scale."""


class FlatLayer(NamedTuple):
    """What a layer computes, part by part, of states [T, H]."""

    attention: Any
    """The module of its attention, for what that has beside weights."""
    projected: Callable[..., Sequence[torch.Tensor]]
    """Queries, keys and values of states [T, H], and of their shape: [T, A, D] or [B, S, A, D]."""
    attended: Part
    """Of the context, and of the states that are added to it."""
    output: Part
    """Of what is attended."""
    is_current: Callable[[], bool] = lambda: True
    """Whether its weights are still where they were, and whole."""


def _linear(module: Any) -> Part:
    weight, bias = module.weight, module.bias
    return lambda states: F.linear(states, weight, bias)


class _Projections:
    """To queries, keys and values. Frozen weights are made one, of which the modules' own are parts
    then, for one product in place of three."""

    def __init__(self, *parts: Any) -> None:
        self._first = parts[0].weight
        self._each: list[Part] = []
        if any(_stays_apart(weight) for part in parts for weight in part.parameters()):
            self._each = [*map(_linear, parts)]
            return
        self._weight = _joined([part.weight for part in parts])
        self._bias = _joined([part.bias for part in parts])

    def is_current(self) -> bool:
        """Whether the weights are still where they were, whole, and trained or frozen as then."""
        if is_sharded(self._first):
            return False
        apart = _stays_apart(self._first)
        if self._each or apart:
            return bool(self._each) == apart
        return self._first.data_ptr() == self._weight.data_ptr()

    def __call__(self, states: torch.Tensor, *shape: int) -> Sequence[torch.Tensor]:
        if self._each:
            return [part(states).view(shape) for part in self._each]
        *lead, heads, width = shape
        return F.linear(states, self._weight, self._bias).view(*lead, 3, heads, width).unbind(-3)


def _stays_apart(weight: nn.Parameter) -> bool:
    return weight.requires_grad or weight.is_meta  # a plan would take the new one for an activation


def _joined(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    with torch.inference_mode(False):  # a later pass may be one of a training
        whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.chunk(len(weights)), strict=True):
        weight.data = part
    return whole


def _normed_sum(dense: Any, norm: Any, dropout: Any = None) -> Part:
    projected = _linear(dense)
    scale, shift, shape, eps = norm.weight, norm.bias, norm.normalized_shape, norm.eps

    def part(states: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        states = projected(states)
        if dropout is not None and (rate := _rate(dropout)):
            states = F.dropout(states, rate)
        return torch.layer_norm(states + added, shape, scale, shift, eps)

    return part


def _rate(dropout: Any) -> float:
    return float(dropout.p) if dropout.training else 0.0


def _layer(module: Any, ending: str) -> FlatLayer:
    if hasattr(module, "ffn"):
        return _layer_of_distilbert(module)
    attention, attended, output = module.attention.self, module.attention.output, module.output
    widen = _linear(module.intermediate.dense)
    act = module.intermediate.intermediate_act_fn.forward
    narrow = _normed_sum(output.dense, output.LayerNorm, output.dropout)
    parts = (getattr(attention, name + ending) for name in ("query", "key", "value"))
    projected = _Projections(*parts)
    return FlatLayer(
        attention,
        projected=projected,
        attended=_normed_sum(attended.dense, attended.LayerNorm, attended.dropout),
        output=lambda states: narrow(act(widen(states)), states),
        is_current=projected.is_current,
    )


def _layer_of_distilbert(module: Any) -> FlatLayer:
    attention, wide = module.attention, module.ffn
    widen, act = _linear(wide.lin1), wide.activation.forward
    narrow = _normed_sum(wide.lin2, module.output_layer_norm, wide.dropout)
    projected = _Projections(attention.q_lin, attention.k_lin, attention.v_lin)
    return FlatLayer(
        attention,
        projected=projected,
        attended=_normed_sum(attention.out_lin, module.sa_layer_norm),
        output=lambda states: narrow(act(widen(states)), states),
        is_current=projected.is_current,
    )


def runs_flat(encoder: Any) -> bool:
    """Whether a pass needs none of an encoder's modules: nothing is gathered, and no activations
    are computed again."""
    if encoder.training and getattr(encoder.layer[0], "gradient_checkpointing", False):
        return False
    known = next(iter(_kept(encoder).values()), None)
    return bool(known and known[0].is_current()) or not is_sharded(next(encoder.parameters()))


def is_sharded(weight: torch.Tensor) -> bool:
    """Whether ZeRO stage 3 has a share of it on each rank."""
    return hasattr(weight, "ds_id")


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
    known = kept.get(ending)
    if known is None or (known and not known[0].is_current()):
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
def flat(
    model: PreTrainedModel,
    layers: list[FlatLayer],
    captured: Captured,
    attend: TokenAttention | None = None,
) -> Iterator[None]:
    """Within, a pass through a model runs `layers` in place of its own, if there are any.

    captured: of the model, which takes what it is asked for. attend: of a packed view.
    """
    if not layers:
        yield
        return
    encoder = _encoder(model)
    encoder.forward = partial(_states, layers, captured, attend)
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
            found = _states(layers, nothing, None, tokens).last_hidden_state
    same = float((found - expected).abs().max()) <= float(expected.abs().max()) * (
        1e-5 if expected.dtype == torch.float32 else 1e-2
    )
    return not same


def _states(
    layers: list[FlatLayer],
    captured: Captured,
    attend: TokenAttention | None,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    encoder_hidden_states: None = None,
    encoder_attention_mask: None = None,
    past_key_values: None = None,
    use_cache: bool | None = None,
    **options: Any,
) -> Output:
    """What the forward of an encoder gives: of states [B, S, H], or [1, T, H] of a packed view."""
    shape = hidden_states.shape
    if attend is None:
        context = partial(_context, captured, attention_mask, options, shape[0])
    else:
        assert not _rate(layers[0].attention.dropout), "packed attention has no dropout"
        context = partial(_context_of_tokens, captured, attend)
    # Of two dimensions a product is one operation, forward and backward, in place of three.
    hidden = hidden_states.flatten(0, 1)
    kept = {0: hidden}
    for layer in layers:
        number = captured.enter()
        attended = layer.attended(context(layer, number, hidden), hidden)
        hidden = layer.output(attended)
        if number in captured.kept:
            kept[number] = hidden
    for number, state in kept.items():
        # Not before: gradients are added up in the order of the modules' own passes.
        captured.keep(number, state.view(shape))
    return Output(last_hidden_state=hidden.view(shape))


def _context(
    captured: Captured,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    examples: int,
    layer: FlatLayer,
    number: int,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """What the attention of a layer gives of states [B S, H], by transformers' interface."""
    module = layer.attention
    of_tokens = layer.projected(
        hidden, examples, len(hidden) // examples, -1, module.attention_head_size
    )
    queries, keys, values = (part.transpose(1, 2) for part in of_tokens)
    if number in captured.attended:
        parts = {"queries": queries, "keys": keys, "values": values}
        captured.take(parts, module.scaling)
    attend, options["dropout"] = captured.attend_of(module), _rate(module.dropout)
    context, _ = attend(module, queries, keys, values, mask, scaling=module.scaling, **options)
    return context.reshape(len(hidden), -1)


def _context_of_tokens(
    captured: Captured, attend: TokenAttention, layer: FlatLayer, number: int, hidden: torch.Tensor
) -> torch.Tensor:
    """The same of the states [T, H] of a packed view, which has no dropout."""
    module = layer.attention
    queries, keys, values = layer.projected(hidden, len(hidden), -1, module.attention_head_size)
    if number in captured.attended:
        parts = {"queries": queries, "keys": keys, "values": values}
        parts = {name: of.transpose(0, 1)[None] for name, of in parts.items()}
        captured.take(parts, module.scaling)
    return attend(queries, keys, values, module.scaling).flatten(1)
