"""Models and tokenizers from references."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ds_distill.errors import UserError
from ds_distill.models.encoder import vocabulary_head
from ds_distill.models.packed import first_position

# Only these files are read: a model's folder can hold no code that runs.
_SAFE: dict[str, Any] = {"trust_remote_code": False}


def load_config(reference: str, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a resolved reference. Raises UserError when it cannot be had."""
    try:
        config = AutoConfig.from_pretrained(reference, revision=revision, **_SAFE)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {reference!r}: its configuration cannot be read: {_first_line(error)} "
            "Give a hub id that can be reached, a local folder, or pkg:PACKAGE/FOLDER."
        ) from error
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
        return AutoTokenizer.from_pretrained(reference, revision=revision, **_SAFE)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {reference!r}: its tokenizer cannot be read: {_first_line(error)}"
        ) from error


def load_classifier(
    reference: str,
    labels: list[str],
    *,
    revision: str | None = None,
    layers: list[int] | None = None,
    new_head: bool,
    seed: int = 0,
    attention: str | None = None,
) -> PreTrainedModel:
    """A sequence classifier in fp32.

    layers: the layers it keeps, counted from 0; None keeps all.
    new_head: the checkpoint's head, if any, may be of another size and is replaced then, by
        random weights that depend on `seed` alone. Otherwise the checkpoint must hold a head
        for `labels`.
    attention: transformers' implementation; None lets it choose.

    Raises UserError when the weights cannot be had or do not fit.
    """
    model, missing = _load(
        AutoModelForSequenceClassification,
        reference,
        revision,
        seed=seed,
        attention=attention,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    if not new_head and missing:
        raise UserError(
            f"model {reference!r}: the checkpoint has no weights for {_some(missing)} with "
            f"{len(labels)} labels, so it is no classifier trained on this task. Fine-tune it "
            "first (a fine-tune phase before the one that uses it), or give a fine-tuned "
            "checkpoint."
        )
    if layers is not None:
        keep_layers(model, layers)
    return model


def load_masked_lm(
    reference: str,
    *,
    revision: str | None = None,
    layers: list[int] | None = None,
    new_head: bool,
    seed: int = 0,
    attention: str | None = None,
) -> PreTrainedModel:
    """A masked-LM in fp32; arguments and errors as of `load_classifier`.

    new_head: the checkpoint may lack the head. Its transform is random then; its projection to
        the vocabulary is tied to the embeddings.
    """
    model, missing = _load(
        AutoModelForMaskedLM, reference, revision, seed=seed, attention=attention
    )
    if not new_head and missing:
        raise UserError(
            f"model {reference!r}: the checkpoint has no weights for {_some(missing)}, so it is no "
            "trained masked-LM. Train it first (a fine-tune phase before the one that uses it), "
            "or give a checkpoint with its masked-LM head."
        )
    if layers is not None:
        keep_layers(model, layers)
    return model


def _load(
    kind: Any,
    reference: str,
    revision: str | None,
    *,
    seed: int,
    attention: str | None,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """A model of an auto class, and the weights of its head that were left at random."""
    load_config(reference, revision)  # refuses what must not be loaded
    torch.manual_seed(seed)  # the head's random start is the same on every rank and run
    try:
        model, info = kind.from_pretrained(
            reference,
            revision=revision,
            dtype=torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are judged below, by name
            output_loading_info=True,
            **options,
            **_SAFE,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model {reference!r}: its weights cannot be loaded: {_first_line(error)} Give whole "
            "safetensors files, as save_pretrained writes them."
        ) from error
    # What was left at random: not there, or of another size (name, its shape, the model's).
    missing = [key for key in info["missing_keys"] if "position_ids" not in key]
    missing += [key for key, *_ in info["mismatched_keys"]]
    body = f"{model.base_model_prefix}."
    lost = [key for key in missing if key.startswith(body) and "pooler" not in key]
    if lost:
        raise UserError(
            f"model {reference!r}: the checkpoint does not fit its config.json: it has no weights "
            f"of the right name and size for {_some(lost)}. Put the files of one model there."
        )
    return model, missing


def keep_layers(model: PreTrainedModel, layers: list[int]) -> None:
    """Drop all layers of the encoder's stack except `layers`, in that order, in place.

    Raises UserError when a layer is not there.
    """
    total = model.config.num_hidden_layers
    if not layers or not set(layers) <= set(range(total)) or len(set(layers)) < len(layers):
        raise UserError(
            f"student.layers={layers}: {type(model).__name__} has layers 0 to {total - 1}. Name "
            "at least one of them, each once."
        )
    shared = hasattr(model.config, "num_hidden_groups")  # ALBERT
    if shared or len(set(getattr(model.config, "layer_types", None) or [])) > 1:
        raise UserError(
            f"student.layers: the layers of {type(model).__name__} "
            f"{'share weights' if shared else 'are of different kinds'}, so a choice of them would "
            "not load again as it was. Use all layers, or a checkpoint of fewer."
        )
    stacks = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == total
    ]
    if len(stacks) != 1:
        raise UserError(
            f"student.layers: {type(model).__name__} has {len(stacks)} stacks of {total} layers, "
            "so which to shorten is not clear. Use all layers, or a checkpoint of fewer."
        )
    [(parent, name)] = stacks
    stack = getattr(parent, name)
    setattr(parent, name, nn.ModuleList(stack[index] for index in layers))
    model.config.num_hidden_layers = len(layers)


def freeze_embeddings(model: PreTrainedModel) -> None:
    """Take the embedding block (words, positions, types, its norm) out of training."""
    block = getattr(model.base_model, "embeddings", None) or model.get_input_embeddings()
    block.requires_grad_(False)


def set_dropout(model: PreTrainedModel, dropout: float) -> None:
    """Set every dropout of a model; its configuration keeps what it says."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout


def check_labels(reference: str, config: PreTrainedConfig, labels: list[str]) -> None:
    """Refuse a fine-tuned classifier whose classes are not `labels` in this order.

    A checkpoint that never named its classes (LABEL_0, LABEL_1, ...) passes on their number.
    """
    given = [str(config.id2label[index]) for index in sorted(config.id2label)]
    if len(given) != len(labels):
        raise UserError(
            f"model {reference!r} tells {len(given)} classes apart ({', '.join(given)}), and the "
            f"task has {len(labels)} ({', '.join(labels)}). Fine-tune it on this task first, or "
            "give a teacher of this task."
        )
    unnamed = all(name == f"LABEL_{index}" for index, name in enumerate(given))
    if not unnamed and [g.lower() for g in given] != [label.lower() for label in labels]:
        raise UserError(
            f"model {reference!r} has its classes in the order {', '.join(given)}, and the task in "
            f"the order {', '.join(labels)}. Set task.labels to the model's order and names."
        )


def check_vocabulary(
    reference: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a tokenizer that gives ids beyond the model's embedding rows."""
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
    try:
        with torch.device("meta"):  # shapes alone: no memory, no time
            model = AutoModelForMaskedLM.from_config(config, **_SAFE)
            vocabulary_head(model, torch.empty(1, config.hidden_size))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"model {reference!r} ({config.model_type}) cannot be a masked-LM: "
            f"{_first_line(error)} Choose a model of one of those families."
        ) from error


def usable_length(config: PreTrainedConfig) -> int | None:
    """Longest input in tokens of a model, or None without a limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not limit or limit < 0 or getattr(config, "position_biased_input", True) is False:
        return None
    return int(limit) - first_position(config)


def _some(names: list[str]) -> str:
    """The first names of a list that may be long."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(sorted(names)[:4]) + more


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
