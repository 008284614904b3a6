"""What a metric is: a number of predictions that is known for any weights of the examples, so that
one bootstrap serves them all. One class says everything of it: what it is over, how it is called
and shown, its options in a recipe, and how it is computed."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import numpy as np
from pydantic import create_model

from ds_distill.errors import Mistake, UserError
from ds_distill.recipe.section import Section

Over = Literal["classes", "labels", "words", "characters", "answers", "masked tokens", "numbers"]
"""What a metric is over: the kind of the task's predictions."""

P = TypeVar("P", bound=Sized)
"""The predictions that a metric reads, such as `ds_distill.evaluation.ClassPredictions`."""

WIDE = 0.05
"""Half the width from which on the interval of a difference that holds 0 tells nothing. Students
that are compared differ by a few points: a test that cannot see five is no ground to call two of
them level. By accuracy that is a test of fewer than about 300 examples, where two models differ on
a fifth of them."""


METRICS: dict[Over, dict[str, MetricClass]] = {over: {} for over in get_args(Over)}
"""By what they are over and name."""

# Its value stands beside these in records, results and events.
NAMES = (
    r"(?!(answer|confusion|event|examples|model|number|per_class|phase|reliability|role|split|"
    r"step|time|to_baseline|tokens)$)[a-z][a-z0-9_]{0,63}"
)


class MetricSettings(Section):
    """Settings of a metric."""

    name: str = ""
    """Each metric's own sets it."""

    @classmethod
    def siblings(cls) -> tuple[str, str, Mapping[str, type[Section]]]:
        of_all = {name: one.Settings for ones in METRICS.values() for name, one in ones.items()}
        return "metric", cls.model_fields["name"].default, of_all


