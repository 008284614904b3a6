"""The divergences' summands and derivatives, per column, in Triton and in PyTorch.

All are written so that nothing cancels where student and teacher are close: KL, for one, is the
sum of p * (d + expm1(-d)) with d = log p - log q. A one-pass sum of p * d is off by 20% at a KL
of 4e-5 in float32, and can be negative.
"""

# Triton kernels have no Python types.
# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
from torch import Tensor

from ._shared import constant, jit, tl

DIVERGENCES = ("kl", "reverse_kl", "js", "tv", "mse")
KL, REVERSE_KL, JS, TV, MSE = range(5)
_NEAR = 16.0


LN2 = constant(0.6931471805599453)
LOG2E = constant(1.4426950408889634)


@jit
def exp2(x, PTX: tl.constexpr):
    """2 ** x. As PTX one instruction that flushes results below 2 ** -126 to 0; the compiler's own
    keeps them, for four more. float64 and other targets have the compiler's."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@jit
def fms(a, b, c, PTX: tl.constexpr):
    """a * b - c, rounded once. With PTX the launches ask the compiler to fuse both, which makes
    fewer instructions of it than of `tl.fma` (44 and 48.5 a pair, Triton 3.6.0)."""
    if PTX:
        return a * b - c
    else:
        return tl.fma(a, b, -c)


@jit
def relative_entropy(p, q, d, PTX: tl.constexpr):
    """p log(p / q) - p + q >= 0 with d = log2(p / q), without cancellation where d is small."""
    x = d * -LN2
    series = 1 / 120 + x * (1 / 720 + x * (1 / 5040))
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * series))
    far = (q - p) - p * x if PTX else tl.fma(-p, x, q - p)  # as `fms`
    value = tl.where(tl.abs(x) < 0.5, p * (x * x * series), far)
    return tl.where(p == 0, q, value)  # NaN in p stays NaN


@jit
def difference(p, q, d):
    """q - p with d = log2(p / q), exact where the two are close."""
    x = d * -LN2
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where((tl.abs(x) < 0.1) & (p > 0), p * series, q - p)


@jit
def log_cosh(x, PTX: tl.constexpr):
    square = x * x
    series = square * (0.5 - square * (1 / 12 - square * (1 / 45 - square * (17 / 2520))))
    a = tl.abs(x)
    far = a + LN2 * tl.log2(1 + exp2(-2 * LOG2E * a, PTX)) - LN2
    return tl.where(a < 0.25, series, far)


@jit
def elements(
    s, t, top_s, top_t, rest_s, rest_t, c,
    DIVERGENCE: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Per column: the divergence's summand, q, and its derivative by q (for KL: q - p).

    s, t: logits. top_s, top_t: about the largest of their row. c = log2(e) / T makes exponents of 2
        of logits less the top; rest_s, rest_t: log2 of their sums.
    EXACT: q - p of KL without cancellation. Logits of 16 bits are further apart than it loses.
    """
    if DIVERGENCE == 4:  # MSE
        return (s - t) * (s - t), s, 2 * (s - t)
    apart = t - s
    s -= top_s
    t -= top_t
    p = exp2(fms(t, c, rest_t, PTX), PTX)
    q = exp2(fms(s, c, rest_s, PTX), PTX)
    # log2 of p / q: of close logits exactly, of others without what all of a row have in common.
    rest = rest_t - rest_s
    close = fms(apart, c, fms(top_t - top_s, c, -rest, PTX), PTX)
    d = tl.where(tl.abs(apart) < 1, close, fms(t - s, c, rest, PTX))
    if DIVERGENCE == 0:  # KL
        return relative_entropy(p, q, d, PTX), q, difference(p, q, d) if EXACT else q - p
    elif DIVERGENCE == 1:  # reverse KL
        return relative_entropy(q, p, -d, PTX), q, d * -LN2
    elif DIVERGENCE == 2:  # Jensen-Shannon
        half = tl.minimum(tl.maximum(d * (0.5 * LN2), -40.0), 40.0)
        m = 0.5 * (p + q)
        log_q_m = -half - log_cosh(half, PTX)
        log_p_m = log_q_m + 2 * half
        value = relative_entropy(p, m, log_p_m * LOG2E, PTX)
        value += relative_entropy(q, m, log_q_m * LOG2E, PTX)
        return 0.5 * value, q, 0.5 * log_q_m
    else:  # total variation
        change = difference(p, q, d)
        sign = tl.where(change > 0, 0.5, tl.where(change < 0, -0.5, 0.0))
        return sign * change, q, sign.to(s.dtype)


