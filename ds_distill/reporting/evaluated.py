"""One evaluation, as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_distill.parts.entry import MetricEntry
from ds_distill.reporting.tables import Cell, Outcome, Table, worst_and_best
from ds_distill.reporting.verdict import (
    NOUNS,
    PER_CLASS,
    answer_of,
    metrics_of,
    settings_note,
    undefined_note,
)


def evaluation_tables(record: dict[str, Any]) -> Iterator[Table]:
    """Scores of all models, and of each class where there are some.

    record: of an evaluate phase.
    """
    judge, *others = metrics_of(record).values()
    baseline, models = record["baseline"], record["models"]
    always = f"always {answer_of(record)}"
    rows: list[list[str | Cell]] = [
        [
            name,
            judge.shown_as(model[judge.name]),
            difference_cell(judge, model["to_baseline"]),
            *(metric.shown_as(model[metric.name]) for metric in others),
        ]
        for name, model in models.items()
    ]
    rest = [metric.shown_as(baseline[metric.name]) for metric in others]
    rows.append([always, judge.shown_as(baseline[judge.name]), "", *rest])
    count = f"{baseline['examples']:,} examples of {record['split']}"
    heads = ["model", judge.title, "to the baseline", *(metric.title for metric in others)]
    note = settings_note(record)
    yield Table(
        f"{judge.heading} on {count}",
        heads,
        rows,
        [
            *([note] if note else []),
            f"The baseline predicts {baseline['rule']} of {baseline['split']}. In brackets: "
            "95% interval, paired bootstrap; *: beyond chance.",
            *undefined_note(
                scores[metric.name]
                for scores in (baseline, *models.values())
                for metric in (judge, *others)
            ),
        ],
    )
    if record["over"] in PER_CLASS:
        labels, folded = worst_and_best(next(iter(models.values()))["per_class"])
        yield Table(
            f"{PER_CLASS[record['over']]} by {NOUNS[record['over']]}",
            ["", *models],
            [_of_class(label, models) for label in labels],
            folded=[_of_class(label, models) for label in folded],
        )


def _of_class(label: str, models: dict[str, Any]) -> list[str | Cell]:
    """A row: each model on a class."""
    return [label, *(_share(model["per_class"][label]) for model in models.values())]


def difference_cell(entry: MetricEntry, numbers: dict[str, Any]) -> Cell:
    """A difference with its interval, and whether it is beyond chance. numbers: `difference` and
    `interval`, None both where it is not defined."""
    if numbers["interval"] is None:
        return Cell(entry.difference_as(None))
    shown, low, high = map(entry.difference_as, (numbers["difference"], *numbers["interval"]))
    outcome = outcome_of(entry, numbers["interval"])
    return Cell(f"{shown} ({low} to {high})", outcome)


def outcome_of(entry: MetricEntry, interval: list[float] | None) -> Outcome:
    """Whether a difference is beyond chance, by its interval. None: of one that is not defined."""
    return "better" if entry.better(interval) else "worse" if entry.worse(interval) else ""


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"
