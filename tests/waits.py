"""What Python would wait for on a GPU, told on a CPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {
    f"aten.{name}"
    for name in (
        *("_local_scalar_dense", "nonzero", "equal", "repeat_interleave", "masked_select"),
        *("unique_dim", "_unique2", "is_nonzero", "lift_fresh"),
    )
}
"""`lift_fresh`: a tensor of Python numbers, which is copied to the device."""


class Waits(TorchDispatchMode):
    """Counts the operations for whose result Python would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet, kwargs = str(func.overloadpacket), kwargs or {}
        sized = packet == "aten.repeat_interleave" and kwargs.get("output_size") is not None
        if packet in WAITING and not sized:
            self.found.append(packet)
        return func(*args, **kwargs)
