"""What the ops share: optional Triton, row masks, reductions, argument checks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU wheel does not bring Triton
    triton = tl = None

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_path = "none"


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit, or the function itself where Triton is missing (it is then never called)."""
    return function if triton is None else triton.jit(function)


def constant(value: float) -> Any:
    """A number that kernels may read from their module."""
    return value if triton is None or INTERPRETED else tl.constexpr(value)


def use_triton(tensor: Tensor) -> bool:
    """True where an op runs its Triton kernels; remembers the choice for `last_path`."""
    chosen = tensor.is_cuda or INTERPRETED
    if chosen and triton is None:
        raise RuntimeError("ds_kernels: CUDA tensors need Triton (pip install triton)")
    note_path("triton" if chosen else "reference")
    return chosen


def note_path(path: str) -> None:
    global _path
    _path = path


def last_path() -> str:
    """What the last op that ran used: "triton", "reference", or "torch" for few logits on a GPU;
    "none" before the first."""
    return _path


def accumulator(*tensors: Tensor) -> torch.dtype:
    """float32, or float64 where an input is float64 (gradient checks)."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def check_floats(op: str, **named: Tensor) -> None:
    """Raise ValueError unless all are floating, on one device."""
    [(first, one), *_] = named.items()
    for name, tensor in named.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"{op}: {name} has dtype {tensor.dtype}; float32, float16 or bfloat16 wanted"
            )
        if tensor.device != one.device:
            raise ValueError(f"{op}: {first} is on {one.device}, {name} on {tensor.device}")


def check_pair(
    op: str, name: str, student: Tensor, teacher: Tensor, *, same_last: bool = True
) -> None:
    """Raise ValueError unless both are floating, on one device, and agree in shape."""
    check_floats(op, **{f"student_{name}": student, f"teacher_{name}": teacher})
    dims = student.dim() if same_last else student.dim() - 1
    if (
        student.dim() < 1
        or student.dim() != teacher.dim()
        or student.shape[:dims] != teacher.shape[:dims]
    ):
        raise ValueError(
            f"{op}: student_{name} {list(student.shape)} and teacher_{name} "
            f"{list(teacher.shape)} differ in shape"
        )
    if student.shape[-1] == 0:
        raise ValueError(f"{op}: student_{name} {list(student.shape)} has an empty last dimension")


def check_options(
    op: str, weight: float, tolerance: float, reduction: str, temperature: float = 1.0
) -> None:
    """Raise ValueError on a number outside its range or an unknown reduction."""
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"{op}: temperature must be positive and finite, got {temperature}")
    if not 0.0 <= weight < float("inf"):
        raise ValueError(f"{op}: weight must be at least 0 and finite, got {weight}")
    if not 0.0 <= tolerance < float("inf"):
        raise ValueError(f"{op}: tolerance must be at least 0 and finite, got {tolerance}")
    check_choice(op, "reduction", reduction, ("none", "sum", "mean"))


def check_choice(op: str, name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{op}: {name} must be one of {known}, got {value!r}")


def check_range(op: str, name: str, values: Tensor, most: int, *, least: int = 0) -> None:
    """Raise ValueError on CPU values outside least .. most. On a GPU it would wait for the
    device; there indices are checked where they are used."""
    if not _looks_at(values):
        return
    low, high = (int(bound) for bound in torch.aminmax(values))
    if low < least or high > most:
        raise ValueError(f"{op}: {name} run from {low} to {high}; {least} to {most} wanted")


def _looks_at(values: Tensor) -> bool:
    return (
        bool(values.numel()) and values.device.type == "cpu" and not torch.compiler.is_compiling()
    )


def refuse_transforms(op: str, *student: Tensor | None) -> None:
    """Raise RuntimeError on derivatives that a custom op does not have.

    PyTorch treats a forward-mode derivative of an op without a formula as 0, and its error for
    torch.func.grad is that a method is missing.
    """
    given = [tensor for tensor in student if tensor is not None]
    if any(unpack_dual(tensor).tangent is not None for tensor in given):
        what = "forward-mode derivatives (torch.func.jvp, jacfwd, torch.autograd.forward_ad)"
    elif (
        torch._C._are_functorch_transforms_active()
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in given)
    ):
        what = "derivatives by torch.func (grad, vjp, jacrev, vmap of what requires a gradient)"
    else:
        return
    raise RuntimeError(
        f"ds_kernels.{op}: {what} are not implemented; loss.backward() and torch.autograd.grad are"
    )


def flat_rows(
    op: str, mask: Tensor | None, lead: torch.Size, device: torch.device
) -> Tensor | None:
    """The counted rows as None (all), bool [N], or ascending int64 indices [n] into the flattened
    rows."""
    if mask is None:
        return None
    if mask.device != device:
        raise ValueError(f"{op}: mask is on {mask.device}, the inputs are on {device}")
    if mask.dtype == torch.bool:
        if mask.shape != lead:
            raise ValueError(f"{op}: mask {list(mask.shape)} does not match rows {list(lead)}")
        return mask.reshape(-1)
    if mask.dtype != torch.int64 or mask.dim() != 1:
        raise ValueError(
            f"{op}: mask must be bool {list(lead)} or a vector of int64 row indices, "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    check_range(op, "row indices", mask, lead.numel() - 1)
    if _looks_at(mask) and not bool((mask.diff() > 0).all()):
        raise ValueError(f"{op}: row indices must ascend, each once")
    return mask


def indices(rows: Tensor | None) -> Tensor | None:
    """The rows, where they are a list."""
    return rows if rows is not None and rows.dtype != torch.bool else None


def row_parts(
    rows: Tensor | None, num_rows: int, size: int
) -> Iterator[tuple[Tensor | slice, Tensor | slice]]:
    """Where the losses of some of the counted rows stand, and these rows."""
    if rows is None:
        for start in range(0, num_rows, size):
            part = slice(start, min(start + size, num_rows))
            yield part, part
        return
    numbers = rows.nonzero().squeeze(1) if indices(rows) is None else torch.arange(len(rows))
    for part in numbers.to(rows.device).split(size):
        yield part, part if indices(rows) is None else rows[part]


def reduce_rows(losses: Tensor, rows: Tensor | None, lead: torch.Size, reduction: str) -> Tensor:
    """Reduce losses [..., N], 0 at rows not counted, or one for each row index, [..., n]."""
    if reduction == "none" and indices(rows) is None:
        return losses.reshape(*losses.shape[:-1], *lead)
    return reduce_losses(losses, rows, losses.shape[-1], reduction)


def reduce_losses(
    losses: Tensor, rows: Tensor | None, num_rows: int, reduction: str, heads: int = 1
) -> Tensor:
    """Reduce losses of counted rows, 0 elsewhere; "mean" also averages over heads."""
    if reduction == "none":
        return losses
    masked = rows is not None and rows.dtype == torch.bool
    if reduction == "mean" and not masked and losses.numel() == num_rows > 0:
        return losses.mean()  # one launch
    total = losses.sum()
    if reduction == "sum":
        return total
    total = total / heads if heads > 1 else total
    return total / (rows.sum().clamp(min=1) if rows is not None and masked else max(num_rows, 1))


def hinge(value: Tensor, tolerance: float) -> Tensor:
    """max(value - tolerance, 0) that keeps NaN."""
    return torch.where(value <= tolerance, 0.0, value - tolerance)


def above_tolerance(losses: Tensor) -> Tensor:
    """Rows whose hinge lets a gradient through: loss above 0, or NaN. Uncounted rows have 0."""
    return ~(losses <= 0)


def row_stride(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def empty_like_heads(x: Tensor) -> Tensor:
    """[B, A, S, D] laid out as [B, S, A, D], as projections of hidden states are."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def target_options(acc: torch.dtype) -> dict[str, Any]:
    """Launch options: PTX where the kernels may have instructions of NVIDIA's, and multiplications
    fused with additions, which no default of Triton shall decide."""
    ptx = not INTERPRETED and torch.version.hip is None and acc == torch.float32
    return {
        "ACC": tl.float64 if acc == torch.float64 else tl.float32,
        "PTX": ptx,
        "enable_fp_fusion": True,
    }


