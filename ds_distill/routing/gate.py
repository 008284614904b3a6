"""The learned gate: the teachers' logits and states, corrected by what validation teaches.

It is a softmax regression that starts from the calibrated average and learns what to add:

    target logits = log(mean over t of softmax(z_t / T_t)) + x W + b

x holds each teacher's log-probabilities, its energy log(sum(exp(z_t))) and, where they are
given, the states of its last layer. W is penalised, so with few examples the gate is the
average; the penalty is chosen by cross-validation. (Stacked generalisation, Wolpert 1992; the
average as an offset is our addition.)

Of a teacher that knows some of the classes, all this is over those, and the mean of a class is over
the teachers that know it. W then learns whether the class of an example is one of a teacher's.

T teachers, N examples, C classes, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_distill.process.activity import mark
from ds_distill.routing.calibration import Temperature, log_probabilities
from ds_distill.routing.label_rows import of_rows, times
from ds_distill.routing.partial_teachers import Classes, knowing_average

PENALTIES = (3.0, 1.0, 0.3, 0.1, 0.03)
"""On half the squared norm of W, the loss being a mean over examples; from strong to weak, each
fit starting where the last ended."""

COMPONENTS = 128
"""Principal components of each teacher's states that W sees. More gain nothing and cost time."""

BIAS_PENALTY = 1e-3

FOLDS = 5


@dataclass(frozen=True)
class Gate:
    """A fitted gate: a linear map of the features, components and scales folded in."""

    weight: torch.Tensor
    """float32 [D, C]; of the gates of L labels [L, D, C]."""
    bias: torch.Tensor
    """float32 [C], or [L, C]."""
    reads_states: bool

    def to(self, device: torch.device) -> Gate:
        return Gate(self.weight.to(device), self.bias.to(device), self.reads_states)

    def logits(
        self,
        logits: Mapping[str, torch.Tensor],
        states: Mapping[str, torch.Tensor],
        temperatures: Mapping[str, Temperature],
        classes: Classes,
    ) -> torch.Tensor:
        """The target's: float32 [n, C]. classes: of partial teachers."""
        states = states if self.reads_states else {}
        offset = calibrated_average(logits, temperatures, classes, self.bias.shape[-1])
        if self.bias.ndim == 1:
            return offset + features(logits, states, temperatures) @ self.weight + self.bias
        x = features(logits, {}, temperatures).unflatten(0, (-1, len(self.bias)))
        width = x.shape[-1]
        found = offset + times(x, self.weight[:, :width]) + of_rows(self.bias, len(offset))
        if not states:
            return found
        # The labels of an example share its states, which are not copied for each of them.
        shared = torch.cat([states[name].float() for name in sorted(states)], dim=1)
        return found + times(shared[:, None], self.weight[:, width:])


