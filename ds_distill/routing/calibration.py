"""What a validation split tells of each teacher alone: its temperature.

N examples, C classes. Everything is float64 on the CPU: it is computed once per run.
"""

from __future__ import annotations

import torch

from ds_distill.process.activity import marked

HOTTEST = 20.0
"""Temperatures lie in [1 / HOTTEST, HOTTEST]: a teacher that is always right would get 0, one
that knows nothing would get infinity."""

FLOOR = 30.0
"""A log-probability is taken to be -FLOOR at least: a class that a teacher rules out (logit
-inf) must not decide alone."""


Temperature = float | torch.Tensor
"""Of a teacher: one for all rows, or float32 [n, 1], of each row its own."""


def log_probabilities(logits: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    """log softmax(logits / temperature), at least -FLOOR: [n, C]."""
    return torch.log_softmax(logits / temperature, dim=-1).clamp(min=-FLOOR)


def fit_temperature(logits: torch.Tensor, truth: torch.Tensor) -> float:
    """The T with the least negative log-likelihood of softmax(logits / T) (Guo et al. 2017).

    logits: float [N, C]; truth: int64 [N]. Of no examples it is 1.
    """
    if not len(truth):
        return 1.0
    # The likelihood is concave in 1 / T, so its slope has one root. Far below the largest
    # logit a class has no share in the slope, and -inf would make it NaN.
    scores = logits.double()
    scores = (scores - scores.amax(dim=1, keepdim=True)).clamp(min=-1e4)
    own = scores.gather(1, truth[:, None])[:, 0]
    cold, hot = 1.0 / HOTTEST, HOTTEST
    for _ in marked("fits a temperature", range(60)):
        middle = (cold * hot) ** 0.5
        expected = (torch.softmax(scores / middle, dim=1) * scores).sum(dim=1)
        if (own - expected).mean() > 0:  # sharper is likelier still
            hot = middle
        else:
            cold = middle
    return middle