@jit
def online(x, c, largest, total, LANES: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr):
    """One step of online log-sum-exps of x * c, one for each lane of GROUP neighbours: threads
    need not wait for each other. `largest`, of x * c, begins at a finite number, so that a lane
    that is all -inf gives 0, not NaN."""
    x = tl.reshape(x, [LANES, GROUP])
    new = tl.maximum(largest, tl.max(x, 1) * c)
    total = total * exp2(largest - new, PTX)
    return new, total + tl.sum(exp2(fms(x, c, new[:, None], PTX), PTX), 1)


@jit
def lanes_sum(largest, total, c, PTX: tl.constexpr):
    """An x about as large as the largest, and the sum of 2 ** ((x - it) * c) over all lanes of
    `online`: apart, since it and log2 of the sum would be rounded as coarsely as they are large."""
    most = tl.max(largest, 0) / c
    # Above 0 by rounding alone, but by much where all lanes are -inf.
    below = tl.minimum(-fms(most, c, largest, PTX), 1.0)
    return most, tl.sum(total * exp2(below, PTX), 0)


@jit
def log2_sum(largest, total, c, PTX: tl.constexpr):
    """As `lanes_sum`, but log2 of the sum."""
    most, total = lanes_sum(largest, total, c, PTX)
    return most, tl.log2(total)


def reference_softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax and log-sum-exp [..., 1] of the last dimension, from one exp."""
    largest = x.amax(-1, keepdim=True)
    e = (x - largest).exp_()
    total = e.sum(-1, keepdim=True)
    return e.div_(total), total.log().add_(largest)


def reference_log_ratio(s: Tensor, t: Tensor, lse_s: Tensor, lse_t: Tensor) -> Tensor:
    """log p - log q, as in `elements`, but with one choice for the whole chunk where none of its
    logits are far apart."""
    gap = t - s
    if gap.numel():
        low, high = (bound.item() for bound in torch.aminmax(gap))
        # Of such a gap the rounding is below that of the log-sum-exps.
        if low > -_NEAR and high < _NEAR:  # false for NaN
            return gap.sub_(lse_t - lse_s)
    near = gap.abs() < 1
    far = (t - lse_t).sub_(s - lse_s)
    return torch.where(near, gap.sub_(lse_t - lse_s), far)


def reference_relative_entropy(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    x = -d
    value = torch.expm1(x).sub_(x).mul_(p)
    if not d.numel():
        return value
    low, high = (bound.item() for bound in torch.aminmax(d))
    if low > -_NEAR and high < float("inf"):  # false for NaN
        return value
    value = torch.where(x < 1, value, (q - p).addcmul_(p, d))
    return torch.where(p == 0, q, value)


def reference_elements(
    s: Tensor,
    t: Tensor,
    lse_s: Tensor,
    lse_t: Tensor,
    p: Tensor,
    q: Tensor,
    divergence: int,
) -> tuple[Tensor, Tensor]:
    """As `elements`, from both softmaxes: the summand and the derivative."""
    d = reference_log_ratio(s, t, lse_s, lse_t)
    if divergence == KL:
        return reference_relative_entropy(p, q, d), q - p
    if divergence == REVERSE_KL:
        return reference_relative_entropy(q, p, -d), -d
    if divergence == TV:
        return (q - p).abs_().mul_(0.5), torch.sign(q - p).mul_(0.5)
    half = d.clamp_(-80, 80).mul_(0.5)
    square = half * half
    series = square * (0.5 - square * (1 / 12 - square * (1 / 45 - square * (17 / 2520))))
    a = half.abs()
    log_cosh = torch.where(
        a < 0.25, series, a + torch.log1p(torch.exp(-2 * a)) - 0.6931471805599453
    )
    m = (p + q).mul_(0.5)
    log_q_m = -half - log_cosh
    value = reference_relative_entropy(p, m, half - log_cosh)
    value += reference_relative_entropy(q, m, log_q_m)
    return value.mul_(0.5), log_q_m.mul_(0.5)
