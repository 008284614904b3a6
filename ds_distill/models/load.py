"""Load, shorten and save models."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds_distill.data.tokenizer import SAFE
from ds_distill.errors import UserError, first_line
from ds_distill.models.configuration import load_config
from ds_distill.models.layers import check_layers, cut_to_layers
from ds_distill.models.weights import check_weights
from ds_distill.process.activity import mark
from ds_distill.process.peak_memory import is_out_of_memory

CLASSIFIER, TAGGER = "ForSequenceClassification", "ForTokenClassification"
ANSWERER, MASKED_LM = "ForQuestionAnswering", "ForMaskedLM"
"""Heads, by the endings of the names of transformers' classes."""

_LACKS = {
    ANSWERER: "so it was not trained on extractive questions. Fine-tune",
    MASKED_LM: "so it is no trained masked-LM. Train",
}


def load_model(
    head: str,
    reference: str,
    labels: list[str] | None = None,
    *,
    new_head: bool,
    revision: str | None = None,
    layers: list[int] | None = None,
    config: PreTrainedConfig | None = None,
    truncated: bool = False,
    seed: int = 0,
    attention: str | None = None,
    problem_type: str | None = None,
    output_bias: Callable[[], torch.Tensor] | None = None,
) -> PreTrainedModel:
    """A model with a head, in fp32.

    head: the ending of the names of transformers' classes that have it.
    labels: of a classifier's outputs.
    new_head: the checkpoint may lack a head, or have one of another size; then the head gets
        random weights that depend only on `seed` (of a masked-LM its transform: the projection to
        the vocabulary is tied to the embeddings). Otherwise the checkpoint must have it.
    layers: the encoder layers to keep, counted from 0; None keeps all.
    config: where given, a model of this configuration whose weights are all random, and follow from
        `seed`; no weights are read. truncated: they are the first rows and columns of the
        checkpoint's.
    attention: transformers' `attn_implementation`; None lets transformers choose.
    problem_type: transformers' name of a classifier's loss, for its configuration.
    output_bias: makes the bias of a new classifier's logits, float32 [labels]; None leaves it at
        zero.

    Raises UserError when the weights cannot be loaded or do not fit.
    """
    options: dict[str, Any] = {}
    if labels is not None:
        options["num_labels"] = len(labels)
        options["id2label"] = dict(enumerate(labels))
        options["label2id"] = {label: index for index, label in enumerate(labels)}
    if problem_type is not None:
        options["problem_type"] = problem_type
    kind = getattr(transformers, f"AutoModel{head}")
    whole = None if truncated else config
    model, missing = _load(
        kind, reference, revision, config=whole, seed=seed, attention=attention, **options
    )
    if missing and not new_head:
        raise _no_head(head, reference, missing, labels)
    if missing and output_bias is not None:
        _set_output_bias(model, missing, output_bias())
    if layers is not None:
        keep_layers(model, layers)
    if truncated:
        assert config is not None, "sizes of its own"
        small, _ = _random(kind, config, seed, attention, options)
        return truncate(model, small)
    return model


def _set_output_bias(model: PreTrainedModel, missing: list[str], bias: torch.Tensor) -> None:
    # Where states are as wide as there are labels, a layer before it has one of that size, too.
    own = [
        weight
        for name, weight in model.named_parameters()
        if name in missing and name.endswith("bias") and weight.shape == bias.shape
    ]
    if own:  # else the checkpoint has the last layer, of another head with as many outputs
        own[-1].data.copy_(bias)


def truncate(model: PreTrainedModel, small: PreTrainedModel) -> PreTrainedModel:
    """The smaller model with, of each weight of the other, the first rows and columns."""
    with torch.no_grad():
        for name, weight in small.named_parameters():
            whole = model.get_parameter(name)
            weight.copy_(whole[tuple(slice(size) for size in weight.shape)])
    return small


