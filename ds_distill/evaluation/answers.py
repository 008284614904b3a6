"""Answers to questions.

Shapes: N windows of Q questions, C classes: no answer, and the tokens of the longest context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from ds_distill.data.windows import NO_ANSWER
from ds_distill.evaluation.predictions import Predictions
from ds_distill.process.activity import marked
from ds_distill.types import LACKING

if TYPE_CHECKING:
    from ds_distill.data.batches import Units

BEST = 20
"""Spans of a window that are kept, and answers to a question."""


@dataclass(frozen=True)
class Answer:
    """A span of a context."""

    text: str
    start: int
    """Its first character."""
    score: float
    """Sum of the logits of its first token as a start and of its last as an end."""


@dataclass(frozen=True)
class Answers:
    """What a model answers to Q questions."""

    ranked: list[list[Answer]]
    """Of each question up to `BEST` different spans, the best first; none where its context has no
    token."""
    finite: np.ndarray
    """bool [N]: whether the model's outputs for each window were."""


def best_spans(logits: torch.Tensor, most_tokens: int) -> torch.Tensor:
    """The best spans of tokens of each window: float32 [B, BEST, 3]: class of the first token, of
    the last, and the sum of their logits, LACKING where a window has fewer spans.

    logits: float32 [2B, C], start and end by turns, LACKING where a window has fewer classes.
    most_tokens: that a span may have.
    """
    starts, ends = logits[0::2].clone(), logits[1::2]
    starts[:, NO_ANSWER] = LACKING
    length = min(most_tokens, ends.shape[1])
    padded = torch.nn.functional.pad(ends, (0, length - 1), value=LACKING)
    sums = starts[:, :, None] + padded.unfold(1, length, 1)  # [B, C, length]
    flat = sums.flatten(1)
    scores, found = flat.topk(min(BEST, flat.shape[1]), dim=1)
    first, more = found // length, found % length
    kept = torch.stack([first.float(), (first + more).float(), scores.clamp(min=LACKING)], dim=2)
    missing = kept.new_tensor([0.0, 0.0, LACKING]).expand(len(kept), BEST - kept.shape[1], 3)
    return torch.cat([kept, missing], dim=1)


def ranked_answers(spans: np.ndarray, units: Units) -> list[list[Answer]]:
    """The answers to each question, in the order of its first window.

    spans: float [N, BEST, 3], see `best_spans`. units: the N windows. Those that overlap have spans
    in common: each is an answer once, with its best score.
    """
    found: dict[int, dict[tuple[int, int], Answer]] = {int(n): {} for n in units.number}
    for number, row in enumerate(marked("ranks answers", units.stored())):
        of_question = found[row["number"]]
        for start, end, score in spans[number].tolist():
            if score <= LACKING / 2 or not np.isfinite(score):
                continue
            begin, stop = row["begins"][int(start) - 1], row["ends"][int(end) - 1]
            span = row["first"] + begin, row["first"] + stop
            if stop > begin and (span not in of_question or score > of_question[span].score):
                of_question[span] = Answer(row["text_b"][begin:stop], span[0], score)
    return [
        sorted(of_one.values(), key=lambda answer: -answer.score)[:BEST]
        for of_one in found.values()
    ]


@dataclass(frozen=True)
class AnswerPredictions(Predictions):
    """Of Q questions with right answers."""

    ranked: Sequence[Sequence[str]]
    """The texts of the answers to each, the best first."""
    right: Sequence[Sequence[str]]
    """The right ones."""
    windows: int
    """In which they were read."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Texts as JSON: uint8."""
        content = json.dumps([self.ranked, self.right, self.windows])
        return {"answers": np.frombuffer(content.encode(), dtype=np.uint8)}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], labels: Sequence[str]) -> Self:
        return cls(*json.loads(arrays["answers"].tobytes()))

    def numbers(self) -> dict[str, int]:
        return {"examples": len(self), "windows": self.windows}

    def __len__(self) -> int:
        return len(self.right)
