"""The metrics, by what they are over, and their settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from ds_distill.parts.entry import MetricEntry, Over
from ds_distill.parts.one_of import OneOf
from ds_distill.parts.section import Count, Section
from ds_distill.parts.tags import are_entities

# -------------------------------------------------------------------------------- settings


class MetricSettings(Section):
    """Settings of a metric."""

    name: str


class Accuracy(MetricSettings):
    """Share of the examples, of the words, or of the masked tokens, that are predicted right."""

    name: Literal["accuracy"] = "accuracy"


class _OfOneClass(MetricSettings):
    positive: str | None = None
    """The label that it is about. Default: of two labels, the last."""


class F1(_OfOneClass):
    """Of one class: harmonic mean of precision and recall."""

    name: Literal["f1"] = "f1"


class Precision(_OfOneClass):
    """Of one class: share of those predicted that are of it."""

    name: Literal["precision"] = "precision"


class Recall(_OfOneClass):
    """Of one class: share of its examples that are predicted."""

    name: Literal["recall"] = "recall"


class AUC(_OfOneClass):
    """Of one class: how often an example of it has a larger probability of it than an example of
    another class (area under the ROC curve)."""

    name: Literal["auc"] = "auc"


class _Micro(MetricSettings):
    leave_out: list[str] = Field(default_factory=list)
    """Labels that do not count, such as the class of examples without a relation. To predict one of
    these is no prediction."""


class MicroF1(_Micro):
    """F1 of the predictions of all classes together."""

    name: Literal["micro_f1"] = "micro_f1"


class MicroPrecision(_Micro):
    """Share of the predictions, of all classes together, that are right."""

    name: Literal["micro_precision"] = "micro_precision"


class MicroRecall(_Micro):
    """Share of the labels, of all classes together, that are predicted."""

    name: Literal["micro_recall"] = "micro_recall"


class MacroF1(MetricSettings):
    """Mean of the classes' F1. A class that is neither there nor predicted is not part of it."""

    name: Literal["macro_f1"] = "macro_f1"


class MacroPrecision(MetricSettings):
    """Mean of the classes' precision, which is 0 of a class that is there and never predicted."""

    name: Literal["macro_precision"] = "macro_precision"


class MacroRecall(MetricSettings):
    """Mean of the classes' recall, which is 0 of a class that is predicted and not there."""

    name: Literal["macro_recall"] = "macro_recall"


class MacroAUC(MetricSettings):
    """Mean of the labels' AUC. A label that all examples have, or none, is not part of it."""

    name: Literal["macro_auc"] = "macro_auc"


class ECE(MetricSettings):
    """Expected calibration error: how far the probability of the predicted class is from the share
    of right predictions, in bins of equal width (Guo et al. 2017)."""

    name: Literal["ece"] = "ece"
    bins: Count = 15
    """So many."""


class _Entities(MetricSettings):
    mode: Literal["default", "strict"] = "default"
    """How tags make entities, as seqeval has it: `default` lets an I- tag without a B- before it
    begin an entity, as conlleval does; `strict` does not."""


class EntityF1(_Entities):
    """F1 of the entities of all types together: right are those whose type and both ends are."""

    name: Literal["entity_f1"] = "entity_f1"


class EntityPrecision(_Entities):
    """Share of the predicted entities that are right."""

    name: Literal["entity_precision"] = "entity_precision"


class EntityRecall(_Entities):
    """Share of the entities that are predicted."""

    name: Literal["entity_recall"] = "entity_recall"


class WordF1(MetricSettings):
    """Mean over the entity types of the F1 of their words, B- and I- alike (how BLURB scores EBM
    PICO). A type that is neither there nor predicted is not part of it."""

    name: Literal["word_f1"] = "word_f1"


class CharacterF1(MetricSettings):
    """F1 of the characters of all contexts together: right are those that are both in a right
    answer and in a predicted span (micro)."""

    name: Literal["character_f1"] = "character_f1"


class CharacterPrecision(MetricSettings):
    """Share of the characters in predicted spans that are in a right answer."""

    name: Literal["character_precision"] = "character_precision"


class CharacterRecall(MetricSettings):
    """Share of the characters in right answers that are in a predicted span."""

    name: Literal["character_recall"] = "character_recall"


class SpanF1(MetricSettings):
    """F1 of the spans of all contexts together: right are those whose first and last character
    are."""

    name: Literal["span_f1"] = "span_f1"


class ExactMatch(MetricSettings):
    """Share of the questions whose answer is one of the right ones, but for case, punctuation,
    articles and white space (SQuAD's exact match)."""

    name: Literal["exact_match"] = "exact_match"


class SquadF1(MetricSettings):
    """Mean over the questions of the F1 of the answer's words, with that right answer which gives
    the most (SQuAD's F1)."""

    name: Literal["squad_f1"] = "squad_f1"


class StrictAccuracy(MetricSettings):
    """Share of the questions whose best answer is one of the right ones, but for case and white
    space (BioASQ, factoid questions)."""

    name: Literal["strict_accuracy"] = "strict_accuracy"


