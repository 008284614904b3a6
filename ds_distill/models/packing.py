"""Which models take packed views: those that say of packed texts what they say of each alone.

Asked, not listed: a small copy of random weights runs both ways, once for each configuration.
"""

from __future__ import annotations

import copy
import math
from importlib.metadata import version

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from ds_distill.models.configuration import MASKED_LM_FAMILIES, is_packed_deberta, usable_length
from ds_distill.models.encoder import read_signals
from ds_distill.models.layers import cut_to_layers
from ds_distill.models.load import CLASSIFIER, MASKED_LM, TAGGER, seeded
from ds_distill.models.packed import ATTENTION, has_flashdeberta
from ds_distill.reads import Reads
from ds_distill.views import PackedView, PaddedView, View

_VOCABULARY, _LAYERS, _HEADS = 32, 4, 2
"""Of the small copy. A ModernBERT of four layers has both kinds: the whole text, and a window."""

_SAME = 1e-4
"""Of the largest number: float32 sums that are rounded in another order differ by less, an
example that reads another by far more."""

_HEADED = {
    CLASSIFIER: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    TAGGER: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MASKED_LM: MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
"""By head, the classes of the model types that have it."""

_found: dict[str, bool] = {}


def takes_packed(config: PreTrainedConfig) -> bool:
    """Whether a model can run without padding; DeBERTa on a GPU also needs flashdeberta."""
    if config.model_type == "deberta-v2":
        return is_packed_deberta(config)
    small = _small(config)
    key = small.to_json_string(use_diff=False)
    if key not in _found:
        _found[key] = _same_packed(small)
    return _found[key]


def packed_attention(config: PreTrainedConfig) -> str | None:
    """The `attn_implementation` to load a model with, so that it takes packed views; None where it
    needs no special one, or takes none."""
    return ATTENTION if config.model_type != "deberta-v2" and takes_packed(config) else None


def packed_backend(config: PreTrainedConfig, device: torch.device, *, half: bool) -> str | None:
    """The attention backend of a model on packed views, with its version: part of a cache's
    fingerprint. None: the model needs padded views.

    half: whether the model computes in bf16 or fp16, which kernels on a GPU take alone.
    """
    if not takes_packed(config):
        return None
    if device.type != "cuda" or not half:
        return "example by example"
    if config.model_type == "deberta-v2":
        return f"flashdeberta {version('flashdeberta')}" if has_flashdeberta(config) else None
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # FlashAttention refuses others (torch's flash_api.cpp, mha_varlen_fwd).
    takes = torch.cuda.get_device_capability(device) >= (8, 0) and width % 8 == 0 and width <= 256
    return f"varlen_attn of torch {version('torch')}" if takes else None


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with few layers, heads of the same width, and few tokens."""
    small = copy.deepcopy(config)
    kept = min(_LAYERS, config.num_hidden_layers)
    cut_to_layers(small, [*range(kept)])
    heads = config.num_attention_heads
    grouped = getattr(config, "num_key_value_heads", None) not in (None, heads)
    if hasattr(config, "num_key_value_heads"):
        small.num_key_value_heads = 1 if grouped else _HEADS
    small.num_attention_heads = _HEADS
    small.hidden_size = _HEADS * (config.hidden_size // heads)
    small.vocab_size, small.num_labels = _VOCABULARY, 3
    if hasattr(config, "intermediate_size"):
        small.intermediate_size = 64
    for number, name in enumerate(("pad", "bos", "cls", "eos", "sep", "mask")):
        given = getattr(small, f"{name}_token_id", None)
        if isinstance(given, int) and given >= _VOCABULARY:
            setattr(small, f"{name}_token_id", number)
    return small


def _same_packed(config: PreTrainedConfig) -> bool:
    """Whether each head of a small model says the same of texts packed and of each alone."""
    try:
        kind = config.model_type
        heads = [head for head, names in _HEADED.items() if kind in names]
        if kind not in MASKED_LM_FAMILIES:
            heads = [head for head in heads if head != MASKED_LM]
        return all(_differs_by(head, config) <= _SAME for head in heads)
    except Exception:  # whatever code of transformers has none of the arguments, or no such head
        return False


@torch.no_grad()
def _differs_by(head: str, config: PreTrainedConfig) -> float:
    """The largest difference of a head's logits and of the last states, of their largest."""
    window = getattr(config, "sliding_window", None) or 4
    long = min(usable_length(config) or math.inf, 2 * window + 8)
    lengths = [5, int(long), 9]
    with seeded(0):
        kind = getattr(transformers, _HEADED[head][config.model_type])
        # Not from_config, which under ZeRO stage 3 would leave a rank a part of each weight.
        model: PreTrainedModel = kind(copy.deepcopy(config)).float().eval()
        model.set_attn_implementation(ATTENTION)
        for weight in model.parameters():
            if weight.ndim > 1:  # large enough that attention is not even
                weight.normal_(std=1.5 / math.sqrt(weight.shape[-1]))
        texts = [torch.randint(6, _VOCABULARY, (length,)) for length in lengths]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed = PackedView(
        torch.cat(texts),
        torch.cat([torch.arange(length) for length in lengths]),
        ends.to(torch.int32),
        max(lengths),
        positions=None if head == CLASSIFIER else torch.arange(int(ends[-1])),
    )
    ours = _outputs(model, packed)
    model.set_attn_implementation("eager")  # transformers' own
    alone = []
    for text in texts:
        positions = None if head == CLASSIFIER else torch.arange(len(text))
        view = PaddedView(text[None], torch.ones_like(text)[None], positions=positions)
        alone.append(_outputs(model, view))
    whole = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    return max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(ours, whole, strict=True)
    )


def _outputs(model: PreTrainedModel, view: View) -> tuple[torch.Tensor, torch.Tensor]:
    found = read_signals(model, view, Reads((-1,)))
    return found.logits, found.hidden[-1]
