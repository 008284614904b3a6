"""Rounding of `masked_kl` with a GPU's exponential, beside that of the kernels before (c74f3a6).

PYTHONPATH=kernels python kernels/benchmarks/rounding.py

Triton's interpreter computes exponentials to the last digit and rounds products before it adds. So
both kernels' formulas stand here once more, in numpy: ex2 and lg2 off by up to 2 ** -22, as their
documentation allows, and multiplications fused with additions. The same on every machine.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
f = np.float32
Array = np.ndarray[Any, Any]
ERROR, LOG2E, LN2 = 2.0**-22, f(1.4426950408889634), f(0.6931471805599453)
LANES, ROWS, WIDTH = 4096, 64, 1001
SETTINGS = list(
    itertools.product([1, 2, 4, 8], [0.001, 0.01, 0.1, 1, 3], [0, 80, -80], [0.5, 1, 2, 8])
)
"""Spread of the logits, of student less teacher, offset of either, temperature."""


def _noise(x: Array) -> Array:
    """Between -1 and 1, by the digits of x."""
    digits = np.ascontiguousarray(x, dtype=f).view(np.uint32) * np.uint32(2654435761)
    return (digits >> np.uint32(8)) / 2.0**23 - 1


def _ex2(x: Array, flushed: bool = True) -> Array:
    y = (np.exp2(x.astype(np.float64)) * (1 + ERROR * _noise(x))).astype(f)
    return np.where(y < 2.0**-126, f(0), y) if flushed else y


def _lg2(x: Array) -> Array:
    return (np.log2(x.astype(np.float64)) + ERROR * _noise(x)).astype(f)


def _fma(a: Any, b: Any, c: Any) -> Array:
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(f)


def _sum(x: Array) -> Array:
    """[n, 1]: a sum of each column of a tile, then pairwise."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    total = padded.reshape(len(x), -1, LANES).sum(1, dtype=f)
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total


def before(s: Array, t: Array, temperature: float, exact: bool) -> tuple[Array, Array]:
    """Losses [n] and derivatives [n, V] by the kernels of c74f3a6."""
    exp = lambda x: _ex2(x * LOG2E, flushed=False)  # noqa: E731
    s, t = s * f(1 / temperature), t * f(1 / temperature)
    lse_s, lse_t = (
        x.max(1, keepdims=True) + _lg2(_sum(exp(x - x.max(1, keepdims=True)))) * LN2 for x in (s, t)
    )
    p, q, gap = exp(t - lse_t), exp(s - lse_s), t - s
    d = np.where(abs(gap) < 1, gap - (lse_t - lse_s), (t - lse_t) - (s - lse_s))
    x = -d
    series = 1 + x / f(3) * (1 + x / f(4) * (1 + x / f(5) * (1 + x / f(6))))
    value = p * (exp(np.minimum(x, f(1))) - 1 - x)
    value = np.where(abs(x) < 0.1, p * (f(0.5) * x * x * series), value)
    value = np.where(x < 1, value, _fma(p, d, -p) + q)
    near = p * (x * (1 + x / f(2) * series))
    slope = np.where((abs(x) < 0.1) & (p > 0), near, q - p)
    losses = _sum(np.where(p == 0, q, value))[:, 0]
    return losses * f(temperature**2), slope * f(temperature)


def now(s: Array, t: Array, temperature: float, exact: bool) -> tuple[Array, Array]:
    """As `_divergences.py` has them. exact: of float32 logits."""
    c = f(np.log2(np.e) / temperature)

    def top_and_rest(x: Array) -> tuple[Array, Array]:
        largest = x.max(1, keepdims=True) * c
        top = largest / c
        return top, _lg2(_sum(_ex2(_fma(x, c, -largest))) * _ex2(_fma(-top, c, largest)))

    (top_s, rest_s), (top_t, rest_t) = top_and_rest(s), top_and_rest(t)
    apart, s, t, rest = t - s, s - top_s, t - top_t, rest_t - rest_s
    p, q = _ex2(_fma(t, c, -rest_t)), _ex2(_fma(s, c, -rest_s))
    close = _fma(apart, c, -_fma(top_t - top_s, c, rest))
    x = np.where(abs(apart) < 1, close, _fma(t - s, c, -rest)) * -LN2
    series = _fma(x, f(1 / 5040), f(1 / 720))
    for term in (1 / 120, 1 / 24, 1 / 6, 1 / 2):
        series = _fma(x, series, f(term))
    value = np.where(abs(x) < 0.5, p * (x * x * series), _fma(-p, x, q - p))
    near = _fma(x, f(1 / 720), f(1 / 120))
    for term in (1 / 24, 1 / 6, 1 / 2, 1):
        near = _fma(x, near, f(term))
    slope = np.where((abs(x) < 0.1) & (p > 0), p * (x * near), q - p) if exact else q - p
    losses = _sum(np.where(p == 0, q, value))[:, 0]
    return losses * f(temperature**2), slope * f(temperature)