class Metric(ABC, Generic[P]):
    """A number of predictions. N examples, R sets of weights. The docstring of a metric's class is
    its documentation in a recipe."""

    kind_of_part: ClassVar[str] = "metric"
    name: ClassVar[str]
    """As recipes and results call it. A class without one is a base of others."""
    over: ClassVar[tuple[Over, ...]]
    """The kinds of predictions that it is of."""
    reported: ClassVar[tuple[Over, ...]] = ()
    """Of these, those whose every evaluation reports it, and not only where it is the task's
    metric."""
    title: ClassVar[str]
    """As tables and sentences call it."""
    shown: ClassVar[str] = ".1%"
    """Format of its values. Of a share, with `%`, differences are in points."""
    higher_is_better: ClassVar[bool] = True
    hub_name: ClassVar[str | None] = None
    """Its name among the metrics of the Hugging Face hub, for the model card; None: not there."""
    Settings: ClassVar[type[Any]] = MetricSettings
    """Its section of a recipe. A class that has options defines one, derived from `MetricSettings`,
    and a class with a name gets it with that name and its own documentation."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "name" in vars(cls):
            if not re.fullmatch(NAMES, cls.name) or any(cls.name in METRICS[o] for o in cls.over):
                raise UserError(
                    f"{cls.__module__}.{cls.__name__}: {cls.name!r} is another metric, or another "
                    "value of records. Choose another name."
                )
            named: Any = (Literal[cls.name], cls.name)
            cls.Settings = create_model(
                cls.__name__,
                __base__=cls.Settings,
                __doc__=cls.__doc__,
                __module__=cls.__module__,
                name=named,
            )
        for over in cls.over if hasattr(cls, "name") else ():
            METRICS[over].setdefault(cls.name, cls)

    def __init__(self, settings: Any, labels: Sequence[str]) -> None:
        """
        settings: of the class's `Settings`.
        labels: the task's, in the order of the class ids; none over masked tokens or numbers.
        """
        self.settings = settings
        self.labels = list(labels)

    # ---------------------------------------------------------------------------- its value

    @abstractmethod
    def weighted(self, predictions: P, weights: np.ndarray) -> np.ndarray:
        """weights: float64 [R, N], 0 or more -> float64 [R]. NaN where it is not defined, as an AUC
        without an example of one of the classes."""

    def value(self, predictions: P) -> float:
        """With each example once."""
        return float(self.weighted(predictions, np.ones((1, len(predictions))))[0])

    def lacks(self, predictions: P) -> bool:
        """Whether what it reads was not asked of the model."""
        return False

    def excludes(self, predictions: P) -> bool:
        """Whether a model could predict what it is not defined for, on any examples, and has."""
        return False

    def no_value(self, counts: np.ndarray, examples: int) -> str | None:
        """Why it is not defined on a split, whatever a model predicts: a sentence's part, as `it
        needs ...`; None where it can be.

        counts: int64 [C], how many examples of the split have each label; of numbers, how many
            have each one that is there. examples: how many it has.
        """
        return None

    def label_mistakes(self) -> Iterator[Mistake]:
        """What is wrong with the settings on a task with these labels: at a key of the metric, or
        at none."""
        return iter(())

    # ----------------------------------------------------------------- its values in words

    @classmethod
    def heading(cls) -> str:
        """The title at the start of a line: `Micro F1`, `AUC`."""
        return cls.title[0].upper() + cls.title[1:]

    @classmethod
    def is_share(cls) -> bool:
        """Whether values are shown in per cent, and differences in points."""
        return cls.shown.endswith("%")

    @classmethod
    def shown_as(cls, value: float | None) -> str:
        """A value as tables and sentences show it."""
        return "undefined" if value is None else format(value, cls.shown)

    @classmethod
    def difference_as(cls, difference: float | None) -> str:
        """A difference of two values, with its sign; of shares, in points."""
        if difference is None:
            return "undefined"
        spec = cls.shown.replace("%", "f")
        shown = format(100 * difference if cls.is_share() else difference, f"+{spec}")
        return shown.replace("-", "+") if float(shown) == 0 else shown

    # ------------------------------------------------------------------- which one is better

    @classmethod
    def best(cls, values: Mapping[Any, float]) -> Any:
        """The name of the best of several values, of equals the first."""
        return (max if cls.higher_is_better else min)(values, key=lambda name: values[name])

    @classmethod
    def is_better(cls, value: float | None, other: float) -> bool:
        if value is None:
            return False
        return value > other if cls.higher_is_better else value < other

    @classmethod
    def better(cls, interval: Sequence[float] | None) -> bool:
        """Whether the interval of a difference lies on the side of the better, without 0. None: of
        a difference that is not defined. One of no width decides nothing."""
        if interval is None or no_width(interval):
            return False
        low, high = interval
        return low > 0 if cls.higher_is_better else high < 0

    @classmethod
    def worse(cls, interval: Sequence[float] | None) -> bool:
        if interval is None or no_width(interval):
            return False
        low, high = interval
        return high < 0 if cls.higher_is_better else low > 0

    @classmethod
    def too_wide(cls, interval: Sequence[float] | None, score: float | None) -> bool:
        """Whether the interval of a difference holds 0 and reaches so far that the test is too
        small to tell: neither a difference nor that there is none to speak of. More than `WIDE`
        either way; of a loss, which has no scale, more than this part of the score."""
        if interval is None or cls.better(interval) or cls.worse(interval):
            return False
        scale = 1.0 if cls.is_share() or cls.higher_is_better else abs(score or 0.0)
        low, high = interval
        return (high - low) / 2 > WIDE * scale

    @classmethod
    def wide_as(cls) -> str:
        """The bound of that, for a sentence."""
        if cls.is_share():
            return f"{100 * WIDE:g} points"
        return f"{WIDE:g}" if cls.higher_is_better else f"{WIDE:.0%} of the score"


MetricClass = type[Metric[Any]]


def no_width(interval: Sequence[float]) -> bool:
    """Whether the bounds are the same number, up to rounding: no draw of these examples or seeds is
    another, as of one example or of predictions that are all alike. That is no certainty."""
    low, high = interval
    return high - low < 1e-12


class CountMetric(Metric[P]):
    """A function of sums over the examples: nearly all metrics are."""

    @abstractmethod
    def counts(self, predictions: P) -> np.ndarray:
        """float64 [N, K]: what each example adds to each of the sums."""

    @abstractmethod
    def score(self, sums: np.ndarray) -> np.ndarray:
        """float64 [..., K] -> [...]. NaN where it is not defined."""

    def weighted(self, predictions: P, weights: np.ndarray) -> np.ndarray:
        return self.score(weights @ self.counts(predictions))

    def value(self, predictions: P) -> float:
        return float(self.score(self.counts(predictions).sum(axis=0)))

    def pair_counts(self, first: P, second: P) -> np.ndarray:
        """float64 [N, M]: what each example adds to the sums that `difference` reads."""
        return np.hstack([self.counts(first), self.counts(second)])

    def difference(self, sums: np.ndarray) -> np.ndarray:
        """float64 [..., M] -> [...]: the score of the first predictions less that of the second."""
        first, second = np.split(sums, 2, axis=-1)
        return self.score(first) - self.score(second)


class MeanMetric(CountMetric[P]):
    """A sum, divided by a number that is the same for all models."""

    @abstractmethod
    def counts(self, predictions: P) -> np.ndarray:
        """float64 [N, 2]: the sum, and the number."""

    def score(self, sums: np.ndarray) -> np.ndarray:
        return ratio(sums[..., 0], sums[..., 1], np.nan)

    def pair_counts(self, first: P, second: P) -> np.ndarray:
        """The difference of the sums is enough: fewer kinds of examples to draw from."""
        counts = self.counts(first)
        return np.stack([counts[:, 0] - self.counts(second)[:, 0], counts[:, 1]], axis=1)

    def difference(self, sums: np.ndarray) -> np.ndarray:
        return self.score(sums)


def ratio(above: np.ndarray, below: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    """above / below; `otherwise` where below is 0."""
    filled = np.full(above.shape, otherwise)
    return np.divide(above, below, out=filled, where=below != 0)


def stacked(*columns: np.ndarray) -> np.ndarray:
    """float64 [N, K] of K columns."""
    return np.stack(columns, axis=1).astype(np.float64)


def with_ones(values: np.ndarray) -> np.ndarray:
    """float64 [N, 2]: what a mean sums."""
    return stacked(values, np.ones(len(values)))


# ------------------------------------------------- F1, precision, recall: 0 where not defined


def f1(right: np.ndarray, predicted: np.ndarray, there: np.ndarray) -> np.ndarray:
    return ratio(2 * right, predicted + there)


def precision(right: np.ndarray, predicted: np.ndarray, there: np.ndarray) -> np.ndarray:
    return ratio(right, predicted)


def recall(right: np.ndarray, predicted: np.ndarray, there: np.ndarray) -> np.ndarray:
    return ratio(right, there)


class Together(CountMetric[P]):
    """Of all classes, entities or spans together. The sums: how many are right, predicted, there:
    float64 [N, 3]."""

    of = staticmethod(f1)

    def score(self, sums: np.ndarray) -> np.ndarray:
        return self.of(*np.moveaxis(sums, -1, 0))


class MeanOfClasses(CountMetric[P]):
    """Mean over the classes that are there or predicted; NaN without any. The sums: of each of C
    classes, how many are right, of each how many predicted, of each how many there: float64
    [N, 3C]."""

    of = staticmethod(f1)

    def score(self, sums: np.ndarray) -> np.ndarray:
        right, predicted, there = np.split(sums, 3, axis=-1)
        values = self.of(right, predicted, there)
        return ratio(values.sum(axis=-1), (predicted + there > 0).sum(axis=-1), np.nan)
