"""Check a model's weights before they are loaded: names of files, headers of safetensors, sizes.

Nothing here imports torch, so that `ds-distill check` is fast.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ds_distill.data.tokenizer import check_nodes
from ds_distill.errors import UserError, first_line
from ds_distill.files import read_json
from ds_distill.models.configuration import usable_length
from ds_distill.recipe.references import saved_otherwise

ALLOWANCE = 1 << 24
"""Weights of one kind, 64 MiB in fp32, that a configuration may have beyond those in the files: a
table of positions that are computed, a head for another task."""

_ADAPTER = "adapter_config.json"

_WRAPPERS = {
    "module": "DataParallel or DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_forward_module": "Lightning",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "torch's activation checkpointing",
}
"""What puts a part of its own into the names of a model's weights."""

_LORA = re.compile(r"(^base_model\.model\.|(^|\.)(lora_|base_layer\.|modules_to_save\.))")

_LAYER = re.compile(
    r"((?:\w+\.)*?)(?:(encoder|transformer)\.)?(layers?|albert_layer_groups)\.(\d+)\."
)
"""A weight of a layer: what its name begins with, where the stack of layers is, its name, and the
layer's number."""

_BODIES = ("bert", "roberta", "deberta", "transformer", "new")
"""What the names of a body begin with in types that are called otherwise."""


def check_weights(reference: str, config: PreTrainedConfig, revision: str | None = None) -> None:
    """Raises UserError for weights that are not complete safetensors in the model's own folder, or
    do not fit its config.json. Reads headers only. Of a hub model only what an index names is
    checked, which is fetched: transformers would load any file that one names, pickles too.

    reference: resolved.
    """
    folder = Path(reference)
    if not folder.is_dir():
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
            found = _fetched(reference, name, revision)
            if found is not None:
                break
        if found is not None and found.name == SAFE_WEIGHTS_INDEX_NAME:
            _named_in(found)
        return
    check_nodes(reference)
    files, index = [folder / SAFE_WEIGHTS_NAME], folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / _ADAPTER).exists() or not (files[0].is_file() or index.is_file()):
        what = saved_otherwise(folder) or (
            f"has no safetensors weights ({SAFE_WEIGHTS_NAME}). Convert it: load it with "
            "transformers and call save_pretrained."
        )
        raise UserError(f"model {reference!r} {what}")
    if not files[0].is_file():
        files = [folder / name for name in _named_in(index)]
        for file in files:
            if not file.is_file():
                raise UserError(
                    f"{index} lists {file.name}, which is missing. Copy the model again."
                )
    names, numel = list[str](), 0
    for file in files:
        try:
            with safe_open(file, "np") as weights:
                here = list(weights.keys())
                names += here
                numel += sum(prod(weights.get_slice(name).get_shape()) for name in here)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: not readable as safetensors: {error}. Copy the model again."
            ) from error
    _check_sizes(reference, config, len(names), numel)
    _check_names(reference, config, names)


def _fetched(reference: str, name: str, revision: str | None) -> Path | None:
    """A file of a hub model; None where it has none of that name, or cannot be reached, of which
    the load then tells."""
    found = cached_file(
        reference,
        name,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _named_in(index: Path) -> list[str]:
    """The files that an index lists. Raises UserError for any but safetensors beside it."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(
            f"{index}: not readable: {first_line(error)}. Copy the model again."
        ) from error
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise UserError(
                f"{index} names {name!r}. Weights are read from safetensors files beside it alone. "
                "Convert the model: load it with transformers and call save_pretrained."
            )
    return names


def _check_sizes(reference: str, config: PreTrainedConfig, tensors: int, numel: int) -> None:
    """Raises UserError for sizes far beyond the `numel` weights: transformers would allocate the
    memory before it compares shapes."""

    def of(key: str) -> int:
        return getattr(config, key, None) or 0

    hidden = of("hidden_size")
    width = of("embedding_size") or hidden
    needs = {
        "vocab_size": of("vocab_size") * width,
        "max_position_embeddings": (usable_length(config) or 0) * width,
        "type_vocab_size": of("type_vocab_size") * width,
        "hidden_size": hidden**2,
        "embedding_size": width * hidden,
        "intermediate_size": of("intermediate_size") * hidden,
        "position_buckets": 2 * of("position_buckets") * hidden,
        "max_relative_positions": 2 * of("max_relative_positions") * hidden,
        "conv_kernel_size": of("conv_kernel_size") * hidden**2,
        "num_hidden_groups": of("num_hidden_groups") * of("inner_group_num") * hidden**2,
        "num_labels": config.num_labels * hidden,
    }
    for key, needed in needs.items():
        if needed > max(numel, ALLOWANCE):
            raise UserError(
                f"model {reference!r}: its config.json has {key}={getattr(config, key)}, which "
                f"needs {needed:,} weights, far more weights than the {numel:,} in its safetensors "
                "files. Use the files of one model."
            )
    if of("num_hidden_layers") > tensors:
        raise UserError(
            f"model {reference!r}: its config.json has num_hidden_layers="
            f"{of('num_hidden_layers')}, far more than the {tensors} weights in its safetensors "
            "files are of. Use the files of one model."
        )


def _check_names(reference: str, config: PreTrainedConfig, names: list[str]) -> None:
    """Raises UserError for names of weights that transformers would pass over in silence, with
    random weights in their place: of a model inside of another module, of an adapter, or of more
    layers or fewer than its config.json has."""
    fix = "Load it as it was trained, and call save_pretrained of the transformers model in it."
    for name in names:
        if wrapper := next((part for part in name.split(".") if part in _WRAPPERS), None):
            raise UserError(
                f"model {reference!r}: its weights are named as {_WRAPPERS[wrapper]} names them, "
                f"such as {name}, and transformers' own names are without {wrapper}. {fix}"
            )
        if _LORA.search(name):
            raise UserError(
                f"model {reference!r}: it has weights of an adapter, such as {name}, which change "
                "those of another model. Merge the two (peft's merge_and_unload), and save what "
                "comes out."
            )
    of_layers = [found for name in names if (found := _LAYER.match(name))]
    if not of_layers:
        return
    [(prefix, _)] = Counter(found[1] for found in of_layers).most_common(1)
    own = [found for found in of_layers if found[1] == prefix]
    allowed = {"", *_BODIES, config.model_type.replace("-", "_")}
    if own[0][2] is None:  # ModernBERT and others: model.layers
        allowed.add("model")
    if prefix.removesuffix(".") not in allowed:
        raise UserError(
            f"model {reference!r}: its weights are named as parts of another module, such as "
            f"{own[0].string}, and the names of a {config.model_type} of transformers are without "
            f"{prefix} in front. {fix}"
        )
    count = 1 + max(int(found[4]) for found in own)
    if own[0][3] != "albert_layer_groups" and count != config.num_hidden_layers:
        raise UserError(
            f"model {reference!r}: the checkpoint does not fit its config.json: that has "
            f"num_hidden_layers={config.num_hidden_layers}, and there are weights of {count} "
            "layers. Use the files of one model; a student of some of its layers is made by "
            "student.layers."
        )
