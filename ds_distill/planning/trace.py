"""What a piece of torch code costs: its operations, and the memory that it holds, on any device.

On the meta device nothing is computed: a pass through 24 layers takes a fraction of a second.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

_ATEN = torch.ops.aten

_MOVES_NOTHING = {_ATEN.detach, _ATEN._unsafe_view}
"""Operations that give another view of their input, though they do not say so."""


_KNOWN_AS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
"""Of fused attention torch's counter knows that of GPUs alone."""


@dataclass(frozen=True)
class Cost:
    """What a pass costs."""

    operations: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(floating-point operations of matrix products, bytes read and written) of each call of a
    kernel -> how many there are."""
    peak: int = 0
    """Most bytes alive at a time, of what the pass itself allocated."""

    @property
    def flops(self) -> int:
        """Two for each multiplication of the matrix products, as torch's FlopCounterMode counts."""
        return sum(flops * times for (flops, _), times in self.operations.items())

    def extended(self, longer: Cost, times: int) -> Cost:
        """Of a model with `times` times the layers more by which `longer` is longer."""
        more = Counter(longer.operations)
        more.subtract(self.operations)
        total = Counter(self.operations)
        for operation, count in more.items():
            total[operation] += count * times
        return Cost(+total, self.peak + times * (longer.peak - self.peak))


class Trace(TorchDispatchMode):
    """Counts what runs in its `with` block; `cost` has the result."""

    def __init__(self, mask_bytes: int | None = None) -> None:
        """mask_bytes: bytes of an element of a dropout mask, where the device that is planned for
        has another kernel than the one that runs here. None: as here."""
        super().__init__()
        self._mask_bytes = mask_bytes
        self._operations: Counter[tuple[int, int]] = Counter()
        self._alive = self._peak = 0
        self._storages = WeakIdKeyDictionary()

    @property
    def cost(self) -> Cost:
        return Cost(Counter(self._operations), self._peak)

    def ignore(self, *tensors: torch.Tensor) -> None:
        """What was there before: weights and inputs, which may be passed on as they are."""
        for tensor in tensors:
            self._storages[tensor.untyped_storage()] = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kernel = func.overloadpacket
        if kernel is _ATEN._local_scalar_dense and args[0].is_meta:
            return False  # transformers asks whether a mask is all true: there is padding
        result = func(*args, **(kwargs or {}))
        outputs = list(_tensors(result))
        if not func.is_view and kernel not in _MOVES_NOTHING:
            inputs = _tensors((args, kwargs or {}))
            moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
            flops = _flops(kernel, args, kwargs or {}, result)
            self._operations[flops, moved] += 1
        for tensor in outputs:
            self._allocated(tensor)
        if self._mask_bytes is not None and kernel is _ATEN.bernoulli_:
            self._resized(outputs[0], outputs[0].numel() * self._mask_bytes)
        self._peak = max(self._peak, self._alive)
        return result

    def _allocated(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        held = [storage.nbytes()]
        self._storages[storage] = held
        self._alive += held[0]
        weakref.finalize(storage, self._freed, held)

    def _resized(self, tensor: torch.Tensor, size: int) -> None:
        held = self._storages[tensor.untyped_storage()]
        self._alive += size - held[0]
        held[0] = size

    def _freed(self, held: list[int]) -> None:
        self._alive -= held[0]


def _flops(kernel: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    count = flop_registry.get(_KNOWN_AS.get(kernel, kernel))
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
