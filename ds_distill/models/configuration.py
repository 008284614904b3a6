"""What a model says of itself before its weights are loaded: configuration, tokenizer, headers.

Nothing here imports torch, so that `ds-distill check` answers at once.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from ds_distill.errors import UserError
from ds_distill.files import read_json

# Only these files are read: a model's folder can hold no code that runs.
SAFE: dict[str, Any] = {"trust_remote_code": False}

PACKED_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
"""Model types whose attention goes through transformers' interface with all it is given."""

MASKED_LM_FAMILIES = (
    *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta"),
    *("deberta-v2", "distilbert", "electra", "ernie", "esmc", "fnet", "gte", "ibert"),
    *("jina_embeddings_v3", "layoutlm", "longformer", "luke", "megatron-bert", "mpnet"),
    *("nomic_bert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert"),
    *("xlm-roberta", "xlm-roberta-xl", "yoso"),
)
"""Model types whose masked-LM head `encoder.vocabulary_head` knows."""

_POSITIONS_BEHIND_PADDING = ("roberta", "camembert", "longformer", "data2vec-text", "mpnet")
"""Model types, or parts of them, whose first position is the padding id + 1: RoBERTa's kin."""


def load_config(reference: str, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a resolved reference. Raises UserError when it cannot be had."""
    try:
        config = AutoConfig.from_pretrained(reference, revision=revision, **SAFE)
    except Exception as error:  # each kind of model checks its own fields, in its own way
        raise _unreadable(reference, "configuration", error) from error
    attention = str(getattr(config, "_attn_implementation", None))
    if "/" in attention:  # transformers would fetch and run a kernel of that name
        raise UserError(
            f"model {reference!r}: its config.json asks for attention code from elsewhere "
            f"({attention}), and no code of others is run. Take _attn_implementation out of it."
        )
    return config


def load_tokenizer(reference: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a resolved reference. Raises UserError when it cannot be had."""
    try:
        return AutoTokenizer.from_pretrained(reference, revision=revision, **SAFE)
    except Exception as error:  # tokenizers' errors have no type of their own
        raise _unreadable(reference, "tokenizer", error) from error


def _unreadable(reference: str, what: str, error: BaseException) -> UserError:
    if "trust_remote_code" in str(error):  # no option of a recipe, so it must not be advised
        return UserError(
            f"model {reference!r}: its {what} needs Python code from its own folder (`auto_map`), "
            "and no code of others is run. Give a model of a kind that transformers itself has."
        )
    if isinstance(error, RecursionError):
        return UserError(
            f"model {reference!r}: its {what} cannot be read: a JSON file of it has brackets too "
            "deep in each other. Copy the model again."
        )
    advice = "Give a hub id that can be reached, a local folder, or pkg:PACKAGE/FOLDER."
    return UserError(
        f"model {reference!r}: its {what} cannot be read: {first_line(error)}"
        + (f" {advice}" if what == "configuration" else "")
    )


def first_position(config: PreTrainedConfig) -> int:
    """The position of an example's first token."""
    behind_padding = any(kind in config.model_type for kind in _POSITIONS_BEHIND_PADDING)
    return int(config.pad_token_id) + 1 if behind_padding else 0


def usable_length(config: PreTrainedConfig) -> int | None:
    """Longest input in tokens of a model, or None without a limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not limit or limit < 0 or getattr(config, "position_biased_input", True) is False:
        return None
    return int(limit) - first_position(config)


def takes_packed(config: PreTrainedConfig) -> bool:
    """Whether a model can be asked without padding; DeBERTa on a GPU needs flashdeberta, too."""
    if config.model_type == "deberta-v2":  # a convolution would look across examples' ends
        return bool(config.relative_attention) and getattr(config, "conv_kernel_size", 0) == 0
    return config.model_type in PACKED_FAMILIES


def same_tokens(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same ids for every text. Their models may differ in the
    other inputs that they take, as BERT and DistilBERT do."""
    return all(
        rule(first) == rule(second)
        for rule in (tokenizer_rules, lambda t: t.special_tokens_map, lambda t: t.truncation_side)
    )


def tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """All that decides how a tokenizer splits and numbers text, as JSON has it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    for setting in ("truncation", "padding"):  # left over from the last call
        rules.pop(setting, None)
    return dict(rules)


def check_encoder(reference: str, config: PreTrainedConfig) -> None:
    """Refuse models that are no encoders: decoders read from left to right, and their first
    token, which stands for the example here, has seen nothing."""
    kind = config.model_type
    has_head = kind in {
        *MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        *MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    if not has_head or not hasattr(config, "vocab_size") or not hasattr(config, "hidden_size"):
        raise UserError(
            f"model {reference!r} ({kind}) is no encoder of text that transformers can put a head "
            "on. Give one of BERT's, RoBERTa's or DeBERTa's kin."
        )
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if getattr(config, "is_encoder_decoder", False):
        what = "an encoder with a decoder"
    elif getattr(config, "is_decoder", False) or (
        decoder and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    ):
        what = "a decoder"
    else:
        return
    raise UserError(
        f"model {reference!r} ({kind}) is {what}. Teachers and students are encoders: give one of "
        "BERT's, RoBERTa's or DeBERTa's kin."
    )


def check_vocabulary(
    reference: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a tokenizer without words, or one that gives ids beyond the embedding rows."""
    # transformers makes an empty tokenizer, without a word, where the vocabulary is missing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"model {reference!r}: its tokenizer has no words, only {len(tokenizer)} special "
            "tokens: the vocabulary (tokenizer.json, vocab.txt or the like) is missing. Put it in "
            "the model's folder."
        )
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"model {reference!r}: its tokenizer has {len(tokenizer)} tokens and its embeddings "
            f"{config.vocab_size} rows, so some ids have no row. The tokenizer files belong to "
            "another model: put the right ones in its folder."
        )


