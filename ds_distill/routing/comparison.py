"""All policies on one labelled split, before a student is trained: which target is right?

Whatever a policy learns from the split is learnt from other examples than it is judged on
(cross-validation), so that a policy with many parameters has no advantage here that it would
not have on new text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.special import softmax

from ds_distill.data.batches import Units
from ds_distill.data.labels import is_labelled
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import (
    ClassPredictions,
    LabelPredictions,
    TagPredictions,
    word_predictions,
)
from ds_distill.evaluation.scores import build_metric, metric_values
from ds_distill.keys import numbered_keys
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.characters import CharacterF1
from ds_distill.recipe.metrics.classes import Accuracy, MicroF1
from ds_distill.recipe.metrics.metric import Metric, MetricClass, MetricSettings, Over
from ds_distill.recipe.metrics.words import EntityF1
from ds_distill.recipe.policies import (
    BASELINE,
    Routing,
    baseline_of,
    not_fitted,
)
from ds_distill.routing.held_out import at, held_out_targets, routing_of_candidate
from ds_distill.routing.partial_teachers import classes_of
from ds_distill.seen import Target
from ds_distill.types import Signals

ALIKE = 1e-6
"""Of weights that are the same number up to rounding."""


def followed_by_class(
    weights: torch.Tensor, truth: np.ndarray, labels: Sequence[str], teachers: Sequence[str]
) -> dict[str, dict[str, float]]:
    """By class and teacher the mean share of a policy's weight on the examples of the class; empty
    where the policy weighs all examples alike, and without classes that have no example.

    weights: float32 [T, N], or [T, N, C] where each label has its own. truth: int [N] class ids, or
        int [N, C] of 0 and 1.
    """
    shares = (weights / weights.sum(dim=0, keepdim=True).clamp(min=1e-12)).numpy()
    if np.ptp(shares, axis=1).max(initial=0.0) < ALIKE:
        return {}
    found = {}
    for number, label in enumerate(labels):
        here = (truth == number) if truth.ndim == 1 else truth[:, number] == 1
        if here.any():
            own = shares if shares.ndim == 2 else shares[:, :, number]
            means = own[:, here].mean(axis=1).round(4).tolist()
            found[label] = dict(zip(teachers, means, strict=True))
    return found


@dataclass(frozen=True)
class Answer:
    label: str
    """The most probable class."""
    probability: float


@dataclass(frozen=True)
class Disagreement:
    """An example for which teachers predict several classes."""

    row: int
    """Its place among all that were compared."""
    label: str
    teachers: dict[str, Answer]
    target: Answer
    """What the policy made of them."""
    followed: dict[str, float]
    """By teacher, the share of the policy's weight."""


def disagreements(
    logits: Mapping[str, np.ndarray],
    target: Target,
    truth: np.ndarray,
    labels: Sequence[str],
    count: int,
    places: np.ndarray,
) -> list[Disagreement]:
    """`count` of them at most, evenly spaced among all that there are.

    logits: by teacher, float [N, C]. target: the policy's, logits [N, C]. truth: int [N].
    places: int [N], what `row` is of each.
    """
    predicted = np.stack([of.argmax(axis=1) for of in logits.values()])
    [rows] = np.nonzero((predicted != predicted[0]).any(axis=0))
    if len(rows) > count:
        rows = rows[np.linspace(0, len(rows) - 1, count).astype(int)] if count else rows[:0]
    assert target.logits is not None, "compared policies have one"
    routed, weights = target.logits.numpy(), target.weights.numpy()

    def answer(of_row: np.ndarray) -> Answer:
        probabilities = softmax(of_row.astype(np.float64))
        best = int(probabilities.argmax())
        return Answer(labels[best], round(float(probabilities[best]), 4))

    return [
        Disagreement(
            int(places[row]),
            labels[truth[row]],
            {name: answer(of[row]) for name, of in logits.items()},
            answer(routed[row]),
            {
                name: round(float(weights[number, row] / max(weights[:, row].sum(), 1e-12)), 4)
                for number, name in enumerate(logits)
            },
        )
        for row in rows.tolist()
    ]


Predictions = ClassPredictions | LabelPredictions | TagPredictions


def agreement(teachers: Mapping[str, Predictions]) -> dict[str, float]:
    """How often two teachers predict the same, by pair."""
    return {
        f"{one}, {other}": float((teachers[one].predicted == teachers[other].predicted).mean())
        for one, other in combinations(teachers, 2)
    }


