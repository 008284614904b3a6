"""Which models' attention is a softmax of scaled products of their queries and keys, and nothing
else, so that it can be computed again from these."""

from __future__ import annotations

from transformers import PreTrainedConfig

SEEN_FAMILIES = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert"),
    "mobilebert",
)
"""Model types whose attention maps, computed again, were found equal to transformers'."""

WIDEST_HEAD = 256
"""Of ds_kernels' attention_kl and relation_kl, which hold a row of a head on chip."""

_UNSEEN = {
    "deberta": "adds terms of relative positions to its scores",
    "deberta-v2": "adds terms of relative positions to its scores",
    "mpnet": "adds a bias of relative positions to its scores",
    "modernbert": "looks at a window of tokens in most layers",
    "longformer": "looks at a window of tokens",
}


def unseen_attention(config: PreTrainedConfig) -> str | None:
    """Why a model's attention cannot be computed again from its queries and keys; None where it
    can."""
    kind = config.model_type
    if kind not in SEEN_FAMILIES:
        why = _UNSEEN.get(kind, "is of a kind that was not compared with transformers' maps")
        return f"its attention ({kind}) {why}"
    heads, of_keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if of_keys not in (None, heads):
        return f"its {heads} heads share {of_keys} heads of keys and values"
    width = getattr(config, "true_hidden_size", config.hidden_size) // heads
    if width > WIDEST_HEAD:
        return f"its heads are {width} wide, and the kernel takes at most {WIDEST_HEAD}"
    return None