def check_masked_lm(
    reference: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a model that cannot be a masked-LM here: by its tokenizer or its architecture."""
    if tokenizer.mask_token_id is None:
        raise UserError(
            f"model {reference!r}: its tokenizer has no mask token, which task.type=masked-lm "
            "needs. Give a model that was pre-trained as a masked-LM."
        )
    if config.model_type not in MASKED_LM_FAMILIES:
        raise UserError(
            f"model {reference!r} ({config.model_type}) cannot be a masked-LM: its head is not "
            f"known here. Choose a model of one of these families: {', '.join(MASKED_LM_FAMILIES)}."
        )


def check_head(reference: str, config: PreTrainedConfig, *, masked_lm: bool) -> None:
    """Refuse a checkpoint that says it has no trained head of the task on top."""
    kinds = getattr(config, "architectures", None) or []
    endings = ("ForMaskedLM", "BertForPreTraining") if masked_lm else "ForSequenceClassification"
    if kinds and not any(kind.endswith(endings) for kind in kinds):
        noun = "masked-LM" if masked_lm else "classifier"
        raise UserError(
            f"model {reference!r} holds {', '.join(kinds)}, which is no trained {noun}. "
            "Fine-tune it first (a fine-tune phase before), or give a fine-tuned checkpoint."
        )


def check_weights(folder: Path, config: PreTrainedConfig) -> None:
    """Refuse a folder without safetensors, with damaged or missing ones, or with a config.json
    that cannot be theirs. Reads headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"model '{folder}': the folder has no safetensors weights. Convert it: load it with "
            "transformers and call save_pretrained."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            listed = set(read_json(index)["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(
                f"{index}: not readable: {first_line(error)}. Copy the model again."
            ) from error
        for name in sorted(listed - {file.name for file in files}):
            raise UserError(f"{index} lists {name}, which is not there. Copy the model again.")
    held = 0
    for file in files:
        try:
            with safe_open(file, "np") as weights:
                held += sum(prod(weights.get_slice(n).get_shape()) for n in weights.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: not readable as safetensors: {error}. Copy the model again."
            ) from error
    _check_size(folder, config, held)


def _check_size(folder: Path, config: PreTrainedConfig, held: int) -> None:
    """Refuse sizes far beyond the `held` weights: memory would be asked for before they are
    compared one by one."""
    width = getattr(config, "embedding_size", None) or config.hidden_size
    sizes = {
        "vocab_size": config.vocab_size * width,
        "max_position_embeddings": (usable_length(config) or 0) * width,
        "intermediate_size": getattr(config, "intermediate_size", 0) * config.hidden_size,
        "hidden_size": config.hidden_size**2,
        "num_hidden_layers": config.num_hidden_layers,
    }
    for key, needed in sizes.items():
        if needed > 64 * held:
            raise UserError(
                f"model '{folder}': its config.json says {key}={getattr(config, key)}, which needs "
                f"far more weights than the {held:,} in its safetensors files. Put the files of "
                "one model there."
            )


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
