"""How a program walks a row: in 16-byte granules, tile by tile, with masks at its edges alone.

A row of an odd width begins anywhere in a granule, and what begins anywhere is read 2 bytes at a
time. So a row is read from the granule that its first column is in; only its first and its last
tile have columns of others, and masks. Shapes: N rows, V columns.
"""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

from torch import Tensor

from ._shared import jit, tl


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
def store(pointer, at, values, shift, end, EDGE: tl.constexpr):
    values = values.to(pointer.dtype.element_ty)
    if EDGE:
        tl.store(pointer + at, values, mask=(at >= shift) & (at < end))
    else:
        tl.store(pointer + at, values)


@jit
def store_zeros(pointer, shift, end, BLOCK: tl.constexpr, SHIFTED: tl.constexpr, ACC: tl.constexpr):
    """The gradient of a row that does not count, or is below the tolerance: nothing is read."""
    tile = tl.arange(0, BLOCK)
    for part in tl.static_range(3):
        begin, behind = tiles(part, end, BLOCK, SHIFTED)
        for number in range(begin, behind):
            store(pointer, number * BLOCK + tile, tl.zeros([BLOCK], ACC), shift, end, part != 1)


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


def row_tile(length: int, columns: int, lanes: int, threads: int = 512) -> tuple[int, int]:
    """(columns, warps of `lanes` threads) of a program that walks one row of this length, a granule
    of `columns` a thread. Programs are large so that few rows are read at a time, and what a second
    loop reads again is still in the L2 cache."""
    thread = max(columns, 4)
    block = max(16, min(1 << (length - 1).bit_length(), max(threads, lanes) * thread))
    return block, max(1, block // (lanes * thread))


def walk(first: Tensor, columns: int, block: int) -> dict[str, int]:
    """Launch options of a kernel that walks the rows of `first`."""
    shifted = int(first.stride(0) % columns != 0)
    return {"BLOCK": block, "GRANULE": columns, "SHIFTED": shifted}
