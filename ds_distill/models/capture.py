"""States of layers and inputs of attention, taken while a model runs: what is not asked for is not
kept.

States are taken by hooks on the layers, inputs of attention at transformers' attention interface,
by a name of it that is in a model's configuration only while one of the layers runs: it is in no
configuration that is saved. When activations are computed again in the backward pass, nothing is
taken any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_distill.models.configuration import unseen_attention
from ds_distill.models.load import layers_of
from ds_distill.reads import AttentionInputs, Reads
from ds_distill.views import PackedView, View

CAPTURED = "ds_distill_captured"
"""The `attn_implementation` name of `_attend`."""

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""An attention of transformers' interface."""

_capture: ContextVar[Captured] = ContextVar("capture")
"""That of the model which runs."""


class Captured:
    """What was taken of one pass."""

    def __init__(self, reads: Reads, depth: int, attend: Attend | None = None) -> None:
        """
        depth: of the model. attend: its own attention; None: that of its module.
        """
        self.states: dict[int, torch.Tensor] = {}
        """By layer, as it was asked for: float [B, S, H], or of a packed view [1, T, H]."""
        self._reads, self._depth, self._attend = reads, depth, attend
        self._attention: dict[int, tuple[dict[str, torch.Tensor], float]] = {}
        self._layer = 0
        self.kept = self._asked(reads.states)
        """By number from 0, the embeddings: the states that were asked for, as they were called."""
        self.attended = {*self._asked(reads.attention)}
        """The numbers of layers whose attention was asked for."""

    def _asked(self, layers: Any) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for layer in sorted(layers):
            found.setdefault(layer % (self._depth + 1), []).append(layer)
        return found

    def attend_of(self, attention: nn.Module) -> Attend:
        """What the attention of a layer computes with, as transformers calls it."""
        if self._attend is not None:
            return self._attend
        return cast(Attend, sys.modules[type(attention).__module__].eager_attention_forward)

    def keep(self, number: int, state: torch.Tensor) -> None:
        """Keep the state behind a layer, counted from 0, the embeddings, if it was asked for."""
        for layer in self.kept.get(number, []):
            self.states[layer] = state

    def enter(self) -> int:
        """A layer begins: its number, from 1."""
        self._layer += 1
        return self._layer

    def take(self, parts: dict[str, torch.Tensor], scale: float) -> None:
        """Keep what was asked for of the attention of the layer that runs."""
        if parts["queries"].shape[1] != parts["keys"].shape[1]:
            raise ValueError("heads that share keys and values: attention cannot be taken")
        for name in parts:
            for layer in self._asked(getattr(self._reads, name)).get(self._layer, []):
                self._attention.setdefault(layer, ({}, scale))[0][name] = parts[name]

    def attention(self, view: View) -> dict[int, AttentionInputs]:
        """The inputs of attention by layer, as it was asked for, padded."""
        missing = self._reads.attention - self._attention.keys()
        if missing:
            raise ValueError(f"the attention of layers {sorted(missing)} did not run")
        if not self._attention:
            return {}
        mask, spread = _grid(view)
        found = {}
        for layer, (parts, scale) in self._attention.items():
            grids = {name: spread(part) for name, part in parts.items()}
            queries, keys, values = map(grids.get, ("queries", "keys", "values"))
            found[layer] = AttentionInputs(queries, keys, values, scale, mask)
        return found


def _grid(view: View) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The real tokens of a view, bool [B, S], and what brings inputs of attention there."""
    if not isinstance(view, PackedView):
        return view.attention_mask.bool(), lambda tensor: tensor
    starts = view.cu_seqlens.long()
    lengths = starts.diff()
    mask = torch.arange(view.max_seqlen, device=starts.device) < lengths[:, None]
    tokens = torch.arange(len(view.input_ids), device=starts.device)
    example = torch.searchsorted(starts[1:], tokens, right=True)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        _, heads, _, width = tensor.shape
        grid = tensor.new_zeros(*mask.shape, heads, width)
        grid[example, view.position_ids] = tensor[0].transpose(0, 1)
        return grid.transpose(1, 2)

    return mask, spread


def own_attention(config: PreTrainedConfig) -> Attend | None:
    """The attention that a configuration names; None: that of the model's own module."""
    name = config._attn_implementation
    return None if name == "eager" else cast(Attend, ALL_ATTENTION_FUNCTIONS[name])


@contextmanager
def capturing(model: PreTrainedModel, reads: Reads) -> Iterator[Captured]:
    """Within, a pass through a model leaves what it is asked for in what this yields.

    Raises ValueError for inner layers of a model that has no one stack of them, and for attention
    that is more than its queries and keys.
    """
    config, depth = model.config, model.config.num_hidden_layers
    captured = Captured(reads, depth, own_attention(config))
    if not captured.kept and not captured.attended:
        yield captured
        return
    own, implement = config._attn_implementation, partial(setattr, config, "_attn_implementation")
    if reads.attention and (why := unseen_attention(config)):
        raise ValueError(f"{type(model).__name__}: {why}")
    stack = _stack(model) if {*captured.kept} - {depth} or captured.attended else []

    def before(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        number = captured.enter()
        if number == 1:
            captured.keep(0, args[0] if args else options["hidden_states"])
        if number in captured.attended:
            implement(CAPTURED)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        implement(own)
        number = captured._layer
        if number < depth:
            captured.keep(number, output[0] if isinstance(output, tuple) else output)

    def last(_: nn.Module, __: Any, output: Any) -> None:
        captured.keep(depth, output[0])

    with ExitStack() as hooks:
        hooks.callback(implement, own)
        # Behind DeepSpeed's, which put their own functions into the graph.
        for layer in stack:
            hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        if depth in captured.kept:  # some models have a norm behind the last layer
            hooks.callback(model.base_model.register_forward_hook(last).remove)
        token = _capture.set(captured)
        hooks.callback(_capture.reset, token)
        yield captured


def _stack(model: PreTrainedModel) -> list[nn.Module]:
    """A model's layers, as they are called. Raises ValueError where it is not clear."""
    if model.config.model_type == "albert":  # fewer modules than layers, each called several times
        return [*model.base_model.encoder.albert_layer_groups]
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no one stack of {model.config.num_hidden_layers} layers, "
            "so that it is not clear which of them is asked for: take the last one, -1"
        )
    return layers


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Any:
    """The model's own attention, whose inputs are kept."""
    captured = _capture.get()
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    captured.take({"queries": query, "keys": key, "values": value}, scale)
    own = captured.attend_of(module)
    return own(module, query, key, value, attention_mask, **options)


AttentionInterface.register(CAPTURED, _attend)
