"""A user's DeepSpeed config file, as DeepSpeed reads it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ds_distill.engine.accelerator  # noqa: F401  # isort: skip  (before deepspeed)
from deepspeed import DeepSpeedConfig
from pydantic import ValidationError

from ds_distill.engine.precision import computes_bf16
from ds_distill.engine.world import no_chatter
from ds_distill.errors import UserError, did_you_mean, first_line, short

NOT_OURS = {
    "optimizer": "learning_rate, weight_decay and warmup of the recipe",
    "scheduler": "learning_rate, warmup and epochs of the recipe",
    "elasticity": "a fixed number of ranks; DeepSpeed 0.19 removed elastic training",
    "pipeline": "ZeRO stages 0 to 3",
    "tensor_parallel": "ZeRO stages 0 to 3",
    "bfloat16": 'the section "bf16"',
}
"""DeepSpeed keys that a run does not support, and what to use instead."""


def read_config(path: Path, ours: Collection[str], *, for_device: bool) -> dict[str, Any]:
    """What a file says, without what it leaves open by "auto": `bf16.enabled` is then whether the
    device computes in bf16 (without `for_device` it does not), other keys are as without them.

    ours: keys that the recipe sets; here they need not fit each other.

    Raises UserError where DeepSpeed refuses the file, would read past a key, or where it asks for
    what a run does not support.
    """
    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=_each_key_once)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.", at="deepspeed") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object.", at="deepspeed")
    for key, instead in NOT_OURS.items():
        section = config.get(key)
        if section and not (isinstance(section, dict) and section.get("enabled") is False):
            raise UserError(f"{path} sets {key!r}. Take it out and use {instead}.", at="deepspeed")
    for name in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(config.get(name, {}), dict):
            raise UserError(
                f"{path} sets {name}={short(config[name])}; it is a section, e.g. "
                '"zero_optimization": {"stage": 3}.',
                at="deepspeed",
            )
    if config.get("bf16", {}).get("enabled") == "auto":
        config["bf16"]["enabled"] = for_device and computes_bf16()
    config = _without_auto(config)
    _ask_deepspeed(path, {key: value for key, value in config.items() if key not in ours})
    return config


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    for key in section:
        if [other for other, _ in pairs].count(key) > 1:
            raise ValueError(f"{key!r} is there twice")
    return section


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """transformers' Trainer fills such keys in, and DeepSpeed reads past some of them."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value != "auto"
    }


class _Asked(dict[str, Any]):
    """A config that notes which of its keys DeepSpeed looks for: no list says which it knows."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.known: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.known.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.known.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.known.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # asked whether it contains one


def _ask_deepspeed(path: Path, config: dict[str, Any]) -> None:
    """Raises UserError for what DeepSpeed refuses in a file, and what a run does not support."""
    asked = _Asked({**config, "train_micro_batch_size_per_gpu": 1})
    try:
        with no_chatter():
            zero = DeepSpeedConfig(asked).zero_config
    except ValidationError as error:
        what = "; ".join(
            f"{'.'.join(map(str, one['loc']))}={short(one['input'])}: {one['msg']}"
            for one in error.errors()
        )
        raise UserError(f"DeepSpeed refuses {path}: {what}.", at="deepspeed") from error
    except Exception as error:  # of sections that are no sections, each in its own way
        raise UserError(
            f"DeepSpeed refuses {path}: {first_line(error)}.", at="deepspeed"
        ) from error
    for key in config:
        if key not in asked.known:
            raise UserError(
                f"{path} sets {key}={short(config[key])}, a key that DeepSpeed does not "
                f"know.{did_you_mean(key, asked.known)}",
                at="deepspeed",
            )
    for part in ("offload_param", "offload_optimizer"):
        offload = getattr(zero, part)
        if offload is not None and offload.device != "none":
            raise UserError(
                f"{path} sets zero_optimization.{part} to the device "
                f"{offload.device!r}; a run keeps weights and optimizer states on the "
                "devices that compute. Take it out; for less memory use stage 3 on more GPUs, or "
                "cache what the teachers say.",
                at="deepspeed",
            )