def capability(device: torch.device) -> int:
    """NVIDIA's compute capability of a device, such as 90; 0 for another."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def warp_lanes(device: torch.device) -> int:
    """Threads of a warp."""
    return 64 if device.type == "cuda" and torch.version.hip is not None else 32


def register_limit(most: int) -> dict[str, int]:
    """Launch option: registers of a thread. Left alone, ptxas stops early for the sake of
    occupancy and spills a few; AMD's compiler does not know the option."""
    return {"maxnreg": most} if torch.version.hip is None else {}


def differentiable(
    name: str,
    inputs: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., list[Tensor]],
    *,
    outputs: Callable[..., tuple[Tensor, ...]],
    gradients: Callable[..., list[Tensor]],
    number: int = 2,
    kept: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs,
) -> Callable[..., Any]:
    """The op `ds_kernels::NAME` with a gradient, and a second op for that: so torch.compile takes
    them as they are.

    inputs: as in a schema, tensors and lists of them first, then options.
    forward: inputs -> losses, and what the backward pass needs; so many in `number`.
    backward: (gradient of the losses, outputs, inputs) -> gradients of the first tensors.
    outputs, gradients: what both return, not filled.
    kept: the inputs -> those that the backward pass gets.
    """
    tensors, results = inputs.count("Tensor"), ", ".join(["Tensor"] * number)
    op = _op(name, f"({inputs}) -> ({results})", forward, outputs)
    needed = ", ".join(f"Tensor output{i}" for i in range(number))
    schema = f"(Tensor upstream, {needed}, {inputs}) -> Tensor[]"
    of_gradients = _op(f"{name}_backward", schema, backward, gradients)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        given = kept(*inputs)
        ctx.sizes = [len(x) if isinstance(x, list | tuple) else 0 for x in given[:tensors]]
        parts = [x if size else [x] for x, size in zip(given, ctx.sizes, strict=False)]
        ctx.save_for_backward(*(x for part in parts for x in part), *output)
        ctx.options = given[tensors:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros of the size of what the backward pass needs

    def parted(ctx: Any, flat: Sequence[Any]) -> list[Any]:
        """One for each input, a list for a list."""
        each = iter(flat)
        return [[next(each) for _ in range(size)] if size else next(each) for size in ctx.sizes]

    def autograd(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Any, ...]:
        count = sum(size or 1 for size in ctx.sizes)
        inputs, made = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        flat: list[Tensor | None] = [None] * count
        if upstream is not None:
            found = of_gradients(upstream, *made, *parted(ctx, inputs), *ctx.options)
            for number, gradient in enumerate(found):
                flat[number] = None if inputs[number] is None else gradient
        return (*parted(ctx, flat), *[None] * len(ctx.options))

    def no_second(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"ds_kernels::{name}: second derivatives are not implemented")

    op.register_autograd(autograd, setup_context=setup_context)
    of_gradients.register_autograd(no_second)
    return op


def _op(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def on_its_device(first: Any, *rest: Any) -> Any:
        """Launches go to the GPU of the first tensor, which need not be the current one."""
        with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):
            return function(first, *rest)

    op = torch.library.custom_op(
        f"ds_kernels::{name}", on_its_device, mutates_args=(), schema=schema
    )
    op.register_fake(fake)
    return op


def like_student(upstream: Tensor, losses: Tensor, stats: Tensor, student: Tensor, *_: Any) -> Any:
    """The gradient of logits [N, V], not filled."""
    return [torch.empty(student.shape, dtype=student.dtype, device=student.device)]
