"""The metrics, by what they are over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_distill.recipe.entry import MetricEntry, Over
from ds_distill.recipe.metric_settings import (
    AUC,
    ECE,
    F1,
    MRR,
    MSE,
    Accuracy,
    CharacterF1,
    CharacterPrecision,
    CharacterRecall,
    EntityF1,
    EntityPrecision,
    EntityRecall,
    ExactMatch,
    LenientAccuracy,
    Loss,
    MacroAUC,
    MacroF1,
    MacroPrecision,
    MacroRecall,
    MetricSettings,
    Micro,
    MicroF1,
    MicroPrecision,
    MicroRecall,
    OfEntities,
    OfOneClass,
    Pearson,
    Perplexity,
    Precision,
    Recall,
    SpanF1,
    Spearman,
    SquadF1,
    StrictAccuracy,
    WordF1,
    WordLoss,
)
from ds_distill.recipe.one_of import OneOf
from ds_distill.recipe.tags import are_entities

# --------------------------------------------------------------------------- label mistakes


def _positive_mistakes(settings: OfOneClass, labels: Sequence[str]) -> Iterator[str]:
    if settings.positive is not None and settings.positive not in labels:
        yield f".positive: there is no label {settings.positive!r}; the task has {_all(labels)}."
    if settings.positive is None and len(labels) > 2:
        others = ", ".join(
            entry.name
            for entry in METRICS["classes"].values()
            if not issubclass(entry.settings, OfOneClass)
        )
        yield (
            f": {settings.name} is of one class, and the task has {len(labels)}: {_all(labels)}. "
            f"Set metric: {{name: {settings.name}, positive: LABEL}}, or choose {others}."
        )


def _left_out_mistakes(settings: Micro, labels: Sequence[str]) -> Iterator[str]:
    for label in settings.leave_out:
        if label not in labels:
            yield f".leave_out: there is no label {label!r}; the task has {_all(labels)}."
    if set(settings.leave_out) >= set(labels):
        yield ".leave_out: leaves out every label, so that nothing counts. Name fewer."


def _tag_mistakes(settings: OfEntities, labels: Sequence[str]) -> Iterator[str]:
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
            label_mistakes=_left_out_mistakes if issubclass(settings, Micro) else None,
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
    MetricEntry(
        name="word_loss",
        over="masked tokens",
        settings=WordLoss,
        implementation=f"{_MODULE}:WordLoss",
        title="nats a word",
        shown=".3f",
        higher_is_better=False,
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


def reported_metrics(
    over: Over, judge: MetricSettings | None = None, labels: Sequence[str] | None = None
) -> dict[str, MetricSettings]:
    """Settings of the metrics that an evaluation reports, by name: the task's first, then those
    that every evaluation reports.

    judge: the task's metric, by which its models are compared and chosen.
    labels: the task's. Metrics that cannot be of them are left out, as those of entities where tags
        are none of entities. None: any.
    """
    found = {} if judge is None else {judge.name: judge}
    for name, entry in METRICS[over].items():
        if entry.reported and name not in found:
            settings = entry.settings()
            assert isinstance(settings, MetricSettings)
            if labels is None or not entry.mistakes_on(settings, labels):
                found[name] = settings
    return found
