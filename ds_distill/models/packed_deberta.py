"""DeBERTa-v2 and -v3 on packed views.

transformers' encoder computes [T, T] relative positions and its attention [heads, T, T] scores.
Here its layers run one by one with another attention: flashdeberta's kernel on a GPU, a plain one
elsewhere. Source: He et al. 2021 (DeBERTa), equation 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from ds_distill.models.capture import Captured
from ds_distill.models.flat import FlatLayer, Part, flat_layers, runs_flat
from ds_distill.views import PackedView


def last_states(body: Any, view: PackedView, captured: Captured) -> torch.Tensor:
    """The states after the last layer of a DebertaV2Model, [T, H]; `captured` keeps those that it
    wants of the embeddings and each layer."""
    types = view.token_type_ids
    hidden = body.embeddings(
        input_ids=view.input_ids[None],
        token_type_ids=torch.zeros_like(view.input_ids)[None] if types is None else types[None],
        position_ids=view.position_ids[None],
    )[0]
    layers, tables = _layers(body.encoder), _tables(body.encoder)
    captured.keep(0, hidden[None])
    on_kernel = _on_kernel(hidden)
    attend = flash_attention if on_kernel else plain_attention
    with _tiles(view, body.config) if on_kernel else nullcontext(view) as view:
        for number, layer in enumerate(layers, start=1):
            context = _attention(layer, hidden, tables, view, attend)
            hidden = layer.output(layer.attended(context, hidden))
            captured.keep(number, hidden[None])
    return hidden


def parts_called(layer: Any) -> list[nn.Module]:
    """What `last_states` calls of a layer, but for the projections of its attention."""
    return [layer.attention.output, layer.intermediate, layer.output]


def _layers(encoder: Any) -> list[FlatLayer]:
    """Its layers; where a pass needs their modules, by these."""
    if runs_flat(encoder):
        return flat_layers(encoder, "_proj")
    found = []
    for layer in encoder.layer:
        own = layer.attention.self
        projected, half = partial(_projected, own), partial(_second_half, layer)
        found.append(FlatLayer(own, projected, layer.attention.output, half))
    return found


def _projected(module: Any, hidden: torch.Tensor, *_: int) -> list[torch.Tensor]:
    parts = module.query_proj, module.key_proj, module.value_proj
    return [_split(module, part, hidden) for part in parts]


def _second_half(layer: Any, attended: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, layer.output(layer.intermediate(attended), attended))


def _attention(
    layer: FlatLayer,
    hidden: torch.Tensor,
    tables: Callable[[Any], Tables],
    view: PackedView,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Disentangled attention within examples: [T, H] to [T, H].

    layer: its `attention` is transformers' DisentangledSelfAttention.
    tables: says such a module's.
    attend: `flash_attention` or `plain_attention`.
    """
    module = layer.attention
    query, key, value = layer.projected(hidden, len(hidden), -1, module.attention_head_size)
    position_key, position_query = tables(module)
    terms = 1 + (position_key is not None) + (position_query is not None)
    scale = 1 / math.sqrt(query.shape[-1] * terms)
    context = attend(query, key, value, position_key, position_query, view, module, scale)
    return context.flatten(1)


def _split(module: Any, projection: Part, x: torch.Tensor) -> torch.Tensor:
    """A projection's heads: [T, H] to [T, A, D]."""
    return cast(torch.Tensor, projection(x).unflatten(-1, (module.num_attention_heads, -1)))


Tables = tuple[torch.Tensor | None, torch.Tensor | None]
"""The relative embeddings by the projections of keys and of queries, [A, R, D] each; None where
attention reads none."""

_kept: WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, Tables]]] = WeakKeyDictionary()
"""By encoder: what its tables were made of, and those by attention module."""


def _tables(encoder: Any) -> Callable[[Any], Tables]:
    """What says the tables of an attention module. Those of frozen weights are made once, and again
    after these were moved, cast or loaded. They hold 4 R H bytes a layer in 16 bits, of R relative
    positions: 50 MB of DeBERTa-v3-large. ZeRO stage 3, which gathers weights by module, keeps none.
    """
    made_of = _made_of(encoder)
    if made_of is None:
        return partial(_project, encoder.get_rel_embedding())
    if encoder not in _kept or _kept[encoder][0] != made_of:
        _kept.pop(encoder, None)
        relative = encoder.get_rel_embedding()
        modules = [layer.attention.self for layer in encoder.layer]
        _kept[encoder] = made_of, {module: _project(relative, module) for module in modules}
    return _kept[encoder][1].__getitem__


