"""Products of hidden states and output weights, for `linear_kl` and `linear_cross_entropy`: what
these take, which rows at a time, into what.

Shapes: n counted rows, V columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._shared import FLOATS, use_triton

# Bytes of float32 logits (both models) alive at a time, and of stored derivatives. Every further
# chunk reads both weights again, so on a GPU a chunk is a thousand rows or more.
LOGIT_BYTES = {"cuda": 5 << 28, "cpu": 1 << 27}
KEEP_BYTES = {"cuda": 1 << 29, "cpu": 1 << 28}
_ALIGN = 16  # columns of a buffer: its rows stay 16-byte aligned, which V itself does not give
_BLOCK = 4096


def chunks(num_rows: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Where each of the chunks of rows begins and ends, all about as long."""
    budget = LOGIT_BYTES.get(device.type, LOGIT_BYTES["cpu"])
    count = -(-num_rows // max(1, budget // (8 * width)))
    for i in range(count):
        yield i * num_rows // count, (i + 1) * num_rows // count


def keeps(num_rows: int, width: int, hidden: Tensor) -> bool:
    """Whether derivatives [num_rows, width] of the dtype of `hidden` fit the budget."""
    return fits(num_rows, width, hidden.element_size(), hidden.device.type)


def fits(num_rows: int, width: int, size: int, device: str) -> bool:
    """Likewise of `size` bytes each, on a device that torch calls so."""
    return num_rows * width * size <= KEEP_BYTES.get(device, KEEP_BYTES["cpu"])


def held_by_kl(num_rows: int, width: int, hidden: int, size: int, device: str) -> int:
    """Bytes that `linear_kl` holds at its peak, for plans: of numbers of `size` bytes, of a student
    whose states are `hidden` wide."""
    logits = min(num_rows * 8 * width, LOGIT_BYTES[device])
    kept = num_rows * width if fits(num_rows, width, size, device) else logits // 8
    return logits + kept * size + 4 * width * hidden


def held_by_cross_entropy(num_rows: int, width: int, hidden: int, size: int, device: str) -> int:
    """Likewise `linear_cross_entropy`: float32 logits of a chunk and a sum of the weight's
    gradient, and of 16 bits what is made of both."""
    numbers = min(num_rows * width, LOGIT_BYTES[device] // 8) + width * hidden
    return (4 + size if size < 4 else size) * numbers


def take(tensor: Tensor, rows: Tensor | None, start: int, end: int) -> Tensor:
    """Counted rows `start` to `end`."""
    return tensor[start:end] if rows is None else tensor.index_select(0, rows[start:end])


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """out + a @ b in float32 (float64 stays), without rounding to a 16-bit dtype on the way."""
    low = a.dtype in (torch.float16, torch.bfloat16)
    if a.is_cuda or not low:
        product = torch.mm(a, b, out_dtype=torch.float32) if low else torch.mm(a, b)
        return product if out is None else out.add_(product)
    # In blocks: the CPU has no such out_dtype, and the operands are never converted whole.
    (rows, inner), columns = a.shape, b.shape[1]
    if out is None:
        out = torch.zeros(rows, columns, dtype=torch.float32, device=a.device)
    for i in range(0, rows, _BLOCK):
        for k in range(0, inner, _BLOCK):
            part = a[i : i + _BLOCK, k : k + _BLOCK].float()
            for j in range(0, columns, _BLOCK):
                block = b[k : k + _BLOCK, j : j + _BLOCK].float()
                out[i : i + _BLOCK, j : j + _BLOCK].addmm_(part, block)
    return out


def pieces(width: int, tensor: Tensor) -> list[slice]:
    """Of V columns, those that one product takes. cuBLAS has its fast kernels for multiples of 8
    alone: V = 50,265 in one took 6.3 times as long as in two (H100, bfloat16)."""
    whole = width - width % 8 if tensor.is_cuda else width
    return [part for part in (slice(0, whole), slice(whole, width)) if part.start < part.stop]


def hidden_gradient(derivatives: Tensor, weight: Tensor) -> Tensor:
    """derivatives [n, V] @ weight [V, D], as `mm`."""
    total: Tensor | None = None
    for part in pieces(len(weight), weight):
        total = mm(derivatives[:, part], weight[part], total)
    assert total is not None
    return total


def weight_gradient(
    derivatives: Tensor, hidden: Tensor, total: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """total + derivatives.T [V, n] @ hidden [n, D], in place. None: the product alone, in `dtype`:
    that of `hidden`, or as `mm`."""
    fresh, width = total is None, derivatives.shape[1]
    if total is None:
        made = hidden.new_empty if dtype == hidden.dtype else hidden.new_zeros
        total = made(width, hidden.shape[1], dtype=dtype)
    for part in pieces(width, hidden):
        own = derivatives[:, part].t()
        if total.dtype != hidden.dtype:
            mm(own, hidden, total[part])
        elif fresh:
            torch.mm(own, hidden, out=total[part])
        else:
            total[part].addmm_(own, hidden)
    return total


def buffer(hidden: Tensor, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """[num_rows, at least width], every row at 16 bytes; of `dtype`, or that of `hidden`."""
    return hidden.new_empty((num_rows, -(-width // _ALIGN) * _ALIGN), dtype=dtype)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """float32 [n, V] (float64 stays); for the Triton kernels in rows that begin at 16 bytes."""
    if not use_triton(hidden) or hidden.dtype == torch.float64:
        return mm(hidden, weight.t())
    out = buffer(hidden, hidden.shape[0], weight.shape[0], torch.float32)[:, : len(weight)]
    if not hidden.is_cuda:  # the interpreter
        return out.copy_(mm(hidden, weight.t()))
    options = {} if hidden.dtype == torch.float32 else {"out_dtype": torch.float32}
    for part in pieces(len(weight), weight):
        torch.mm(hidden, weight[part].t(), out=out[:, part], **options)
    return out


def put_rows(target: Tensor, rows: Tensor | None, start: int, end: int, values: Tensor) -> None:
    """Write the counted rows `start` to `end` of a tensor."""
    if rows is None:
        target[start:end] = values
    else:
        target.index_copy_(0, rows[start:end], values)


def unscaled(total: Tensor | None, largest: Tensor | None, weight: Tensor) -> Tensor:
    """A gradient of the weight from its sum over chunks, None where no row counts, over the first
    rows of the weight: others have 0. largest: the factor that was taken out, if one was."""
    if total is None:
        return torch.zeros_like(weight)
    total = total if largest is None else total.mul_(largest)
    if len(total) == len(weight):
        return total.to(weight.dtype)
    gradient = torch.zeros_like(weight)
    gradient[: len(total)] = total
    return gradient


def parted(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A factor of each row [n] as (ratio [n, 1], largest []). The largest, as a rule a power of ten
    or more below 1, is taken out of float16's products, which would underflow; None in other
    dtypes."""
    if dtype != torch.float16:
        return scale[:, None], None
    largest = scale.abs().amax() if scale.numel() else scale.new_zeros(())
    largest = torch.where(largest == 0, 1, largest)
    return (scale / largest)[:, None], largest


def refuse_released(op: str, **weights: Tensor | None) -> None:
    """Raise RuntimeError on a weight, by its model, that is empty in the backward pass."""
    for name, head in weights.items():
        if head is not None and head.numel() == 0:
            raise RuntimeError(
                f"{op}: {name}_weight is empty in the backward pass: it was released after "
                "the forward pass (ZeRO stage 3). Call the op inside the wrapped module's forward"
            )


def cast_of(device: str) -> torch.dtype | None:
    """The dtype to which inputs are cast, as F.linear does under autocast; None outside of it."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def checked_model(
    op: str,
    name: str,
    model: tuple[Tensor, Tensor, Tensor | None],
    cast: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A model's rows [N, H], its head [V, H] and bias [V], in the dtype of autocast; a teacher's
    without gradients. Raises ValueError where they do not fit."""
    hidden, head, bias = model
    if name == "teacher":
        hidden, head = hidden.detach(), head.detach()
        bias = None if bias is None else bias.detach()
    if cast is not None:
        hidden, head = hidden.to(cast), head.to(cast)
    if head.dim() != 2 or head.shape[1] != hidden.shape[-1] or head.shape[0] == 0:
        raise ValueError(
            f"{op}: {name}_weight {list(head.shape)} does not project {name}_hidden "
            f"{list(hidden.shape)}; [V, {hidden.shape[-1]}] wanted"
        )
    if head.dtype != hidden.dtype or head.dtype not in FLOATS:
        raise ValueError(
            f"{op}: {name}_weight is {head.dtype}, {name}_hidden {hidden.dtype}; "
            "they must agree, outside autocast"
        )
    if bias is not None and bias.shape != head.shape[:1]:
        raise ValueError(
            f"{op}: {name}_bias {list(bias.shape)} does not match {name}_weight {list(head.shape)}"
        )
    return hidden.reshape(-1, hidden.shape[-1]), head, bias
