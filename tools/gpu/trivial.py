"""A Triton kernel that cannot be simpler: whether Triton works at all."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, 2 * tl.load(source + at, mask=at < count), mask=at < count)
