"""Check a model's weights before they are loaded: names of files, headers of safetensors, sizes.

Nothing here imports torch, so that `ds-distill check` is fast.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ds_distill.data.pretrained import check_nodes
from ds_distill.errors import UserError, first_line
from ds_distill.files import read_json
from ds_distill.models.configuration import usable_length

ALLOWANCE = 1 << 24
"""Weights of one kind, 64 MiB in fp32, that a configuration may have beyond those in the files: a
table of positions that are computed, a head for another task."""

_ADAPTER = "adapter_config.json"


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
    if (folder / _ADAPTER).exists():
        raise UserError(
            f"model {reference!r} is an adapter ({_ADAPTER}), which changes the weights of another "
            "model. Merge the two (peft's merge_and_unload), and save what comes out."
        )
    files = [folder / SAFE_WEIGHTS_NAME]
    if not files[0].is_file():
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if not index.is_file():
            raise UserError(
                f"model {reference!r}: the folder has no safetensors weights "
                f"({SAFE_WEIGHTS_NAME}). Convert it: load it with transformers and call "
                "save_pretrained."
            )
        files = [folder / name for name in _named_in(index)]
        for file in files:
            if not file.is_file():
                raise UserError(
                    f"{index} lists {file.name}, which is missing. Copy the model again."
                )
    tensors = numel = 0
    for file in files:
        try:
            with safe_open(file, "np") as weights:
                names = list(weights.keys())
                tensors += len(names)
                numel += sum(prod(weights.get_slice(name).get_shape()) for name in names)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: not readable as safetensors: {error}. Copy the model again."
            ) from error
    _check_sizes(reference, config, tensors, numel)


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
