"""Check models before their weights are loaded, by their configuration; among it which models'
attention is a softmax of scaled products of their queries and keys, and nothing else.

Nothing here imports torch, so that `ds-distill check` is fast.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from ds_distill.data.tokenizer import SAFE, check_nodes, unreadable
from ds_distill.errors import UserError
from ds_distill.recipe.tasks import TaskSettings

MASKED_LM_FAMILIES = (
    *("albert", "bert", "big_bird", "camembert", "data2vec-text", "deberta", "deberta-v2"),
    *("distilbert", "electra", "ernie", "esmc", "eurobert", "gte", "ibert", "jina_embeddings_v3"),
    *("layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet"),
    *("nomic_bert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "xlm-roberta"),
    "xlm-roberta-xl",
)
"""Model types with a masked-LM head that `encoder.vocabulary_head` supports."""

CLASSIFIER_HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "albert": ("albert.pooler", "classifier"),
    "distilbert": ("pre_classifier", "classifier"),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "electra"),
        ("classifier.dense", "classifier.out_proj"),
    ),
    **dict.fromkeys(("deberta", "deberta-v2"), ("pooler.dense", "classifier")),
}
"""Where sequence classifiers have the linear layer that pools the first token's state, [H, H], and
the one that predicts, [C, H], by model type. Between the two each family has its own activation:
BERT, ALBERT and RoBERTa tanh, ELECTRA gelu, DeBERTa what its configuration says (gelu), DistilBERT
relu."""

_OTHER_ANSWER_HEADS = ("big_bird", "flaubert", "longformer", "xlm", "xlnet")
"""Model types whose answers come by a beam search, or from more than the last states."""

POSITIONS_BEHIND_PADDING = (
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke"),
    *("markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
    "xmod",
)
"""Model types whose first position is the padding id + 1, like RoBERTa."""

MIXES_PADDING = ("convbert", "fnet", "funnel", "nystromformer", "reformer", "yoso")
"""Model types that do not keep padding out of a text: they mix, convolve, average or hash over the
whole length, whatever the attention mask says."""


_MOST = {
    "num_labels": 1_000_000,
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), 1_000),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 1_000),
}
"""Bounds of what transformers makes lists of, or objects, when it only reads a configuration."""

_REFUSED = {
    "transformers_weights": "and weights are read from model.safetensors alone. Remove the key.",
    "quantization_config": "and quantised weights are not read. Use the model as it was before.",
    "chunk_size_feed_forward": "and inputs are not cut into such chunks. Set it to 0.",
}


def load_config(reference: str, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a resolved reference. Raises UserError when it cannot be read, or says
    what no encoder can be."""
    check_nodes(reference)
    try:
        given, _ = PreTrainedConfig.get_config_dict(reference, revision=revision)
    except Exception as error:  # as below
        raise unreadable(reference, "configuration", error) from error
    check_fields(reference, given)
    try:
        config = AutoConfig.from_pretrained(reference, revision=revision, **SAFE)
    except Exception as error:  # each model type validates its fields with its own errors
        raise unreadable(reference, "configuration", error) from error
    return config


def check_fields(reference: str, given: dict[str, Any]) -> None:
    """Raises UserError for the content of a config.json that no encoder of transformers can be made
    from, or that would take all memory or time before anything is compared with the weights."""

    def refuse(key: str, rule: str) -> None:
        raise UserError(
            f"model {reference!r}: its config.json has {key}={str(given.get(key))[:80]}, {rule}"
        )

    for key in ("attn_implementation", "_attn_implementation"):  # it may name a kernel of the hub
        if given.get(key) not in (None, "eager", "sdpa"):
            refuse(key, "external attention code, which is never run. Remove the key.")
    kinds = given.get("architectures") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        refuse("architectures", "which is no list of names.")
    for key, why in _REFUSED.items():
        if given.get(key):
            refuse(key, why)
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(key, "which is no number.")
        if "dropout" in key and isinstance(value, int | float) and not 0 <= value <= 1:
            refuse(key, "and a rate of dropout is from 0 to 1.")
    for key, most in _MOST.items():
        value = given.get(key)
        if isinstance(value, int | float) and not 0 < value <= most:
            refuse(key, f"and from 1 to {most:,} are possible.")
    vocabulary, padding = given.get("vocab_size"), given.get("pad_token_id")
    if isinstance(padding, int) and isinstance(vocabulary, int) and not -1 <= padding < vocabulary:
        refuse("pad_token_id", f"which is none of its {vocabulary:,} tokens.")


