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

from ._shared import jit, tl

KL, REVERSE_KL, JS, TV, MSE = range(5)
_NEAR = 16.0


@jit
def relative_entropy(p, q, d):
    """p log(p / q) - p + q >= 0 with d = log(p / q), without cancellation where d is small."""
    x = -d
    series = 1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))
    middle = tl.exp(tl.minimum(x, 1.0)) - 1 - x
    value = tl.where(tl.abs(x) < 0.1, p * (0.5 * x * x * series), p * middle)
    value = tl.where(x < 1, value, p * d - p + q)
    return tl.where(p == 0, q, value)  # NaN in p stays NaN


@jit
def log_cosh(x):
    square = x * x
    series = square * (0.5 - square * (1 / 12 - square * (1 / 45 - square * (17 / 2520))))
    a = tl.abs(x)
    return tl.where(a < 0.25, series, a + tl.log(1 + tl.exp(-2 * a)) - 0.6931471805599453)


@jit
def difference(p, q, d):
    """q - p, exact where the two are close."""
    x = -d
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return tl.where((tl.abs(x) < 0.1) & (p > 0), p * series, q - p)


@jit
def log_ratio(s, t, lse_s, lse_t):
    """log p - log q. Close logits are subtracted first, exactly; of far ones the difference would
    be rounded more than log p and log q are."""
    gap = t - s
    return tl.where(tl.abs(gap) < 1, gap - (lse_t - lse_s), (t - lse_t) - (s - lse_s))


@jit
def elements(s, t, lse_s, lse_t, DIVERGENCE: tl.constexpr):
    """Per column: the divergence's summand, q, and its derivative by q (for KL: q - p)."""
    if DIVERGENCE == 4:  # MSE
        return (s - t) * (s - t), s, 2 * (s - t)
    p = tl.exp(t - lse_t)
    q = tl.exp(s - lse_s)
    d = log_ratio(s, t, lse_s, lse_t)
    if DIVERGENCE == 0:  # KL
        return relative_entropy(p, q, d), q, difference(p, q, d)
    elif DIVERGENCE == 1:  # reverse KL
        return relative_entropy(q, p, -d), q, -d
    elif DIVERGENCE == 2:  # Jensen-Shannon
        d = tl.minimum(tl.maximum(d, -80.0), 80.0)
        m = 0.5 * (p + q)
        log_p_m = 0.5 * d - log_cosh(0.5 * d)
        log_q_m = -0.5 * d - log_cosh(0.5 * d)
        value = 0.5 * (relative_entropy(p, m, log_p_m) + relative_entropy(q, m, log_q_m))
        return value, q, 0.5 * log_q_m
    else:  # total variation
        change = difference(p, q, d)
        sign = tl.where(change > 0, 0.5, tl.where(change < 0, -0.5, 0.0))
        return sign * change, q, sign.to(s.dtype)


@jit
def online(x, largest, total):
    """One step of an online log-sum-exp; a tile that is all -inf must not give NaN."""
    new = tl.maximum(largest, tl.max(x, 0))
    safe = tl.where(new == -float("inf"), 0.0, new)
    return new, total * tl.exp(largest - safe) + tl.exp(x - safe)


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
