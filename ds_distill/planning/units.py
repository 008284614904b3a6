"""Numbers with the unit that fits them."""

from __future__ import annotations

GIB = 2**30


def duration(seconds: float) -> str:
    """In the unit that fits."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e3:.1f} ms"


def rate(each_second: float) -> str:
    """How many a second: with two figures below ten, where a slow one would be 0."""
    return f"{each_second:,.0f}" if each_second >= 10 else f"{each_second:.2g}"


def amount(size: float) -> str:
    """Bytes, in the unit that fits."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return f"{size / 1000:.1f} kB"


def gib(size: int | None) -> str:
    """Bytes, in GiB; empty for None."""
    return "" if size is None else f"{size / GIB:.2f}"


def milliseconds(seconds: float | None) -> str:
    """Empty for None."""
    return "" if seconds is None else f"{seconds * 1e3:.1f}"
