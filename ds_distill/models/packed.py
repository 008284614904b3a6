"""Encoders on packed views: examples end to end, no padding.

Only attention mixes tokens in an encoder. So a packed view needs position ids that start again with
each example, and attention within examples; everything else is transformers' unchanged model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
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
from ds_distill.models.capture import Captured
from ds_distill.models.configuration import PACKED_FAMILIES, first_position, takes_packed
from ds_distill.views import PackedView, PaddedView

ATTENTION = "ds_distill_packed"
"""The `attn_implementation` name of `attend`, which takes packed and padded views, and waits for no
device."""
FLASHDEBERTA_WIDTHS = (16, 32, 64, 128)
"""Of a head: powers of two that a GPU's matrix units take."""


def packed_backend(config: PreTrainedConfig, device: torch.device, *, half: bool) -> str | None:
    """The attention backend of a model on packed views, with its version: part of a cache's
    fingerprint. None: the model needs padded views.

    half: whether the model computes in bf16 or fp16, which kernels on a GPU take alone.
    """
    if not takes_packed(config):
        return None
    if device.type != "cuda" or not half:
        return "example by example"
    width = config.hidden_size // config.num_attention_heads
    if config.model_type == "deberta-v2":
        takes = find_spec("flashdeberta") is not None and takes_flashdeberta(config)
        return f"flashdeberta {version('flashdeberta')}" if takes else None
    # FlashAttention refuses others (torch's flash_api.cpp, mha_varlen_fwd).
    takes = torch.cuda.get_device_capability(device) >= (8, 0) and width % 8 == 0 and width <= 256
    return f"varlen_attn of torch {version('torch')}" if takes else None


def takes_flashdeberta(config: PreTrainedConfig) -> bool:
    """Whether flashdeberta's kernel can be a model's attention."""
    is_deberta = config.model_type == "deberta-v2" and takes_packed(config)
    return is_deberta and config.hidden_size // config.num_attention_heads in FLASHDEBERTA_WIDTHS


def packed_attention(config: PreTrainedConfig) -> str | None:
    """The `attn_implementation` to load a model with, so that it takes packed views; None where its
    type needs no special one."""
    return ATTENTION if config.model_type in PACKED_FAMILIES else None


def padded_inputs(model: PreTrainedModel, view: PaddedView) -> dict[str, torch.Tensor]:
    """The arguments of a pass on a padded view; without a mask, attention is faster."""
    inputs = view.model_inputs()
    if view.is_full and model.config._attn_implementation == ATTENTION:
        del inputs["attention_mask"]
    return inputs


def parts_called(config: PreTrainedConfig, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that a pass calls whole, of a model's layers: these themselves, or their parts
    where packed views are read without calling them."""
    if config.model_type == "deberta-v2" and takes_packed(config):
        return [part for layer in layers for part in packed_deberta.parts_called(layer)]
    return [*layers]


def packed_states(model: PreTrainedModel, view: PackedView, captured: Captured) -> torch.Tensor:
    """The last layer's states, [T, H].

    captured: of the model, which takes what it is asked for.

    Raises ValueError for a model that was not loaded for packed views.
    """
    body, config = model.base_model, model.config
    if config.model_type == "deberta-v2" and takes_packed(config):
        return packed_deberta.last_states(body, view, captured)
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
    )
    return cast(torch.Tensor, output.last_hidden_state[0])


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within the examples of a packed view, without dropout; on a padded view, sdpa.

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


def _mask(**options: Any) -> torch.Tensor | None:
    """sdpa's, which transformers leaves out where a batch has no padding: to see that, each pass
    would wait for all that the GPU has still to do. None where no mask is given."""
    given = options["attention_mask"] is not None
    return cast(
        torch.Tensor | None, sdpa_mask(**{**options, "allow_is_bidirectional_skip": not given})
    )


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, _mask)