def exactly(s: Array, t: Array, temperature: float) -> tuple[Array, Array]:
    def logs(x: Array) -> Array:
        x = x.astype(np.float64) / temperature
        x -= x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    log_q, log_p = logs(s), logs(t)
    p, q = np.exp(log_p), np.exp(log_q)
    return (p * (log_p - log_q)).sum(1) * temperature**2, (q - p) * temperature


def measure(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Root mean squares over rows of the errors of both, for each setting."""

    def rounded(x: Array) -> Array:
        return torch.from_numpy(x.astype(f)).to(dtype).float().numpy()

    found = []
    for spread, gap, offset, temperature in SETTINGS:
        random = np.random.default_rng(0)
        base = random.standard_normal((ROWS, WIDTH)) * spread
        t, noise = rounded(base), random.standard_normal((ROWS, WIDTH)) * gap
        s, t = rounded(t + noise + offset), rounded(t - offset)
        loss, slope = exactly(s, t, temperature)
        if not loss.mean() > 0:  # 16 bits: the same logits
            continue
        row = {"spread": spread, "gap": gap, "offset": offset, "temperature": temperature}
        row |= {"kl": loss.mean(), "loss": np.sqrt((loss**2).mean())}
        row["gradient"] = np.sqrt((slope**2).sum(1).mean())
        ways: tuple[Callable[..., tuple[Array, Array]], ...] = (before, now)
        for way in ways:
            losses, slopes = way(s, t, temperature, dtype == torch.float32)
            row[f"loss {way.__name__}"] = np.sqrt(((losses - loss) ** 2).mean())
            apart = rounded(slopes) - slope
            row[f"gradient {way.__name__}"] = np.sqrt((apart**2).sum(1).mean())
        found.append(row)
    return found


WHEN = ("before", "now")


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "# Rounding of masked_kl with a GPU's exponential, over that of the kernels of c74f3a6",
        "",
        f"Emulated in numpy (rounding.py); {ROWS} rows of {WIDTH} logits in each setting of "
        "spread (1 to 8), gap (0.001 to 3), offset (0, 80, -80) and temperature (0.5 to 8); errors "
        "against float64, root mean squares over rows. Largest: of all settings, over the loss or "
        "the gradient itself. Settings in which 16 bits leave no gap are left out.",
        "",
        "| dtype | error of | largest before | largest now | settings | ratio, median | above 1.05 "
        "| worst: spread, gap, offset, T | before | now | KL there |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype, found in rows.items():
        for what in ("loss", "gradient"):
            ratios = np.array([row[f"{what} now"] / row[f"{what} before"] for row in found])
            worst = found[int(ratios.argmax())]
            names = ("spread", "gap", "offset", "temperature")
            where = ", ".join(f"{worst[name]:g}" for name in names)
            errors = [f"{worst[name]:.1e}" for name in (f"{what} before", f"{what} now", "kl")]
            largest = [max(row[f"{what} {when}"] / row[what] for row in found) for when in WHEN]
            cells = [dtype, what, *(f"{x:.1e}" for x in largest), str(len(found))]
            cells += [f"{np.median(ratios):.2f}"]
            cells += [f"{(ratios > 1.05).sum()}", f"{ratios.max():.2f}: {where}", *errors]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "rounding.md")
    arguments = parser.parse_args()
    np.seterr(all="ignore")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    rows = {str(dtype).removeprefix("torch."): measure(dtype) for dtype in dtypes}
    arguments.out.write_text(table(rows))
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
