"""Encoders on packed views: examples end to end, no padding.

All of an encoder but its attention treats tokens one by one. So a packed view needs positions
that begin anew with each example and attention that knows where examples end; the rest is
transformers' model as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_distill.models import packed_deberta
from ds_distill.models.configuration import PACKED_FAMILIES, first_position, takes_packed
from ds_distill.types import PackedView

ATTENTION = "ds_distill_packed"
"""transformers' name for `attend`: a model loaded with it takes packed and padded views."""


def packed_backend(config: PreTrainedConfig, device: torch.device) -> str | None:
    """What computes a model's attention on packed views, with its version: part of what its words
    depend on. None: the model has to be given padded ones."""
    cuda = device.type == "cuda"
    if not takes_packed(config):
        return None
    if config.model_type == "deberta-v2" and cuda:
        found = find_spec("flashdeberta") is not None
        return f"flashdeberta {version('flashdeberta')}" if found else None
    return f"varlen_attn of torch {version('torch')}" if cuda else "example by example"


def packed_attention(config: PreTrainedConfig) -> str | None:
    """The attention implementation that transformers must load a model with that is to take packed
    views; None where its family has its own."""
    return ATTENTION if config.model_type in PACKED_FAMILIES else None


def packed_states(
    model: PreTrainedModel, view: PackedView, layers: Collection[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The last layer's states, [T, H], and those of `layers`, as `Signals.hidden` numbers them.

    Raises ValueError for a model that was not loaded to take packed views.
    """
    body, config = model.base_model, model.config
    if config.model_type == "deberta-v2" and takes_packed(config):
        every = packed_deberta.states(body, view)
        return every[-1], {layer: every[layer] for layer in layers}
    if config.model_type not in PACKED_FAMILIES or config._attn_implementation != ATTENTION:
        raise ValueError(
            f"{type(model).__name__} with {config._attn_implementation} attention would mix the "
            f"examples of a packed view; load it with attn_implementation={ATTENTION!r}"
        )
    inputs = {
        "input_ids": view.input_ids[None],
        "position_ids": (view.position_ids + first_position(config))[None],
    }
    if "token_type_ids" in inspect.signature(body.forward).parameters:
        types = view.token_type_ids
        types = torch.zeros_like(view.input_ids) if types is None else types
        inputs["token_type_ids"] = types[None]
    output = body(
        **inputs,
        cu_seq_lens_q=view.cu_seqlens,
        cu_seq_lens_k=view.cu_seqlens,
        max_length_q=view.max_seqlen,
        max_length_k=view.max_seqlen,
        output_hidden_states=bool(layers),
    )
    states = {layer: output.hidden_states[layer][0] for layer in layers}
    return output.last_hidden_state[0], states


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within examples; torch's on a padded view. No dropout on a packed one.

    query, key, value: [1, A, T, D] of a packed view. Returns [1, T, A, D].
    """
    cu_seqlens: torch.Tensor | None = options.get("cu_seq_lens_q")
    if cu_seqlens is None:
        padded: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, **options
        )
        return padded
    assert not (module.training and options.get("dropout")), "packed attention has no dropout"
    q, k, v = query[0], key[0], value[0]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        max_seqlen = options["max_length_q"]
        context = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return cast(torch.Tensor, context)[None], None
    parts = [
        F.scaled_dot_product_attention(q[:, start:end], k[:, start:end], v[:, start:end])
        for start, end in pairwise(cu_seqlens.tolist())
    ]
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # None for a packed view, which has no mask
