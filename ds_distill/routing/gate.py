"""The learned gate: what the teachers say and feel, corrected by what validation teaches.

It is a softmax regression that starts from the calibrated average and learns what to add:

    target logits = log(mean over t of softmax(z_t / T_t)) + x W + b

x holds each teacher's log-probabilities, its energy log(sum(exp(z_t))) and, where they are
given, the states of its last layer. W is penalised, so with few examples the gate is the
average; the penalty is chosen by cross-validation. (Stacked generalisation, Wolpert 1992; the
average as an offset is our addition.)

T teachers, N examples, C classes, H hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_distill.routing.calibration import log_probabilities

PENALTIES = (10.0, 1.0, 0.1, 0.03, 0.01)
"""On half the squared norm of W, the loss being a mean over examples. From strong to weak, so
that each fit starts where the last ended."""

COMPONENTS = 32
"""Principal components of each teacher's states that W sees: the directions in which they
differ most. Hundreds of raw dimensions would make a fit take seconds instead of milliseconds."""

BIAS_PENALTY = 1e-3

FOLDS = 5


@dataclass(frozen=True)
class Gate:
    """A fitted gate: a linear map of the features, components and scales folded in."""

    weight: torch.Tensor
    """float32 [D, C]."""
    bias: torch.Tensor
    """float32 [C]."""
    reads_states: bool

    def logits(
        self,
        logits: Mapping[str, torch.Tensor],
        states: Mapping[str, torch.Tensor],
        temperatures: Mapping[str, float],
    ) -> torch.Tensor:
        """The target's: float32 [n, C]."""
        x = features(logits, states if self.reads_states else {}, temperatures)
        return calibrated_average(logits, temperatures) + x @ self.weight + self.bias


def fit_gate(
    logits: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor],
    temperatures: Mapping[str, float],
    truth: torch.Tensor,
    folds: torch.Tensor,
) -> Gate:
    """
    logits: float [N, C] by teacher; states: float [N, H] by teacher, or empty.
    truth: int64 [N]. folds: int64 [N], numbers from 0 to FOLDS - 1; the penalty is chosen by
        the log-likelihood of each fold under the gate of the others.
    """
    raw = features(logits, states, temperatures).double()
    mean = raw.mean(dim=0)
    said = raw.shape[1] - sum(state.shape[1] for state in states.values())
    blocks = [torch.diag(1.0 / raw[:, :said].std(dim=0, correction=0).clamp(min=1e-3))]
    for name in sorted(states):
        start = sum(len(block) for block in blocks)
        block = (
            raw[:, start : start + states[name].shape[1]] - mean[start:][: states[name].shape[1]]
        )
        blocks.append(_components(block))
    projection = torch.block_diag(*blocks)  # [D, k]
    x = (raw - mean) @ projection
    offset = calibrated_average(logits, temperatures).double()
    losses = torch.zeros(len(PENALTIES), dtype=torch.float64)
    for fold in range(FOLDS):
        out = folds == fold
        if out.all():
            continue
        for number, (weight, bias) in enumerate(_fits(x[~out], offset[~out], truth[~out])):
            scores = offset[out] + x[out] @ weight + bias
            losses[number] += F.cross_entropy(scores, truth[out], reduction="sum")
    best = int(losses.argmin())
    weight, bias = _fits(x, offset, truth, PENALTIES[: best + 1])[-1]
    weight = projection @ weight
    return Gate(weight.float(), (bias - mean @ weight).float(), bool(states))


def features(
    logits: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor],
    temperatures: Mapping[str, float],
) -> torch.Tensor:
    """What the gate reads: float32 [n, D], teachers in the order of their names."""
    names = sorted(logits)
    said = [log_probabilities(logits[name].float(), temperatures[name]) for name in names]
    # Real energies are tens at most; an absurd logit must not make the target infinite.
    energies = [
        logits[name].float().logsumexp(dim=1, keepdim=True).clamp(-100.0, 100.0) for name in names
    ]
    return torch.cat([*said, *energies, *(states[name].float() for name in sorted(states))], dim=1)


def calibrated_average(
    logits: Mapping[str, torch.Tensor], temperatures: Mapping[str, float]
) -> torch.Tensor:
    """log of the mean over teachers of softmax(z_t / T_t): float32 [n, C]."""
    said = [log_probabilities(logits[name].float(), temperatures[name]) for name in sorted(logits)]
    return torch.log_softmax(torch.stack(said).logsumexp(dim=0), dim=1)


def _components(centred: torch.Tensor) -> torch.Tensor:
    """The map to the leading principal components, the first with variance 1: [N, H] -> [H, k]."""
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    kept = vectors[:, -COMPONENTS:]
    # The sign of an eigenvector is arbitrary; W would only take the other one.
    return kept / values[-1].clamp(min=1e-6).sqrt()


def _fits(
    x: torch.Tensor,
    offset: torch.Tensor,
    truth: torch.Tensor,
    penalties: Sequence[float] = PENALTIES,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each penalty the W and b of least mean cross-entropy + penalty / 2 * |W|^2.

    x: float64 [N, k]; offset: float64 [N, C]; truth: int64 [N].
    """
    weight = torch.zeros(x.shape[1], offset.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(offset.shape[1], dtype=torch.float64, requires_grad=True)
    fits = []
    for penalty in penalties:
        optimizer = torch.optim.LBFGS(
            [weight, bias],
            max_iter=50,
            tolerance_grad=1e-5,
            tolerance_change=1e-7,
            line_search_fn="strong_wolfe",
        )

        def closure(penalty: float = penalty) -> float:
            loss = F.cross_entropy(offset + x @ weight + bias, truth)
            # A class without examples would push its bias to minus infinity.
            loss = (
                loss + penalty / 2 * weight.square().sum() + BIAS_PENALTY / 2 * bias.square().sum()
            )
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            return loss.item()

        with torch.enable_grad():
            optimizer.step(closure)
        fits.append((weight.detach().clone(), bias.detach().clone()))
    return fits