def first_position(config: PreTrainedConfig) -> int:
    """The position of an example's first token."""
    behind_padding = config.model_type in POSITIONS_BEHIND_PADDING
    return int(config.pad_token_id or 0) + 1 if behind_padding else 0


def usable_length(config: PreTrainedConfig) -> int | None:
    """The longest input of a model in tokens, or None without a limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not limit or limit < 0 or getattr(config, "position_biased_input", True) is False:
        return None
    return int(limit) - first_position(config)


def longest_input(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that a model and its tokenizer both take; of a run's student those of its training."""
    limit = tokenizer.model_max_length
    return min(usable_length(config) or limit, limit)


def pools_all_tokens(config: PreTrainedConfig) -> bool:
    """Whether a sequence classifier's head reads the mean of all tokens' states, not the first
    token's: ModernBERT's with `mean`, EuroBERT's with `mean` or `late`, which has the mean of
    logits."""
    return getattr(config, "classifier_pooling", None) in ("mean", "late")


def output_function(config: PreTrainedConfig) -> tuple[str, str | None]:
    """The key and the name of the function that sentence-transformers puts behind the output of a
    cross-encoder, which transformers does not; None without one, and for one that changes
    nothing."""
    own, old = "sentence_transformers", "sbert_ce_default_activation_function"
    name = (getattr(config, own, None) or {}).get("activation_fn")
    key = f"{own}.activation_fn" if name else old
    name = name or getattr(config, old, None)
    return key, None if name is None or name.endswith("Identity") else name


def is_packed_deberta(config: PreTrainedConfig) -> bool:
    """Whether `packed_deberta` runs a model: a convolution would mix neighbouring examples."""
    is_deberta = config.model_type == "deberta-v2" and bool(config.relative_attention)
    return is_deberta and getattr(config, "conv_kernel_size", 0) == 0