class LenientAccuracy(MetricSettings):
    """Share of the questions of which one of the five best answers is right (BioASQ),
    compared likewise."""

    name: Literal["lenient_accuracy"] = "lenient_accuracy"


class MRR(MetricSettings):
    """Mean reciprocal rank: mean over the questions of 1 / the rank of the first right one among
    the five best answers, 0 without one (BioASQ), compared likewise."""

    name: Literal["mrr"] = "mrr"


class Loss(MetricSettings):
    """Mean cross-entropy of the masked tokens, in nats."""

    name: Literal["loss"] = "loss"


class Perplexity(MetricSettings):
    """The exponential of the mean cross-entropy of the masked tokens."""

    name: Literal["perplexity"] = "perplexity"


class Pearson(MetricSettings):
    """Pearson's correlation of predictions and labels. Where all predictions are the same number,
    it is not defined."""

    name: Literal["pearson"] = "pearson"


class Spearman(MetricSettings):
    """Spearman's correlation: Pearson's of the ranks, where equal numbers share the mean of
    theirs."""

    name: Literal["spearman"] = "spearman"


class MSE(MetricSettings):
    """Mean squared error of the predictions."""

    name: Literal["mse"] = "mse"


# --------------------------------------------------------------------------- label mistakes


def _positive_mistakes(settings: _OfOneClass, labels: Sequence[str]) -> Iterator[str]:
    if settings.positive is not None and settings.positive not in labels:
        yield f".positive: there is no label {settings.positive!r}; the task has {_all(labels)}."
    if settings.positive is None and len(labels) > 2:
        others = ", ".join(
            entry.name
            for entry in METRICS["classes"].values()
            if not issubclass(entry.settings, _OfOneClass)
        )
        yield (
            f": {settings.name} is of one class, and the task has {len(labels)}: {_all(labels)}. "
            f"Set metric: {{name: {settings.name}, positive: LABEL}}, or choose {others}."
        )


def _left_out_mistakes(settings: _Micro, labels: Sequence[str]) -> Iterator[str]:
    for label in settings.leave_out:
        if label not in labels:
            yield f".leave_out: there is no label {label!r}; the task has {_all(labels)}."
    if set(settings.leave_out) >= set(labels):
        yield ".leave_out: leaves out every label, so that nothing counts. Name fewer."


def _tag_mistakes(settings: _Entities, labels: Sequence[str]) -> Iterator[str]:
    if not are_entities(labels):
        yield (
            f": {settings.name} is of entities, whose tags are O, B-TYPE and I-TYPE (IOB2), and "
            f"the task has {_all(labels)}. Choose accuracy or word_f1, or correct the tags."
        )


def _all(labels: Sequence[str]) -> str:
    return ", ".join(labels)


# --------------------------------------------------------------------------------- entries

_MODULE = "ds_distill.evaluation.metrics"

_OF_ONE_CLASS = tuple(
    MetricEntry(
        name=name,
        over="classes",
        settings=settings,
        implementation=f"{_MODULE}:{settings.__name__}",
        title=title,
        hub_name=hub_name,
        label_mistakes=_positive_mistakes,
    )
    for name, settings, title, hub_name in (
        ("f1", F1, "F1", "f1"),
        ("precision", Precision, "precision", "precision"),
        ("recall", Recall, "recall", "recall"),
        ("auc", AUC, "AUC", "roc_auc"),
    )
)


def _over_indicators(over: Over) -> tuple[MetricEntry, ...]:
    """Metrics over what is predicted of each class, or of each label."""
    return tuple(
        MetricEntry(
            name=name,
            over=over,
            settings=settings,
            implementation=f"{_MODULE}:{settings.__name__}",
            title=title,
            hub_name=hub_name,
            reported=name == "macro_f1" or (over == "labels" and name == "micro_f1"),
            label_mistakes=_left_out_mistakes if issubclass(settings, _Micro) else None,
        )
        for name, settings, title, hub_name in (
            ("micro_f1", MicroF1, "micro F1", "f1"),
            ("micro_precision", MicroPrecision, "micro precision", "precision"),
            ("micro_recall", MicroRecall, "micro recall", "recall"),
            ("macro_f1", MacroF1, "macro F1", "f1"),
            ("macro_precision", MacroPrecision, "macro precision", "precision"),
            ("macro_recall", MacroRecall, "macro recall", "recall"),
        )
    )


_CLASSES = (
    MetricEntry(
        name="accuracy",
        over="classes",
        settings=Accuracy,
        implementation=f"{_MODULE}:Accuracy",
        title="accuracy",
        hub_name="accuracy",
        reported=True,
    ),
    *_OF_ONE_CLASS,
    *_over_indicators("classes"),
    MetricEntry(
        name="ece",
        over="classes",
        settings=ECE,
        implementation=f"{_MODULE}:ECE",
        title="ECE",
        higher_is_better=False,
        reported=True,
    ),
)

_LABELS = (
    *_over_indicators("labels"),
    MetricEntry(
        name="macro_auc",
        over="labels",
        settings=MacroAUC,
        implementation=f"{_MODULE}:MacroAUC",
        title="macro AUC",
        hub_name="roc_auc",
    ),
)

