"""Encoders on packed views: examples end to end, no padding.

Only attention mixes tokens in an encoder. So a packed view needs position ids that start again with
each example, and attention within examples; everything else is transformers' unchanged model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
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
from ds_distill.models.configuration import first_position, is_packed_deberta
from ds_distill.views import PackedView, PaddedView

ATTENTION = "ds_distill_packed"
"""The `attn_implementation` name of `attend`, which takes packed and padded views, and waits for no
device."""
FLASHDEBERTA_WIDTHS = (16, 32, 64, 128)
"""Of a head: powers of two that a GPU's matrix units take."""


def takes_flashdeberta(config: PreTrainedConfig) -> bool:
    """Whether flashdeberta's kernel can be a model's attention."""
    return (
        is_packed_deberta(config)
        and config.hidden_size // config.num_attention_heads in FLASHDEBERTA_WIDTHS
    )


def has_flashdeberta(config: PreTrainedConfig) -> bool:
    """Whether it is a model's attention on a GPU; where there is none, the package is taken to be
    installed where the GPUs are."""
    is_there = find_spec("flashdeberta") is not None or not torch.cuda.is_available()
    return is_there and takes_flashdeberta(config)


def padded_inputs(model: PreTrainedModel, view: PaddedView) -> dict[str, torch.Tensor]:
    """The arguments of a pass on a padded view; without a mask, attention is faster."""
    inputs = view.model_inputs()
    if view.is_full and model.config._attn_implementation == ATTENTION:
        del inputs["attention_mask"]
    return inputs


def parts_called(config: PreTrainedConfig, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that a pass calls whole, of a model's layers: these themselves, or their parts
    where packed views are read without calling them."""
    if is_packed_deberta(config):
        return [part for layer in layers for part in packed_deberta.parts_called(layer)]
    return [*layers]


EMBEDDINGS_THEN_LAYERS = ("bert", "roberta", "xlm-roberta", "camembert")
"""Models whose layers take what their embeddings give. Without a mask to make, a flat pass calls
nothing else."""


def packed_states(
    model: PreTrainedModel, view: PackedView, captured: Captured, is_flat: bool = False
) -> torch.Tensor:
    """The last layer's states, [T, H].

    captured: of the model, which takes what it is asked for. is_flat: within `flat`.

    Raises ValueError for a model that was not loaded for packed views.
    """
    body, config = model.base_model, model.config
    if is_packed_deberta(config):
        return packed_deberta.last_states(body, view, captured)
    if config._attn_implementation != ATTENTION:
        raise ValueError(
            f"{type(model).__name__} with {config._attn_implementation} attention would mix the "
            f"examples of a packed view; load it with attn_implementation={ATTENTION!r}"
        )
    inputs: dict[str, Any] = {
        "input_ids": view.input_ids[None],
        "position_ids": (view.position_ids + first_position(config))[None],
    }
    kind: Any = type(body)
    if _takes_types(kind):
        types = view.token_type_ids
        types = torch.zeros_like(view.input_ids) if types is None else types
        inputs["token_type_ids"] = types[None]
    if is_flat and config.model_type in EMBEDDINGS_THEN_LAYERS:
        return cast(torch.Tensor, body.encoder(body.embeddings(**inputs)).last_hidden_state[0])
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        # Of four dimensions it is taken as it is; without one, layers with a window get [T, T].
        inputs["attention_mask"] = torch.empty(1, 1, 0, 0, device=view.input_ids.device)
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

    query: [1, A, T, D] of a packed view; key, value: likewise, maybe of fewer heads. Returns
    [1, T, A, D]. `options` may have a `scaling`, and a `sliding_window`: a token sees the others
    that are nearer to it than that, on both sides.
    """
    cu_seqlens: torch.Tensor | None = options.get("cu_seq_lens_q")
    if cu_seqlens is None:
        padded: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, **options
        )
        return padded
    assert not (module.training and options.get("dropout")), "packed attention has no dropout"
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    scale, window = options.get("scaling"), options.get("sliding_window")
    found = attend_tokens(q, k, v, scale, cu_seqlens, options["max_length_q"], window)
    return found[None], None


def attend_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    cu_seqlens: torch.Tensor,
    longest: int,
    window: int | None = None,
) -> torch.Tensor:
    """Attention within the examples of a packed view, [T, A, D]; see `attend`."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, cu_seqlens, longest, scale, window)
    parts = []
    q, k, v = (part.transpose(0, 1) for part in (query, key, value))
    for start, end in pairwise(cu_seqlens.tolist()):
        near = None
        if window is not None:
            position = torch.arange(end - start, device=q.device)
            near = (position[:, None] - position).abs() < window
        own_q, own_k, own_v = (x[:, start:end] for x in (q, k, v))
        parts.append(
            F.scaled_dot_product_attention(
                own_q, own_k, own_v, attn_mask=near, scale=scale, enable_gqa=len(k) != len(q)
            )
        )
    return torch.cat(parts, dim=1).transpose(0, 1)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """FlashAttention, [T, A, D]. Without gradients torch's operation itself: the autograd layer of
    `varlen_attn` takes twice its time on the host, in each layer."""
    side = -1 if window is None else window - 1
    if torch.is_grad_enabled():
        grouped: dict[str, Any] = {} if key.shape[1] == query.shape[1] else {"enable_gqa": True}
        lengths = cu_seqlens, cu_seqlens, longest, longest
        whole = varlen_attn(
            query, key, value, *lengths, scale=scale, window_size=(side, side), **grouped
        )
        return cast(torch.Tensor, whole)
    found = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,  # dropout
        False,  # causal
        False,  # a mask for debugging
        scale=scale,
        window_size_left=side,
        window_size_right=side,
    )
    return cast(torch.Tensor, found[0])


@cache
def _takes_types(body: type[nn.Module]) -> bool:
    return "token_type_ids" in inspect.signature(body.forward).parameters


def _mask(**options: Any) -> torch.Tensor | None:
    """sdpa's, which transformers leaves out where a batch has no padding: to see that, each pass
    would wait for all that the GPU has still to do. None where no mask is given."""
    given = options["attention_mask"] is not None
    return cast(
        torch.Tensor | None, sdpa_mask(**{**options, "allow_is_bidirectional_skip": not given})
    )


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, _mask)