def any_of(teachers: Sequence[Predictions]) -> Predictions:
    """Of each example, or of each of its labels or words, what the first teacher that is right
    predicts; the first, if none is."""
    right = np.stack([teacher.predicted == teacher.labels for teacher in teachers])
    logits = np.stack([teacher.logits for teacher in teachers])
    first = right.argmax(axis=0)
    first = first.reshape(*first.shape, *[1] * (logits.ndim - right.ndim))
    chosen = np.take_along_axis(logits, np.broadcast_to(first, logits.shape[1:])[None], axis=0)[0]
    return replace(teachers[0], logits=chosen)


@dataclass(frozen=True)
class Score:
    """How good a target is."""

    score: float
    """In the task's metric."""
    per_class: dict[str, float | None]
    """How often its largest class is the label, or the F1 of each label or entity type; None where
    the split has no example of it."""
    difference: float
    """Of the score to the baseline's."""
    interval: tuple[float, float]
    """95% bootstrap interval of the difference, over the same examples, or over the groups by which
    they are assigned to folds."""
    followed: dict[str, dict[str, float]] = field(default_factory=dict)
    """See `followed_by_class`."""


@dataclass(frozen=True)
class Comparison:
    """Policies, teachers and what they have in common, on one split."""

    metric: str
    """The task's: its name."""
    over: Over
    examples: int
    policies: dict[str, Score]
    teachers: dict[str, Score]
    any_teacher: Score
    """The output of a teacher that is right, of the first where none is: how far choosing among
    teachers can go. None can have a better accuracy; another metric can be better by chance."""
    agreement: dict[str, float]
    """`one, other` -> share of examples on which two teachers predict the same class."""
    choice: str
    """The policy with the best target, unless the interval of its difference to the baseline
    holds 0: then the baseline."""
    baseline: str
    """What the policies are compared with: the average. Where a teacher knows some of the classes
    its target is each class's mean probability by the teachers that know it, and it stands under
    the name of the policy that trains on it by mixing their losses."""
    not_compared: dict[str, str] = field(default_factory=dict)
    """Policies that are not fitted on so many classes, and why."""
    disagreements: list[Disagreement] = field(default_factory=list)
    """What a policy made of examples on which teachers disagree; as many as were asked for."""
    disagreements_of: str = ""
    """Which policy: the choice, or where that is the baseline the first other one that a student is
    to follow."""

    @property
    def routing(self) -> Routing:
        """The choice as a recipe would write it."""
        return routing_of_candidate(self.choice)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    signals: Mapping[str, Signals],
    truth: np.ndarray,
    keys: torch.Tensor,
    labels: Sequence[str],
    *,
    task_metric: MetricSettings | None = None,
    seed: int = 0,
    group_keys: torch.Tensor | None = None,
    words: Units | None = None,
    examples: int = 0,
    followed: Sequence[str] = (),
    advance: Callable[[], None] = lambda: None,
) -> Comparison:
    """
    signals: by teacher, logits [N, C], or [N, K] of one that knows K classes, and, for a gate that
        reads them, the last layer's states [N, H]. Of a partial teacher the policies that allow it
        are compared. truth: int [N] class ids, or int [N, C] of 0 and 1 where an example has any
        number of labels; -1 unlabelled (left out). keys: int64 [N, 2].
    task_metric: where None accuracy; micro F1 of many labels, entity F1 of words, or of words of
        contexts character F1.
    group_keys: int64 [N, 2], by which folds are made; the keys, where None.
    words: where examples are lists of words: of the N windows, of whose R words signals and truth
        are; intervals are over the texts, or the questions.
    examples: how many disagreements of teachers to keep, where each example has one class.
    followed: policies that students are to follow.
    advance: called before each fold's fit; of many labels for each.

    Raises UserError where the metric has no value on the examples.
    """
    over = _over(words, many=truth.ndim > 1)
    task_metric = task_metric or _DEFAULT_METRICS[over]
    metric = build_metric(over, task_metric, labels)
    group_keys = keys if group_keys is None else group_keys
    rows = _Rows.known(truth, keys, group_keys, words, labels)
    signals = at(signals, torch.from_numpy(rows.which))
    targets = rows.held_out(signals, seed, advance)
    routed = {name: rows.predictions(of.logits) for name, of in targets.items()}
    teachers = {name: rows.predictions(of.over_all(len(labels))) for name, of in signals.items()}
    baseline = baseline_of(partial=bool(classes_of(signals)))
    average = metric_values(routed[baseline], {task_metric.name: metric})[task_metric.name]
    assert average is not None, "no metric over classes or labels excludes a prediction"
    score = _Judge(rows, list(signals), metric, routed[baseline], average, seed)
    policies = {name: score(these, targets[name]) for name, these in routed.items()}
    choice = choose(policies, METRICS[over][task_metric.name], baseline)
    shown = _shown(choice, baseline, [name for name in followed if name in policies])
    return Comparison(
        metric=task_metric.name,
        over=over,
        examples=len(rows.groups),
        policies=policies,
        teachers={name: score(these) for name, these in teachers.items()},
        any_teacher=score(any_of([*teachers.values()])),
        agreement=agreement(teachers),
        choice=choice,
        baseline=baseline,
        not_compared={} if truth.ndim > 1 else not_fitted(len(labels)),
        disagreements=rows.disagreements(teachers, targets[shown], examples),
        disagreements_of=shown,
    )


