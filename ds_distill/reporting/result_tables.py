"""One evaluation, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.intervals import interval_as
from ds_distill.reporting.page import worst_and_best
from ds_distill.reporting.results import (
    NOUNS,
    PER_CLASS,
    answer_of,
    limits_of,
    metrics_of,
    settings_note,
    undefined_note,
)
from ds_distill.tables import Cell, Outcome, Table


def evaluation_tables(record: dict[str, Any]) -> Iterator[Table]:
    """Scores of all models, and of each class where there are some.

    record: of an evaluate phase.
    """
    task_metric, *others = metrics_of(record).values()
    baseline, models = record["baseline"], record["models"]
    always = f"always {answer_of(record)}"
    rows: list[list[str | Cell]] = [
        [
            name + limits_of(model),
            task_metric.shown_as(model[task_metric.name]),
            difference_cell(task_metric, model["to_baseline"], model[task_metric.name]),
            *(metric.shown_as(model[metric.name]) for metric in others),
        ]
        for name, model in models.items()
    ]
    rest = [metric.shown_as(baseline[metric.name]) for metric in others]
    rows.append([always, task_metric.shown_as(baseline[task_metric.name]), "", *rest])
    count = f"{baseline['examples']:,} examples of {record['split']}"
    heads = ["model", task_metric.title, "to the baseline", *(metric.title for metric in others)]
    note = settings_note(record)
    yield Table(
        f"{task_metric.heading()} on {count}",
        heads,
        rows,
        [
            *([note] if note else []),
            f"The baseline predicts {baseline['rule']} of {baseline['split']}. In brackets: "
            "95% interval, paired bootstrap; *: beyond chance.",
            *undefined_note(
                scores[metric.name]
                for scores in (baseline, *models.values())
                for metric in (task_metric, *others)
            ),
            *wide_note(task_metric, rows),
        ],
    )
    if any("own_tokens" in model for model in models.values()):
        yield _of_own_tokens(record)
    if record["over"] in PER_CLASS:
        labels, folded = worst_and_best(next(iter(models.values()))["per_class"])
        yield Table(
            f"{PER_CLASS[record['over']]} by {NOUNS[record['over']]}",
            ["", *models],
            [_of_class(label, models) for label in labels],
            folded=[_of_class(label, models) for label in folded],
        )


def _of_own_tokens(record: dict[str, Any]) -> Table:
    """Models that know tokens that others do not, on all that they know."""
    models = {
        name: model["own_tokens"]
        for name, model in record["models"].items()
        if "own_tokens" in model
    }
    held = {key for own in models.values() for key in own}
    metrics = {name: metric for name, metric in metrics_of(record).items() if name in held}
    return Table(
        "On all masked tokens, also those that not all models know",
        ["model", "tokens", *(metric.title for metric in metrics.values())],
        [
            [
                name,
                f"{own['tokens']:,}",
                *(metric.shown_as(own[key]) for key, metric in metrics.items()),
            ]
            for name, own in models.items()
        ],
    )


def _of_class(label: str, models: dict[str, Any]) -> list[str | Cell]:
    """A row: each model on a class."""
    return [label, *(_share(model["per_class"][label]) for model in models.values())]


def difference_cell(metric: MetricClass, numbers: dict[str, Any], score: float | None) -> Cell:
    """A difference with its interval, whether it is beyond chance, and whether the test is too
    small to tell.

    numbers: `difference` and `interval`, None both where it is not defined. score: what the
        difference is from.
    """
    if numbers["interval"] is None:
        return Cell(metric.difference_as(None))
    shown, interval = metric.difference_as(numbers["difference"]), numbers["interval"]
    wide = "?" if metric.too_wide(interval, score) else ""
    text = f"{shown} ({interval_as(metric.difference_as, interval)}){wide}"
    return Cell(text, outcome_of(metric, interval))


def wide_note(metric: MetricClass, rows: Sequence[Sequence[str | Cell]]) -> list[str]:
    """A sentence where one of the cells says that the test is too small."""
    cells = (cell for row in rows for cell in row)
    if not any(isinstance(cell, Cell) and cell.text.endswith("?") for cell in cells):
        return []
    return [
        "?: within chance, but the test is too small to tell: the interval reaches more than "
        f"{metric.wide_as()} either way."
    ]


def outcome_of(metric: MetricClass, interval: Sequence[float] | None) -> Outcome:
    """Whether a difference is beyond chance, by its interval. None: of one that is not defined."""
    return "better" if metric.better(interval) else "worse" if metric.worse(interval) else ""


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"