def _no_head(head: str, reference: str, missing: list[str], labels: list[str] | None) -> UserError:
    of = "" if labels is None else f" with {len(labels)} labels"
    lacks = _LACKS.get(head, "so it was not trained on this task. Fine-tune")
    other = "checkpoint with a masked-LM head" if head == MASKED_LM else "fine-tuned checkpoint"
    return UserError(
        f"model {reference!r}: the checkpoint has no weights for {_some(missing)}{of}, {lacks} "
        f"it first (a fine-tune phase before the one that uses it), or use a {other}."
    )


def _load(
    kind: Any,
    reference: str,
    revision: str | None,
    *,
    config: PreTrainedConfig | None,
    seed: int,
    attention: str | None,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """A model of an auto class, and the weights of its head that were left at random."""
    mark(f"loads {reference}", everywhere=True)
    if config is not None:
        return _random(kind, config, seed, attention, options)
    check_weights(reference, load_config(reference, revision), revision)
    try:
        with seeded(seed):  # the head's random start is the same on every rank and run
            model, info = kind.from_pretrained(
                reference,
                revision=revision,
                dtype=torch.float32,
                attn_implementation=attention,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are judged below, by name
                output_loading_info=True,
                **options,
                **SAFE,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"model {reference!r}: its weights cannot be loaded: {first_line(error)} Use complete "
            "safetensors files, as save_pretrained writes them."
        ) from error
    except Exception as error:  # each model type has its own errors for fields of its own
        raise UserError(
            f"model {reference!r}: transformers cannot build it from its config.json: "
            f"{type(error).__name__}: {first_line(error)} Use the files of one model, as "
            "save_pretrained writes them."
        ) from error
    missing = _random_weights(reference, model, info)
    _keep_signatures(model)
    if model.config.model_type == "mobilebert":
        hide_padding(model)
    return model, missing


def _random_weights(reference: str, model: PreTrainedModel, info: dict[str, Any]) -> list[str]:
    """The weights of a head that were left at random: missing in the file, or of another size.
    Raises UserError where they are of the encoder, or the file has more of that.

    info: of transformers' `output_loading_info`; of another size are (name, its shape, the
        model's).
    """
    missing = [key for key in info["missing_keys"] if "position_ids" not in key]
    missing += [key for key, *_ in info["mismatched_keys"]]
    body = f"{model.base_model_prefix}."
    lost = [key for key in missing if key.startswith(body) and "pooler" not in key]
    if lost:
        raise UserError(
            f"model {reference!r}: the checkpoint does not fit its config.json: it has no weights "
            f"of the right name and size for {_some(lost)}. Use the files of one model."
        )
    beyond = [key for key in info["unexpected_keys"] if _is_of_body(key, body)]
    if beyond:
        raise UserError(
            f"model {reference!r}: the checkpoint does not fit its config.json: it has "
            f"{len(beyond)} weights of the encoder that a {model.config.model_type} of that "
            f"config.json has not, {_some(beyond)}, and would say other things without them. Use "
            "the files of one model, as save_pretrained writes them."
        )
    return missing


def _keep_signatures(model: PreTrainedModel) -> None:
    """Have Python read the signature of a layer's second half once: transformers asks for it in
    each layer of each pass, which takes 10 microseconds."""
    for kind in {type(module) for module in model.modules()}:
        for name in ("feed_forward_chunk", "ff_chunk"):
            if method := vars(kind).get(name):
                method.__signature__ = inspect.signature(method)


_COMPUTED = ("position_ids", "token_type_ids", "inv_freq", "pooler")
"""In the names of weights that a body may lack: buffers that it computes, and the first layer of
heads for other tasks."""


def _is_of_body(name: str, body: str) -> bool:
    """Whether a weight is of the encoder, and no buffer of it. body: what such names begin with;
    a checkpoint without a head may leave it out."""
    inside = name.startswith((body, "encoder.", "embeddings.", "transformer.", "layers."))
    return inside and not any(part in name for part in _COMPUTED)


def _random(
    kind: Any,
    config: PreTrainedConfig,
    seed: int,
    attention: str | None,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, list[str]]:
    """A model of random weights; as `_load`."""
    config = copy.deepcopy(config)
    for key, value in options.items():
        setattr(config, key, value)
    with seeded(seed):
        model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention)
    body = f"{model.base_model_prefix}."
    return model, [name for name, _ in model.named_parameters() if not name.startswith(body)]


