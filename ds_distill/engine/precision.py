"""fp32, bf16 or fp16: what a DeepSpeed config says, what `_auto` means on this device, and what the
device computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ds_distill.errors import UserError

if TYPE_CHECKING:
    import torch

_HALF: dict[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}
"""Sections of a DeepSpeed config, and the dtypes that they switch on."""


def dtype_name(config: dict[str, Any]) -> Literal["float32", "bfloat16", "float16"]:
    """What models compute in under a DeepSpeed config, as torch calls it."""
    for section, name in _HALF.items():
        if config.get(section, {}).get("enabled", False):
            return name
    return "float32"


def model_dtype(config: dict[str, Any]) -> torch.dtype:
    """`dtype_name` as torch's dtype."""
    import torch  # seconds

    dtype: torch.dtype = getattr(torch, dtype_name(config))
    return dtype


def is_half(config: dict[str, Any]) -> bool:
    """Whether models compute in bf16 or fp16."""
    return dtype_name(config) != "float32"


def in_fp32(config: dict[str, Any]) -> dict[str, Any]:
    """The same config for an engine that computes in fp32."""
    return {key: value for key, value in config.items() if key not in (*_HALF, "torch_autocast")}


def resolved_name(reference: str) -> str:
    """The built-in config that a name stands for on this machine."""
    if not reference.endswith("_auto"):
        return reference
    return reference.removesuffix("auto") + ("bf16" if computes_bf16() else "fp32")


def computes_bf16() -> bool:
    """Whether the device multiplies bf16 matrices in hardware. A CPU without AVX-512 does it in
    software, many times slower than fp32."""
    import torch  # seconds

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def check_device(reference: str, config: dict[str, Any]) -> None:
    """Raises UserError where this device cannot compute in the config's dtype.

    reference: of the config, for the message.
    """
    if dtype_name(config) != "float16":
        return
    import ds_distill.engine.accelerator  # noqa: F401  # isort: skip  (before deepspeed)
    from deepspeed.accelerator import get_accelerator  # seconds

    if not get_accelerator().is_fp16_supported():
        raise UserError(
            f"deepspeed: {reference} computes in fp16, which this machine's "
            f"{get_accelerator().device_name()} does not. Use a config of bf16 or fp32."
        )