@contextmanager
def _one_thread() -> Iterator[None]:
    """The matrices are small, and on a busy machine threads that wait for each other make a fit
    tens of times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def fit_gate(
    logits: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor],
    temperatures: Mapping[str, float],
    truth: torch.Tensor,
    folds: torch.Tensor,
    classes: Classes,
    count: int,
) -> Gate:
    """
    logits: float [N, C] by teacher, or [N, K] of one in `classes`; states: float [N, H] by
        teacher, or empty.
    truth: int64 [N]. folds: int64 [N], numbers from 0 to FOLDS - 1; the penalty is chosen by
        the log-likelihood of each fold under the gate of the others.
    classes, count: of partial teachers, and C.
    """
    raw = features(logits, states, temperatures).double()
    mean = raw.mean(dim=0)
    scale = 1.0 / raw.std(dim=0, correction=0).clamp(min=1e-3)
    x = (raw - mean) * scale
    widths = [states[name].shape[1] for name in sorted(states)]
    scores, *hidden = x.split([x.shape[1] - sum(widths), *widths], dim=1)
    components = [torch.eye(scores.shape[1], dtype=torch.float64), *map(_components, hidden)]
    projection = torch.block_diag(*components)  # [D, k]
    x = x @ projection
    offset = calibrated_average(logits, temperatures, classes, count).double()
    penalty = _best_penalty(x, offset, truth, folds)
    weight, bias = _fit(x, offset, truth, penalty, steps=100, slope=1e-5)
    weight = scale[:, None] * (projection @ weight)
    return Gate(weight.float(), (bias - mean @ weight).float(), bool(states))


def features(
    logits: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor],
    temperatures: Mapping[str, Temperature],
) -> torch.Tensor:
    """What the gate reads: float32 [n, D], teachers in the order of their names."""
    names = sorted(logits)
    outputs = [log_probabilities(logits[name].float(), temperatures[name]) for name in names]
    # Real energies are tens at most; an absurd logit must not make the target infinite.
    energies = [
        logits[name].float().logsumexp(dim=1, keepdim=True).clamp(-100.0, 100.0) for name in names
    ]
    return torch.cat(
        [*outputs, *energies, *(states[name].float() for name in sorted(states))], dim=1
    )


def calibrated_average(
    logits: Mapping[str, torch.Tensor],
    temperatures: Mapping[str, Temperature],
    classes: Classes,
    count: int,
    reported: torch.Tensor | None = None,
) -> torch.Tensor:
    """log of the mean over teachers of softmax(z_t / T_t): float32 [n, C].

    classes, count, reported: of partial teachers, C and `Seen.reported`; see `knowing_average`.
    """
    outputs = {
        name: log_probabilities(scores.float(), temperatures[name])
        for name, scores in logits.items()
    }
    return knowing_average(outputs, classes, count, reported)


def _components(state: torch.Tensor) -> torch.Tensor:
    """The map to the leading principal components: [N, H] -> [H, k]."""
    _, vectors = torch.linalg.eigh(state.T @ state)
    return vectors[:, -COMPONENTS:]


def _best_penalty(
    x: torch.Tensor, offset: torch.Tensor, truth: torch.Tensor, folds: torch.Tensor
) -> float:
    """The penalty under which each fold is likeliest, fitted on the others. The weaker ones are
    not tried once one makes it worse: they cost the most time."""
    fits: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = dict.fromkeys(range(FOLDS))
    best, least = PENALTIES[0], torch.inf
    for penalty in PENALTIES:
        loss = 0.0
        for fold, start in fits.items():
            out = folds == fold
            if out.all():
                continue
            weight, bias = _fit(x[~out], offset[~out], truth[~out], penalty, start)
            fits[fold] = weight, bias
            scores = offset[out] + x[out] @ weight + bias
            loss += F.cross_entropy(scores, truth[out], reduction="sum").item()
        if loss >= least:
            break
        best, least = penalty, loss
    return best


def _fit(
    x: torch.Tensor,
    offset: torch.Tensor,
    truth: torch.Tensor,
    penalty: float,
    start: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    steps: int = 20,
    slope: float = 1e-3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The W and b of least mean cross-entropy + penalty / 2 * |W|^2.

    x: float64 [N, k]; offset: float64 [N, C]; truth: int64 [N]; start: W and b to start from.
    It ends after so many steps, or when no slope is larger; the default is enough to tell one
    penalty from another.
    """
    classes = offset.shape[1]
    weight, bias = start or (x.new_zeros(x.shape[1], classes), x.new_zeros(classes))
    # Columns differ much in variance. In units in which the loss curves alike along all of them
    # (Boehning's bound: half the variance, and the penalty), few steps are enough.
    unit = (x.square().mean(dim=0) / 2 + penalty).rsqrt()[:, None]
    x = x * unit.T
    v, bias = (weight / unit).requires_grad_(), bias.clone().requires_grad_()
    fit = torch.optim.LBFGS(
        [v, bias], max_iter=steps, tolerance_grad=slope, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        mark("fits a gate")
        loss = F.cross_entropy(offset + x @ v + bias, truth)
        # A class without examples would push its bias to minus infinity.
        size = penalty * (unit * v).square().sum() + BIAS_PENALTY * bias.square().sum()
        loss = loss + size / 2
        v.grad, bias.grad = torch.autograd.grad(loss, (v, bias))
        return loss.item()

    with torch.enable_grad():
        fit.step(closure)
    return (unit * v).detach(), bias.detach()
