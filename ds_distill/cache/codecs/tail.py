"""The tail's shape: how its mass is spread over the entries that a row does not store."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ds_distill.cache.codecs.base import Constants, TopK

_LEVELS = 255
_RAREST = 1e-12
_FARTHEST = 16.0
"""Nats from the prior at which distances are clamped, so that -inf cannot dominate the fit."""
_DIRECTIONS = 16
_FIT_ROWS = 1024
"""Rows that directions are fitted to: the fit costs their number squared."""


@dataclass(frozen=True)
class TailShape:
    """The shape of a teacher's tails: a prior, and directions in which rows differ from it.

    Row r's tail is proportional to exp(prior[v] + sum_j coordinate[r, j] directions[v, j]).
    A teacher has one prior (the mean probability of each entry over the rows that do not store
    it) and D directions, the principal components of its rows' distances from the prior. A row
    stores its D coordinates, one byte each. Logits of a masked-LM are a projection from some
    hundreds of dimensions, so a few directions explain most of the distances.
    """

    codes: Tensor
    """uint8 [V]: log prior = -step * code."""
    step: float
    directions: Tensor
    """int8 [V, D]."""
    scales: Tensor
    """float32 [D]: scale of coordinate times direction, both integers."""

    @property
    def log_prior(self) -> Tensor:
        """float32 [V], up to a constant."""
        return self.codes * -self.step

    @property
    def num_directions(self) -> int:
        return self.directions.shape[1]

    @cached_property
    def _constants(self) -> Constants:
        """`log_prior`, `scales`, and `directions` as float32."""
        return Constants(self.log_prior, self.scales, self.directions.float())

    @cached_property
    def _weights(self) -> Constants:
        """The prior's log-probs and probabilities [V], and the squared length of each direction
        [D]: directions are integers, and scales are for integer coordinates."""
        weights = torch.softmax(self.log_prior, 0)
        length = (weights @ self.directions.float().square()).clamp(min=1e-30)
        return Constants(torch.log_softmax(self.log_prior, 0), weights, length)

    @staticmethod
    def even(vocabulary: int) -> TailShape:
        return TailShape(
            torch.zeros(vocabulary, dtype=torch.uint8),
            0.0,
            torch.zeros(vocabulary, 0, dtype=torch.int8),
            torch.zeros(0),
        )

    @staticmethod
    def fit(batches: Iterable[Tensor], threshold: float) -> TailShape:
        """Fit the shape of a teacher's tails to some thousands of its rows.

        batches: float [n, V] logits at the temperature of the cache. threshold: the codec's.
        Raises ValueError when there are no batches.
        """
        mass: Tensor | None = None
        some: list[Tensor] = []
        for logits in batches:
            log_probs = torch.log_softmax(logits.float(), 1).cpu()
            outside = log_probs < math.log(threshold)
            if mass is None:
                mass = torch.zeros(logits.shape[1], dtype=torch.float64)
                rows = torch.zeros_like(mass)
            mass += log_probs.exp().masked_fill_(~outside, 0.0).sum(0, dtype=torch.float64)
            rows += outside.sum(0)
            if (room := _FIT_ROWS - sum(map(len, some))) > 0:
                some.append(log_probs[:room])
        if mass is None:
            raise ValueError("no logits to fit a tail's shape to")
        mean = torch.where(rows > 0, mass / rows.clamp(min=1), threshold)
        below_first = -torch.log(mean.clamp(min=_RAREST))
        below_first -= below_first.min()
        step = float(below_first.max()) / _LEVELS
        codes = torch.round(below_first / step) if step else torch.zeros_like(below_first)
        even = TailShape.even(len(codes))
        prior = TailShape(codes.to(torch.uint8), step, even.directions, even.scales)
        return prior._with_directions(torch.cat(some), threshold)

    def _with_directions(self, log_probs: Tensor, threshold: float) -> TailShape:
        """Principal components of the rows' distances from the prior, entries weighted by it."""
        weights = torch.softmax(self.log_prior, 0).sqrt()
        distances = self._distances(log_probs, threshold) * weights
        distances -= (
            weights * (distances @ weights)[:, None]
        )  # a constant does not change the shape
        strengths, rows = torch.linalg.eigh((distances @ distances.T).double())
        count = min(_DIRECTIONS, int((strengths > 1e-6 * strengths[-1]).sum()))
        strengths = strengths[-count:].flip(0).float() if count else strengths[:0].float()
        rows = rows[:, -count:].flip(1).float() if count else rows[:, :0].float()
        # Of length 1 under the prior's weights, so that a projection is a least-squares fit.
        directions = (distances.T @ rows) / strengths.sqrt() / weights[:, None]
        largest = directions.abs().amax(0).clamp(min=1e-30)
        integers = (directions * (127 / largest)).round().to(torch.int8)
        reach = (rows * strengths.sqrt()).abs().amax(0) if count else strengths
        return TailShape(self.codes, self.step, integers, reach / 127 * (largest / 127))

    def _distances(self, log_probs: Tensor, threshold: float) -> Tensor:
        """Log-probs of the tail minus the prior's, 0 where an entry is stored: [n, V]."""
        log_prior, _, _ = self._weights.on(log_probs.device)
        distances = (log_probs - log_prior).clamp_(-_FARTHEST, _FARTHEST)
        return distances.masked_fill_(log_probs >= math.log(threshold), 0.0)

    def coordinates(self, log_probs: Tensor, threshold: float) -> Tensor:
        """Coordinates of rows along the directions: log-probs float32 [n, V] -> int8 [n, D]."""
        _, scales, directions = self._constants.on(log_probs.device)
        _, weights, length = self._weights.on(log_probs.device)
        weighted = self._distances(log_probs, threshold) * weights
        weighted -= weights * weighted.sum(1, keepdim=True)
        projected = weighted @ directions / length
        return (projected / scales).round_().clamp_(-127, 127).to(torch.int8)

    def spread(self, top: TopK, coordinates: Tensor | None = None) -> Tensor:
        """Full distributions, float32 [n, V]. coordinates: int8 [n, D], if there are directions."""
        size = len(self.codes)
        log_prior, scales, directions = self._constants.on(top.ids.device)
        shape = log_prior.expand(len(top.ids), -1)
        if coordinates is not None and self.num_directions:
            shape = shape + (coordinates * scales) @ directions.T
        # Absent entries are written to one extra column.
        columns = top.ids.masked_fill(top.ids < 0, size)
        log_probs = torch.nn.functional.pad(shape, (0, 1), value=-math.inf)
        log_probs.scatter_(1, columns, -math.inf)
        others = torch.logsumexp(log_probs, 1)
        # Where a row stores all entries, there are no others to scale.
        log_probs += torch.where(others.isfinite(), top.tail_log_prob - others, 0.0)[:, None]
        return log_probs.scatter_(1, columns, top.log_probs)[:, :size]

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "codes": _text(self.codes),
            "scales": self.scales.tolist(),
            "directions": _text(self.directions),
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> TailShape:
        codes, scales = _bytes(values["codes"]), torch.tensor(values["scales"], dtype=torch.float32)
        directions = _bytes(values["directions"]).view(torch.int8).view(len(codes), len(scales))
        return TailShape(codes, values["step"], directions, scales)


def _text(numbers: Tensor) -> str:
    return base64.b64encode(numbers.cpu().contiguous().numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    data = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