def check_encoder(reference: str, config: PreTrainedConfig) -> None:
    """Raises UserError for models that are no encoders, and for those that say other things of a
    text in another batch. The first token of a decoder, which would represent the example here,
    attends to no other token."""
    kind = config.model_type
    has_head = kind in {
        *MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        *MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    if not has_head or not hasattr(config, "vocab_size") or not hasattr(config, "hidden_size"):
        raise UserError(
            f"model {reference!r} ({kind}) is not a text encoder with a head in transformers. "
            "Use a model like BERT, RoBERTa or DeBERTa."
        )
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if getattr(config, "is_encoder_decoder", False):
        what = "an encoder with a decoder"
    elif getattr(config, "is_decoder", False) or (
        decoder and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    ):
        what = "a decoder"
    else:
        _check_alone(reference, config)
        return
    raise UserError(
        f"model {reference!r} ({kind}) is {what}. Teachers and students are encoders: use a model "
        "like BERT, RoBERTa or DeBERTa."
    )


def _check_alone(reference: str, config: PreTrainedConfig) -> None:
    """Raises UserError for models whose word on a text depends on what else is in its batch, so
    that a live teacher, a cached one and the shipped student silently differ."""
    if config.model_type in MIXES_PADDING:
        raise UserError(
            f"model {reference!r} ({config.model_type}) reads the padding that a batch puts behind "
            "a text, so it says other things of it live, from a cache and alone. Use a model like "
            "BERT, RoBERTa or DeBERTa."
        )
    if config.model_type == "big_bird" and config.attention_type == "block_sparse":
        raise UserError(
            f"model {reference!r} ({config.model_type}) changes its sparse attention into a full "
            "one at the first short batch, and keeps it: what it says of a text depends on those "
            "before. Set attention_type to original_full in its config.json."
        )


def check_masked_lm(
    reference: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises UserError for a model whose tokenizer or architecture does not support masked-LM."""
    if tokenizer.mask_token_id is None:
        raise UserError(
            f"model {reference!r}: its tokenizer has no mask token, which task.type=masked-lm "
            "needs. Use a model that was pre-trained as a masked-LM."
        )
    if config.model_type not in MASKED_LM_FAMILIES:
        raise UserError(
            f"model {reference!r} ({config.model_type}) cannot be a masked-LM: its head is not "
            f"supported. Use a model of one of these types: {', '.join(MASKED_LM_FAMILIES)}."
        )


def check_token_classifier(
    reference: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises UserError for a model that transformers has no token classification head for, or whose
    tokenizer does not say which word a token is of."""
    if config.model_type not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        raise UserError(
            f"model {reference!r} ({config.model_type}) cannot be a token classifier: transformers "
            "has no such head for it. Use a model like BERT, RoBERTa or DeBERTa."
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"model {reference!r}: its tokenizer ({type(tokenizer).__name__}) does not say which "
            "word a token is of, which a task of words needs. Use one of the "
            "library `tokenizers` (a tokenizer.json)."
        )


def check_question_answerer(
    reference: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises UserError for a model that transformers has no plain head for extractive questions
    for, or whose tokenizer does not say which characters a token is of."""
    kind = config.model_type
    if kind not in MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES or kind in _OTHER_ANSWER_HEADS:
        raise UserError(
            f"model {reference!r} ({kind}) cannot find answers: transformers has no head for it "
            "that gives each token a start and an end. Use a model like BERT, RoBERTa or DeBERTa."
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"model {reference!r}: its tokenizer ({type(tokenizer).__name__}) does not say which "
            "characters a token is of, which task.type=extractive-qa needs. Use one of the "
            "library `tokenizers` (a tokenizer.json)."
        )


_OUTPUTS = {
    "single_label_classification": "one softmax over all labels",
    "multi_label_classification": "a sigmoid for each label",
    "regression": "numbers",
}
"""What the outputs of a sequence classifier are, by transformers' `problem_type`."""


def check_head(
    reference: str, config: PreTrainedConfig, task: TaskSettings | type[TaskSettings]
) -> None:
    """Raises UserError for a checkpoint whose configuration lists no trained head for the task, one
    with another number of outputs than all heads for such tasks have, or one whose outputs mean
    something else."""
    kinds = getattr(config, "architectures", None) or []
    if kinds and not any(kind.endswith(task.heads) for kind in kinds):
        raise UserError(
            f"model {reference!r} holds {', '.join(kinds)}, which is no trained {task.noun}. "
            "Fine-tune it first (a fine-tune phase before), or use a fine-tuned checkpoint."
        )
    if task.outputs is not None and config.num_labels != task.outputs:
        raise UserError(
            f"model {reference!r} has {config.num_labels} outputs, and a {task.noun} has "
            f"{task.outputs}. Fine-tune it first (a fine-tune phase before), or use a checkpoint "
            "that was fine-tuned on such a task."
        )
    stated = getattr(config, "problem_type", None)
    if stated is not None and stated in task.other_problems and task.problem is not None:
        raise UserError(
            f"model {reference!r}: its config.json has problem_type={stated}, so its outputs are "
            f"{_OUTPUTS[stated]}, and those of a {task.part_name} task are "
            f"{_OUTPUTS[task.problem]}. Fine-tune it first (a fine-tune phase before), or use a "
            "checkpoint of such a training. If it was trained as that, set "
            f"problem_type={task.problem} in its config.json."
        )


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