def _made_of(encoder: Any) -> Any:
    """What tells whether tables are still those of an encoder; None: a pass makes its own."""
    parts = [encoder.rel_embeddings, getattr(encoder, "LayerNorm", None)]
    for layer in encoder.layer:
        parts += _projections(layer.attention.self)
    weights = [
        weight
        for part in parts
        if part is not None
        for weight in (part.weight, getattr(part, "bias", None))
        if weight is not None
    ]
    if any(one.requires_grad or one.is_inference() or hasattr(one, "ds_id") for one in weights):
        return None
    first = weights[0]
    modes = _autocast(first.device), torch.is_inference_mode_enabled()
    return modes, first.dtype, first.device, [(one.data_ptr(), one._version) for one in weights]


def _projections(module: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Of the relative embeddings, to keys and to queries."""
    own = "" if module.share_att_key else "pos_"
    return (
        getattr(module, f"{own}key_proj") if "c2p" in module.pos_att_type else None,
        getattr(module, f"{own}query_proj") if "p2c" in module.pos_att_type else None,
    )


def _project(relative: torch.Tensor, module: Any) -> Tables:
    table = relative[: 2 * module.pos_ebd_size]
    key, query = (
        None if one is None else _split(module, one, table).transpose(0, 1)
        for one in _projections(module)
    )
    return key, query


def _on_kernel(states: torch.Tensor) -> bool:
    """Whether flashdeberta's kernel takes what the projections of these states are."""
    dtype = _autocast(states.device) or states.dtype
    return states.is_cuda and dtype in (torch.bfloat16, torch.float16)


def _autocast(device: torch.device) -> torch.dtype | None:
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


class _Known(torch.Tensor):
    """Numbers on a device that Python has too: flashdeberta asks for them in each layer, and the
    host would wait for all that the GPU has still to do."""

    # A plain tensor in all else.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    numbers: tuple[int, ...]

    def tolist(self) -> list[int]:
        return [*self.numbers]


@contextmanager
def _tiles(view: PackedView, config: Any) -> Iterator[PackedView]:
    """The view for a pass of flashdeberta: within, its map of tiles is there, made on the device
    without a wait. A launch that needs smaller tiles, and a backward pass, make their own."""
    from flashdeberta.ops import flash_attention_varlen as ops

    known = view.host_cu_seqlens
    if known is None:
        yield view
        return
    ends = view.cu_seqlens.as_subclass(_Known)
    ends.numbers = known
    width, longest = config.hidden_size // config.num_attention_heads, view.max_seqlen
    tile = ops.get_fwd_config(known[-1], longest, longest, width, False)[0]
    count = sum(-(-(end - start) // tile) for start, end in pairwise(known))
    starts = view.cu_seqlens.long()
    tiles = (starts.diff() + tile - 1) // tile
    examples = torch.arange(len(tiles), device=starts.device)
    example = examples.repeat_interleave(tiles, output_size=count)
    first = tiles.cumsum(0) - tiles  # of each example
    within = torch.arange(count, device=starts.device) - first[example]
    key = known, len(tiles), tile, starts.device
    ops._mid_tensor_cache[key] = example, starts[example] + tile * within, count
    try:
        yield replace(view, cu_seqlens=ends)
    finally:
        ops._mid_tensor_cache.pop(key, None)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    view: PackedView,
    module: Any,
    scale: float,
) -> torch.Tensor:
    """The same as `plain_attention`, with flashdeberta's kernel: no [S, S] scores in memory."""
    from flashdeberta.ops.flash_attention_varlen import flash_attention_with_disentangled_varlen

    context: torch.Tensor = flash_attention_with_disentangled_varlen(
        query,
        key,
        value,
        None if position_key is None else position_key[None],
        None if position_query is None else position_query[None],
        view.cu_seqlens,
        view.cu_seqlens,
        view.max_seqlen,
        view.max_seqlen,
        sm_scale=scale,
        position_buckets=module.position_buckets,
        max_relative_distance=module.max_relative_positions,
    )
    return context


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    view: PackedView,
    module: Any,
    scale: float,
) -> torch.Tensor:
    """Disentangled attention example by example, for devices without the kernel.

    query, key, value: [T, A, D]. position_key, position_query: [A, R, D], for R relative
    positions. Returns [T, A, D].
    """
    slots = _slots(view.max_seqlen, module).to(query.device)
    contexts = []
    for start, end in pairwise(view.host_cu_seqlens or view.cu_seqlens.tolist()):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        slot = slots[: end - start, : end - start].expand(len(q), -1, -1)
        scores = q @ k.mT
        if position_key is not None:
            scores = scores + (q @ position_key.mT).gather(-1, slot)
        if position_query is not None:
            scores = scores + (k @ position_query.mT).gather(-1, slot.mT).mT
        contexts.append(((scale * scores).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(contexts)


def _slots(length: int, module: Any) -> torch.Tensor:
    """The relative embedding's index for a query at i and a key at j: int64 [length, length]."""
    position = torch.arange(length)
    distance = position[:, None] - position
    if module.position_buckets > 0:
        most = module.max_relative_positions
        distance = make_log_bucket_position(distance, module.position_buckets, most).long()
    span = module.pos_ebd_size
    return (distance + span).clamp(0, 2 * span - 1)
