"""Metrics of answers to questions, compared as the scripts of SQuAD and of BioASQ compare them."""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence, Sized
from typing import Protocol

import numpy as np

from ds_distill.process.activity import marked
from ds_distill.recipe.metrics.metric import MeanMetric, with_ones

BIOASQ = 5
"""Answers to a factoid question that BioASQ takes."""


class Answered(Sized, Protocol):
    """Predictions of answers to questions."""

    @property
    def ranked(self) -> Sequence[Sequence[str]]:
        """The answers to each question, the best first."""

    @property
    def right(self) -> Sequence[Sequence[str]]:
        """The right ones."""


class MeanOfQuestions(MeanMetric[Answered]):
    """Mean over the questions of a value of the answers to each."""

    over = reported = ("answers",)

    @staticmethod
    @abstractmethod
    def of(answers: Sequence[str], right: Sequence[str]) -> float:
        """answers: those to one question, the best first. right: the right ones."""

    def counts(self, predictions: Answered) -> np.ndarray:
        both = zip(predictions.ranked, predictions.right, strict=True)
        pairs = marked("compares answers", both)
        return with_ones(np.array([self.of(*pair) for pair in pairs], dtype=np.float64))


class SquadF1(MeanOfQuestions):
    """Mean over the questions of the F1 of the answer's words, with that right answer which gives
    the most (SQuAD's F1)."""

    name, title, hub_name = "squad_f1", "SQuAD F1", "f1"

    @staticmethod
    def of(answers: Sequence[str], right: Sequence[str]) -> float:
        return max(word_f1(answers[0] if answers else "", text) for text in right)


class ExactMatch(MeanOfQuestions):
    """Share of the questions whose answer is one of the right ones, but for case, punctuation,
    articles and white space (SQuAD's exact match)."""

    name, title, hub_name = "exact_match", "exact match", "exact_match"

    @staticmethod
    def of(answers: Sequence[str], right: Sequence[str]) -> float:
        best = normalised(answers[0] if answers else "")
        return float(any(best == normalised(text) for text in right))


class StrictAccuracy(MeanOfQuestions):
    """Share of the questions whose best answer is one of the right ones, but for case and white
    space (BioASQ, factoid questions)."""

    name, title, hub_name = "strict_accuracy", "strict accuracy", "accuracy"

    @staticmethod
    def of(answers: Sequence[str], right: Sequence[str]) -> float:
        return float(first_right(answers, right) == 1)


class LenientAccuracy(MeanOfQuestions):
    """Share of the questions of which one of the five best answers is right (BioASQ),
    compared likewise."""

    name, title = "lenient_accuracy", "lenient accuracy"

    @staticmethod
    def of(answers: Sequence[str], right: Sequence[str]) -> float:
        return float(first_right(answers, right) is not None)


class MRR(MeanOfQuestions):
    """Mean reciprocal rank: mean over the questions of 1 / the rank of the first right one among
    the five best answers, 0 without one (BioASQ), compared likewise."""

    name, title = "mrr", "MRR"
    shown = ".3f"

    @staticmethod
    def of(answers: Sequence[str], right: Sequence[str]) -> float:
        rank = first_right(answers, right)
        return 0.0 if rank is None else 1.0 / rank


def normalised(text: str) -> str:
    """Without case, ASCII punctuation, articles and white space at the ends (the script of SQuAD,
    Rajpurkar et al. 2016)."""
    kept = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


_PUNCTUATION = frozenset(string.punctuation)


def word_f1(answer: str, right: str) -> float:
    """F1 of the words that two answers share, by the script of SQuAD: of two answers of which one
    has no word, 1 where both have none."""
    ours, theirs = normalised(answer).split(), normalised(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def first_right(answers: Sequence[str], right: Sequence[str]) -> int | None:
    """The rank, from 1, of the first right one among the five best answers that differ; None
    without one. Case and white space do not count."""
    known = {_plain(text) for text in right}
    different = list(dict.fromkeys(map(_plain, answers)))[:BIOASQ]
    return next((rank for rank, text in enumerate(different, 1) if text in known), None)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
