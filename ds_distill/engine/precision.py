"""bf16 or fp32: what a DeepSpeed config says, and what `_auto` means on this device."""

from __future__ import annotations

from typing import Any


def is_bf16(config: dict[str, Any]) -> bool:
    return bool(config.get("bf16", {}).get("enabled", False))


def in_fp32(config: dict[str, Any]) -> dict[str, Any]:
    """The same config for an engine that computes in fp32."""
    return {key: value for key, value in config.items() if key not in ("bf16", "torch_autocast")}


def resolved_name(reference: str) -> str:
    """The built-in config that a name stands for on this machine."""
    if not reference.endswith("_auto"):
        return reference
    return reference.removesuffix("auto") + ("bf16" if _computes_bf16() else "fp32")


def _computes_bf16() -> bool:
    """Whether the device multiplies bf16 matrices in hardware. A CPU without AVX-512 does it in
    software, many times slower than fp32."""
    import torch  # seconds

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