_WORDS = (
    *(
        MetricEntry(
            name=name,
            over="words",
            settings=settings,
            implementation=f"ds_distill.evaluation.words:{settings.__name__}",
            title=title,
            hub_name=hub_name,
            reported=name == "entity_f1",
            label_mistakes=_tag_mistakes,
        )
        for name, settings, title, hub_name in (
            ("entity_f1", EntityF1, "entity F1", "f1"),
            ("entity_precision", EntityPrecision, "entity precision", "precision"),
            ("entity_recall", EntityRecall, "entity recall", "recall"),
        )
    ),
    MetricEntry(
        name="word_f1",
        over="words",
        settings=WordF1,
        implementation="ds_distill.evaluation.words:WordF1",
        title="word F1",
        hub_name="f1",
    ),
    MetricEntry(
        name="accuracy",
        over="words",
        settings=Accuracy,
        implementation="ds_distill.evaluation.words:WordAccuracy",
        title="accuracy",
        hub_name="accuracy",
        reported=True,
    ),
)

_CHARACTERS = tuple(
    MetricEntry(
        name=name,
        over="characters",
        settings=settings,
        implementation=f"ds_distill.evaluation.spans:{settings.__name__}",
        title=title,
        hub_name=hub_name,
        reported=True,
    )
    for name, settings, title, hub_name in (
        ("character_f1", CharacterF1, "character F1", "f1"),
        ("character_precision", CharacterPrecision, "character precision", "precision"),
        ("character_recall", CharacterRecall, "character recall", "recall"),
        ("span_f1", SpanF1, "span F1", "f1"),
    )
)

_ANSWERS = tuple(
    MetricEntry(
        name=name,
        over="answers",
        settings=settings,
        implementation=f"ds_distill.evaluation.answers:{settings.__name__}",
        title=title,
        hub_name=hub_name,
        shown=shown,
        reported=True,
    )
    for name, settings, title, hub_name, shown in (
        ("squad_f1", SquadF1, "SQuAD F1", "f1", ".1%"),
        ("exact_match", ExactMatch, "exact match", "exact_match", ".1%"),
        ("strict_accuracy", StrictAccuracy, "strict accuracy", "accuracy", ".1%"),
        ("lenient_accuracy", LenientAccuracy, "lenient accuracy", None, ".1%"),
        ("mrr", MRR, "MRR", None, ".3f"),
    )
)

_MASKED_TOKENS = (
    MetricEntry(
        name="accuracy",
        over="masked tokens",
        settings=Accuracy,
        implementation=f"{_MODULE}:TokenAccuracy",
        title="accuracy",
        hub_name="accuracy",
        reported=True,
    ),
    MetricEntry(
        name="loss",
        over="masked tokens",
        settings=Loss,
        implementation=f"{_MODULE}:TokenLoss",
        title="loss",
        shown=".3f",
        higher_is_better=False,
        reported=True,
    ),
    MetricEntry(
        name="perplexity",
        over="masked tokens",
        settings=Perplexity,
        implementation=f"{_MODULE}:TokenPerplexity",
        title="perplexity",
        shown=".2f",
        higher_is_better=False,
        hub_name="perplexity",
        reported=True,
    ),
)

_NUMBERS = (
    *(
        MetricEntry(
            name=name,
            over="numbers",
            settings=settings,
            implementation=f"{_MODULE}:{settings.__name__}",
            title=title,
            shown=".3f",
            reported=True,
            hub_name=hub_name,
        )
        for name, settings, title, hub_name in (
            ("pearson", Pearson, "Pearson", "pearsonr"),
            ("spearman", Spearman, "Spearman", "spearmanr"),
        )
    ),
    MetricEntry(
        name="mse",
        over="numbers",
        settings=MSE,
        implementation=f"{_MODULE}:MSE",
        title="MSE",
        shown=".4g",
        higher_is_better=False,
        reported=True,
        hub_name="mse",
    ),
)

METRICS: dict[Over, dict[str, MetricEntry]] = {
    "classes": {entry.name: entry for entry in _CLASSES},
    "labels": {entry.name: entry for entry in _LABELS},
    "words": {entry.name: entry for entry in _WORDS},
    "characters": {entry.name: entry for entry in _CHARACTERS},
    "answers": {entry.name: entry for entry in _ANSWERS},
    "masked tokens": {entry.name: entry for entry in _MASKED_TOKENS},
    "numbers": {entry.name: entry for entry in _NUMBERS},
}


def one_metric(over: Over) -> OneOf:
    """Annotates a field that holds the settings of one metric over that."""
    return OneOf(
        "metric", "name", lambda: {name: entry.settings for name, entry in METRICS[over].items()}
    )


def reported_metrics(over: Over, judge: MetricSettings | None = None) -> dict[str, MetricSettings]:
    """Settings of the metrics that an evaluation reports, by name: the task's first, then those
    that every evaluation reports.

    judge: the task's metric, by which its models are compared and chosen.
    """
    found = {} if judge is None else {judge.name: judge}
    for name, entry in METRICS[over].items():
        if entry.reported and name not in found:
            settings = entry.settings()
            assert isinstance(settings, MetricSettings)
            found[name] = settings
    return found
