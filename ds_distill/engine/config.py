"""DeepSpeed configs: find them, check them against the recipe, complete them."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

from ds_distill.engine.precision import dtype_name, resolved_name
from ds_distill.errors import UserError
from ds_distill.files import is_file
from ds_distill.recipe.training import Training

OURS = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "batch_size and micro_batch_size",
    "gradient_clipping": "max_grad_norm",
}
"""DeepSpeed keys that the recipe sets, and the recipe's keys for them."""

NO_WAITS = {"timers": {"throughput": {"enabled": False}}}
"""DeepSpeed's throughput timer waits for the device twice a micro-step, and a run has its own."""


def find_config(reference: str, *, for_device: bool = True) -> tuple[str, dict[str, Any]]:
    """Read a DeepSpeed config by built-in name or path: (path, content).

    A name that ends in `_auto` means the `_bf16` config where the device computes in bf16, else
    the `_fp32` one, which differs in nothing else. `for_device=False` takes the `_fp32` one.

    Raises UserError when it is missing, or `read_config` refuses it.
    """
    folder = Path(str(importlib.resources.files("ds_configs"))) / "deepspeed"
    path = Path(reference)
    if is_file(path):
        from ds_distill.engine.config_file import read_config  # imports deepspeed: seconds

        config = read_config(path, OURS, for_device=for_device)
    else:
        stem = reference.removesuffix("_auto")
        auto = stem != reference
        if auto and is_file(folder / f"{stem}_fp32.json"):
            reference = resolved_name(reference) if for_device else f"{stem}_fp32"
        path = folder / f"{reference}.json"
        if not is_file(path):
            stems = {found.stem for found in folder.glob("*.json")}
            names = ", ".join(sorted(stems | {f"{stem.rpartition('_')[0]}_auto" for stem in stems}))
            raise UserError(
                f"{reference!r} is neither a file nor a built-in config. Built-in: {names}.",
                at="deepspeed",
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    if zero_stage(config) not in stages_of(config):
        raise UserError(
            f"{path} has fp16 at stage 0, where DeepSpeed does not scale the loss. Use "
            "stage 1, e.g. deepspeed=zero1_fp16; on one rank it does the same.",
            at="deepspeed",
        )
    return str(path), config


def batch_shape(training: Training, num_ranks: int) -> tuple[int, int]:
    """(examples per rank and forward pass, micro-steps per optimizer step)."""
    wanted = training.micro_batch_size or -(-training.batch_size // num_ranks)
    micro_steps = max(1, -(-training.batch_size // (wanted * num_ranks)))
    return -(-training.batch_size // (micro_steps * num_ranks)), micro_steps


TOKENS_AT_ONCE = 2**16
"""That a sharded teacher reads in one pass: each layer's weights are gathered once for them, and
its activations are held of all. A whole one reads a quarter, over which a GPU computes for twice as
long as Python takes for a large teacher's layers (tests/results/one-engine-zero1-h200.json). Not
measured on a GPU."""

STEPS_AHEAD = 8
"""Most optimizer steps whose texts live teachers read at once: what they cost beside computing is
then an eighth of what it was, and a stop waits for one pass."""

SIGNALS_AHEAD = 2**28
"""Most bytes of what live teachers say of more than one step."""

LAYERS_WHOLE = 3
"""Layers of sharded teachers that are whole at once: the one that computes, and those that are
gathered meanwhile."""


def micro_batches_together(
    stage: int,
    micro_batch: int,
    micro_steps: int,
    length: int,
    signals: int = 0,
    packs: bool = False,
) -> int:
    """Over how many micro-batches live teachers run at once: over as many as have TOKENS_AT_ONCE,
    of a part of an optimizer step, or of up to STEPS_AHEAD whole steps.

    micro_batch: examples. length: tokens of the longest one. signals: bytes of what they say of a
        micro-batch, of which SIGNALS_AHEAD are held; 0 without live teachers.
    packs: whether all run without padding. Else, below stage 3, no step is read ahead: steps of
        unlike lengths would be padded to the longest, and no weights are gathered.
    """
    tokens = TOKENS_AT_ONCE if stage == 3 else TOKENS_AT_ONCE // 4
    together = max(1, tokens // (micro_batch * length))
    if together < micro_steps or not signals or (stage < 3 and not packs):
        return min(micro_steps, together)
    steps = min(STEPS_AHEAD, together // micro_steps, SIGNALS_AHEAD // (micro_steps * signals))
    return micro_steps * max(1, steps)


def deepspeed_config(
    reference: str, training: Training | None, num_ranks: int, *, for_device: bool = True
) -> dict[str, Any]:
    """The config for the engine: the file's content with the recipe's values.

    training: the phase's; None for a phase without training.
    for_device: see `find_config`.

    Raises UserError where the file contradicts the recipe.
    """
    path, config = find_config(reference, for_device=for_device)
    micro_batch, micro_steps = batch_shape(training, num_ranks) if training else (1, 1)
    ours: dict[str, Any] = {
        "train_batch_size": micro_batch * micro_steps * num_ranks,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": training.max_grad_norm if training else 0.0,
    }
    if training:
        for key, recipe_key in OURS.items():
            given = config.get(key, ours[key])
            if given != ours[key]:
                raise UserError(
                    f"{path} sets {key}={given}, but the recipe's {recipe_key} with "
                    f"{num_ranks} rank(s) gives {ours[key]}. Take {key} out of the file, or "
                    f"change {recipe_key} of the recipe.",
                    at="deepspeed",
                )
    if training and training.activation_checkpointing:
        ours["activation_checkpointing"] = {"partition_activations": False}
    return {**NO_WAITS, **config, **ours}


def stages_of(config: dict[str, Any]) -> tuple[int, ...]:
    """The ZeRO stages at which DeepSpeed trains in the config's dtype. Not in fp16 at stage 0:
    there engine.backward() scales no loss, and the optimizer divides by the scale all the same
    (DeepSpeed 0.19.8, its pull request 8393)."""
    return (1, 2, 3) if dtype_name(config) == "float16" else (0, 1, 2, 3)


def trains_alone(config: dict[str, Any], ranks: int) -> bool:
    """Whether a rank trains with an optimizer of its own (engine/flat_adamw.py): where there is
    nothing to shard, to scale in fp16, or to offload."""
    offloads = "offload_optimizer" in config.get("zero_optimization", {})
    half = dtype_name(config) == "float16"
    return ranks == 1 and zero_stage(config) < 3 and not half and not offloads


def zero_stage(config: dict[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))