def _shown(choice: str, baseline: str, followed: Sequence[str]) -> str:
    """See `Comparison.disagreements_of`."""
    others = (name for name in followed if name != baseline)
    return choice if choice != baseline else next(others, choice)


@dataclass(frozen=True)
class _Rows:
    """The rows on which teachers are compared: n of the R that are there."""

    truth: np.ndarray
    """Of all R; see `compare`."""
    words: Units | None
    labels: Sequence[str]
    which: np.ndarray
    """bool [R]: whose label is known, of words those that count."""
    keys: torch.Tensor
    """int64 [n, 2]."""
    group_keys: torch.Tensor
    """int64 [n, 2]."""
    groups: np.ndarray
    """int64, of each example that metrics count."""

    @staticmethod
    def known(
        truth: np.ndarray,
        keys: torch.Tensor,
        group_keys: torch.Tensor,
        words: Units | None,
        labels: Sequence[str],
    ) -> _Rows:
        """Arguments as of `compare`."""
        units = Units.plain(keys, truth) if words is None else words
        which = units.counted & is_labelled(truth)
        owner = units.of_rows[torch.from_numpy(which)]
        groups = numbered_keys(group_keys.numpy())[units.is_first & units.labelled]
        return _Rows(truth, words, labels, which, keys[owner], group_keys[owner], groups)

    def held_out(
        self,
        signals: Mapping[str, Signals],
        seed: int,
        advance: Callable[[], None],
    ) -> dict[str, Target]:
        """The policies' targets of n rows; see `held_out_targets`."""
        return held_out_targets(
            signals,
            self.truth[self.which],
            self.keys,
            self.labels,
            seed=seed,
            group_keys=self.group_keys,
            advance=advance,
        )

    def predictions(self, of_rows: torch.Tensor | None) -> Predictions:
        """of_rows: logits [n, C]."""
        assert of_rows is not None, "`held_out_targets` makes them for every policy"
        logits = of_rows.numpy()
        if self.words is None:
            kind = LabelPredictions if self.truth.ndim > 1 else ClassPredictions
            return kind(logits, self.truth[self.which])
        every = np.zeros((len(self.truth), logits.shape[1]), dtype=logits.dtype)
        every[self.which] = logits
        return word_predictions(every, self.words, self.labels)

    def followed(self, target: Target, teachers: Sequence[str]) -> dict[str, dict[str, float]]:
        """See `followed_by_class`."""
        return followed_by_class(target.weights, self.truth[self.which], self.labels, teachers)

    def disagreements(
        self, teachers: Mapping[str, Predictions], target: Target, count: int
    ) -> list[Disagreement]:
        """See `disagreements`; `row` is of all R."""
        if not count or self.words is not None or self.truth.ndim > 1:
            return []
        places, logits = np.flatnonzero(self.which), {n: of.logits for n, of in teachers.items()}
        return disagreements(logits, target, self.truth[places], self.labels, count, places)


@dataclass(frozen=True)
class _Judge:
    """Scores predictions of the rows."""

    rows: _Rows
    teachers: list[str]
    metric: Metric[Any]
    baseline: Predictions
    average: float
    """Their score."""
    seed: int

    def __call__(self, these: Predictions, target: Target | None = None) -> Score:
        """target: of a policy, which follows teachers."""
        value, groups = self.metric.value(these), self.rows.groups
        return Score(
            value,
            these.by_class(these.class_counts(self.rows.labels)),
            value - self.average,
            paired_interval(these, self.baseline, self.metric, groups=groups, seed=self.seed),
            {} if target is None else self.rows.followed(target, self.teachers),
        )


_DEFAULT_METRICS: dict[Over, MetricSettings] = {
    "classes": Accuracy.Settings(),
    "labels": MicroF1.Settings(),
    "words": EntityF1.Settings(),
    "characters": CharacterF1.Settings(),
}


def _over(words: Units | None, *, many: bool) -> Over:
    if words is None:
        return "labels" if many else "classes"
    return "characters" if words.has_answers else "words"


def choose(policies: Mapping[str, Score], metric: MetricClass, baseline: str = BASELINE) -> str:
    """The policy with the best score, of equals the first; the baseline if that is not better than
    it beyond chance."""
    best = metric.best({name: policy.score for name, policy in policies.items()})
    return best if metric.better(policies[best].interval) else baseline