def hide_padding(model: PreTrainedModel) -> None:
    """Have a MobileBERT say of a text in a batch what it says of it alone, in place. Its embeddings
    read both neighbours of each token: behind the last one zeros, or, in a batch, the embedding of
    padding, which is not zero where the head is tied to it."""

    def without_padding(
        module: nn.Module, given: tuple[torch.Tensor, ...], found: torch.Tensor
    ) -> torch.Tensor:
        return found.masked_fill((given[0] == model.config.pad_token_id)[..., None], 0.0)

    model.get_input_embeddings().register_forward_hook(without_padding)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within, torch's random numbers follow from `seed`; afterwards its state is as before."""
    on_gpu = torch.cuda.is_initialized()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:  # else torch would keep the seed for when a GPU is first used
            torch.cuda.manual_seed_all(seed)
        yield


def finite(model: PreTrainedModel, outputs: torch.Tensor) -> torch.Tensor:
    """What a model computes, as it is. Raises UserError where a number of it is not finite."""
    if not outputs.isfinite().all():
        raise UserError(
            f"model {model.name_or_path!r}: what it computes of a text is not finite, as of "
            "weights that are not. Copy the model again, or train it anew."
        )
    return outputs


def save_model(model: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Save a trained model for `from_pretrained`, in the dtype in which it was evaluated.

    weights: its state dict, float32 on the CPU: the optimizer's own copy, not rounded to bf16.
        config.json gets their dtype, because transformers loads a model in the dtype of its
        config.
    """
    model.save_pretrained(folder, state_dict=weights)
    config = copy.deepcopy(model.config)  # its dtype is now that of the engine
    config.dtype = torch.float32
    config.save_pretrained(folder)


def keep_layers(model: PreTrainedModel, layers: list[int]) -> None:
    """Remove all encoder layers except `layers`, in that order, in place.

    Raises UserError when a layer does not exist, or layers cannot be removed.
    """
    check_layers(model.config, layers)
    stacks = _stacks(model)
    if len(stacks) != 1:
        raise UserError(
            f"student.layers: {type(model).__name__} has {len(stacks)} stacks of "
            f"{model.config.num_hidden_layers} layers, so it is not clear which to shorten. Use "
            "all layers, or a checkpoint with fewer."
        )
    [(parent, name)] = stacks
    stack = getattr(parent, name)
    setattr(parent, name, nn.ModuleList(stack[index] for index in layers))
    cut_to_layers(model.config, layers)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """A model's layers; none of one that has no stack of them, or several."""
    stacks = _stacks(model)
    return [*getattr(*stacks[0])] if len(stacks) == 1 else []


def _stacks(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """The lists of as many modules as a model has layers, none inside another: what has each, and
    its name there."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
    ]
    inside = {module for *_, stack in found for layer in stack for module in layer.modules()}
    return [(parent, name) for parent, name, _ in found if parent not in inside]


def freeze_embeddings(model: PreTrainedModel) -> None:
    """Freeze the embedding block (tokens, positions, types, its norm)."""
    block = getattr(model.base_model, "embeddings", None) or model.get_input_embeddings()
    block.requires_grad_(False)


def checkpoint_activations(model: PreTrainedModel, *, random_state: bool = True) -> None:
    """Have each layer's activations computed again in the backward pass, not stored.

    random_state: dropout is then as it was in the forward pass.
    Raises ValueError for a model that transformers cannot do this with.
    """
    options = {"use_reentrant": False, "preserve_rng_state": random_state}
    # Renamed in transformers 5.23; the old name warns.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(options)


def set_dropout(model: PreTrainedModel, dropout: float) -> None:
    """Set the rate of every dropout: of modules, of rates that modules hold as numbers (attention's
    of ModernBERT), and of those that a model with a rate of 0 left out. The configuration stays
    unchanged."""
    for module in list(model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = dropout
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, dropout)
        for name, child in module.named_children():
            if "drop" in name and isinstance(child, nn.Identity):
                setattr(module, name, nn.Dropout(dropout))


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(sorted(names)[:4]) + more
