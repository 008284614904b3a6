"""How a program walks a row: in 16-byte granules, tile by tile, with masks at its edges alone.

A row of an odd width begins anywhere in a granule, and what begins anywhere is read 2 bytes at a
time. So a row is read from the granule that its first column is in; only its first and its last
tile have columns of others, and masks. Shapes: N rows, V columns.
"""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._shared import constant, indices, jit, target_options, tl, warp_lanes


@jit
def granules(number, size, GRANULE: tl.constexpr):
    """number * size, rounded down to a granule, which the compiler then knows."""
    return number * size // GRANULE * GRANULE


@jit
def span(row, stride, V, GRANULE: tl.constexpr, SHIFTED: tl.constexpr):
    """A row's place: the offset of its first granule, and from there its first column, its end, and
    the end of its last granule."""
    shift = 0
    if SHIFTED:
        shift = (row * stride % GRANULE).to(tl.int32)
    end = shift + V
    return granules(row, stride, GRANULE), shift, end, granules(end + GRANULE - 1, 1, GRANULE)


@jit
def tiles(part: tl.constexpr, end, BLOCK: tl.constexpr, SHIFTED: tl.constexpr):
    """Tiles of a row, first and behind the last: those whose columns are all in the row (part 1),
    and the first (0) and the last (2), which have others: in loops of their own, since masks in
    the long one cost more than what they hide."""
    whole = end // BLOCK
    if part == 0:
        return 0, SHIFTED
    elif part == 1:
        return SHIFTED, whole
    else:
        behind = tl.maximum(whole, SHIFTED)
        return behind, behind + (end > behind * BLOCK).to(tl.int32)


@jit
def load(
    pointer, at, shift, end, limit, EDGE: tl.constexpr, ACC: tl.constexpr,
    OTHER: tl.constexpr = -float("inf"),
):  # fmt: skip
    """A tile of a row, OTHER outside it. Edges are read to the ends of their granules."""
    if EDGE:
        x = tl.load(pointer + at, mask=at < limit, other=OTHER).to(ACC)
        return tl.where((at >= shift) & (at < end), x, OTHER)
    else:
        return tl.load(pointer + at).to(ACC)


@jit
def store(pointer, at, values, shift, end, EDGE: tl.constexpr, GRANULE: tl.constexpr):
    """A tile of a row; of an edge the granules that are all in the row at once, and only of the
    two at its ends column by column."""
    values = values.to(pointer.dtype.element_ty)
    if EDGE:
        first = at // GRANULE * GRANULE
        whole = (first >= shift) & (first + GRANULE <= end)
        tl.store(pointer + at, values, mask=whole)
        if GRANULE > 1:
            tl.store(pointer + at, values, mask=(at >= shift) & (at < end) & (whole == 0))
    else:
        tl.store(pointer + at, values)


@jit
def store_zeros(
    pointer, shift, end, BLOCK: tl.constexpr, GRANULE: tl.constexpr, SHIFTED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """The gradient of a row that does not count, or is below the tolerance: nothing is read."""
    tile = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], ACC)
    for part in tl.static_range(3):
        begin, behind = tiles(part, end, BLOCK, SHIFTED)
        for number in range(begin, behind):
            store(pointer, number * BLOCK + tile, zeros, shift, end, part != 1, GRANULE)


EVERY, MASKED, LISTED = constant(0), constant(1), constant(2)
"""Which rows count: every one, those of a bool mask [N], those of a list of indices [n]."""


@jit
def counted_row(counted, num_rows, ROWS: tl.constexpr):
    """This program's number, its row, and whether that counts: one for each row, or each of a
    list."""
    number = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31
    if ROWS == LISTED:
        row = tl.load(counted + number)
        return number, row, (row >= 0) & (row < num_rows)
    elif ROWS == MASKED:
        return number, number, tl.load(counted + number) != 0
    else:
        return number, number, number < num_rows


@jit
def uncounted(ROWS: tl.constexpr, ACC: tl.constexpr):
    """The loss of a row that does not count; of an index of no row infinite, since what would raise
    waits for the device."""
    return tl.full([], float("inf") if ROWS == LISTED else 0.0, ACC)


def granule(*tensors: Tensor) -> int:
    """Columns that are 16 bytes of the narrowest of these [N, V], where the rows of all begin
    equally far into one; else 1."""
    columns = 16 // min(tensor.element_size() for tensor in tensors)
    first = tensors[0]
    alike = all(
        tensor.data_ptr() % 16 == 0 and (tensor.stride(0) - first.stride(0)) % columns == 0
        for tensor in tensors
    )
    return columns if alike else 1


def programs(rows: Tensor | None, num_rows: int) -> tuple[int, int]:
    """How many programs there are for rows as `flat_rows` gives them, and ROWS of `counted_row`."""
    if rows is None:
        return num_rows, 0
    return (num_rows, 1) if rows.dtype == torch.bool else (len(rows), 2)


def gradient_to_write(student: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Where a backward kernel writes [N, V], and the list of rows that it is launched over. None:
    every row; a mask is in the losses, which are 0 of rows that do not count. With a list one fill
    of zeros is faster than a program for each row outside it."""
    listed = indices(rows)
    made = torch.empty if listed is None else torch.zeros
    return made(student.shape, dtype=student.dtype, device=student.device), listed


def row_tile(length: int, columns: int, lanes: int, threads: int = 512) -> tuple[int, int]:
    """(columns, warps of `lanes` threads) of a program that walks one row of this length, a granule
    of `columns` a thread. Programs are large so that few rows are read at a time, and what a second
    loop reads again is still in the L2 cache."""
    thread = max(columns, 4)
    block = max(16, min(1 << (length - 1).bit_length(), max(threads, lanes) * thread))
    return block, max(1, block // (lanes * thread))


def row_launch(acc: torch.dtype, *tensors: Tensor, threads: int = 512) -> dict[str, Any]:
    """Launch options of a kernel that walks the rows of these [N, V]."""
    first, columns = tensors[0], granule(*tensors)
    block, warps = row_tile(first.shape[1], columns, warp_lanes(first.device), threads)
    shifted = int(first.stride(0) % columns != 0)
    sizes = {"V": first.shape[1], "BLOCK": block, "GRANULE": columns, "SHIFTED": shifted}
    return {**sizes, "num_warps": warps, **target_options(acc)}
