"""Small encoders of the families that transformers has: one table of configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from ds_distill.views import PaddedView

VOCABULARY, POSITIONS, LAYERS, WIDTH = 60, 80, 3, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "embedding_size": WIDTH,
    "initializer_range": 0.3,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
RELATIVE = {  # heads of 16, the narrowest that flashdeberta takes
    **{"num_attention_heads": 2, "pooler_hidden_size": WIDTH},
    **{"relative_attention": True, "position_buckets": 8, "pos_att_type": "p2c|c2p"},
}
V3 = {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-v2": ("deberta-v2", RELATIVE),
    "deberta-v2 without buckets": (
        "deberta-v2",
        {**RELATIVE, "position_buckets": -1, "pos_att_type": "c2p"},
    ),
    "deberta-v2 with a convolution": (
        "deberta-v2",
        {**RELATIVE, "conv_kernel_size": 3, "conv_act": "gelu"},
    ),
    "deberta-v3": ("deberta-v2", {**RELATIVE, **V3, "type_vocab_size": 0}),
    "modernbert of means": ("modernbert", {"classifier_pooling": "mean"}),
    "eurobert of means": ("eurobert", {"classifier_pooling": "mean"}),
    "eurobert of fewer keys": (
        "eurobert",
        {"classifier_pooling": "bos", "num_key_value_heads": 1},
    ),
}
"""Configurations of other names than their family's."""

MORE: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "big_bird": {"attention_type": "original_full"},
    "distilbert": {"hidden_dim": 64},
    "electra": {"embedding_size": 16},
    "esm": {"position_embedding_type": "absolute", "pad_token_id": 1, "mask_token_id": 4},
    "eurobert": {"num_key_value_heads": 4, **TOKENS},
    "funnel": {"block_sizes": [1, 1], "d_head": 16, "architectures": ["FunnelModel"]},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 5, "shape_size": 6},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4},
    "longformer": {"attention_window": [4, 8, 16]},
    "mobilebert": {  # without norms, whose states would grow
        **{"true_hidden_size": 16, "intra_bottleneck_size": 16, "initializer_range": 0.02},
    },
    "xmod": {"default_language": "en_XX"},
    # Of three layers the last two see three tokens on each side.
    "modernbert": {
        **{"cls_token_id": 1, "sep_token_id": 2, **TOKENS},
        **{"local_attention": 6, "global_attn_every_n_layers": 3},
    },
    "reformer": {
        **{"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (5, 16), "attn_layers": ["local"]},
        **{"feed_forward_size": 64, "is_decoder": False, "attention_head_size": 16},
        **{"local_attn_chunk_length": 5, "num_attention_heads": 2},
    },
}
"""What a family has beside, or in place of, the sizes of all."""

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Of most families: a bundle trains its student."""

NOT_THEIRS = {"funnel": ("num_hidden_layers",), "reformer": ("num_hidden_layers",)}


def config_of(name: str, **more: Any) -> PreTrainedConfig:
    """name: a family, or a variant of one."""
    family, own = VARIANTS.get(name, (name, {}))
    sizes = {key: size for key, size in SIZES.items() if key not in NOT_THEIRS.get(family, ())}
    return AutoConfig.for_model(family, **{**sizes, **MORE.get(family, {}), **own, **more})


def built(
    name: str, kind: Any = AutoModel, attention: str | None = "eager", seed: int = 0, **more: Any
) -> Any:
    """A model that only evaluates. Biases start at zero and norms at one, which would hide
    mistakes: all weights are moved."""
    torch.manual_seed(seed)
    config = config_of(name, **more)
    model = kind.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def padded_view(
    lengths: Sequence[int], *, types: bool = False, seed: int = 1, rows: bool = False
) -> PaddedView:
    """rows: with positions of some tokens, the last one among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, VOCABULARY, shape, generator=generator) * mask + (1 - mask)
    kinds = torch.randint(0, 2, shape, generator=generator) * mask if types else None
    real = mask.flatten().nonzero().squeeze(1)
    chosen = torch.rand(len(real), generator=generator) < 0.4
    chosen[-1] = True
    return PaddedView(ids, mask, kinds, real[chosen] if rows else None)
