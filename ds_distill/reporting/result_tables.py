"""One evaluation, as tables: for the terminal, a page and the model card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.records import EvaluationRecord
from ds_distill.reporting.page import worst_and_best
from ds_distill.reporting.results import (
    NOUNS,
    PER_CLASS,
    answer_of,
    evaluations_of_student,
    interval_as,
    last_evaluations,
    limits_of,
    metrics_of,
    settings_note,
    task_metric_of,
    undefined_note,
)
from ds_distill.tables import Cell, Outcome, Table

POINTS = METRICS["classes"]["accuracy"]
"""Shows shares, and their differences."""

MOST = 10
"""Confusions that a table shows."""


def evaluation_tables(
    record: EvaluationRecord, student: str | None = None, speed: Mapping[str, Any] | None = None
) -> Iterator[Table]:
    """Scores of all models, and of each class where there are some: for the terminal, a page and
    the model card.

    record: of an evaluate phase. student: the shipped one. speed: of results.json, as
        `run.speed.quick_speed` makes it; None of a run that has none.
    """
    yield _scores(record, student, speed)
    if record["over"] in PER_CLASS:
        yield _by_class(record, judged_model(record, student))


def _by_class(record: EvaluationRecord, judged: str) -> Table:
    """Of each class all models' accuracy or F1, behind one model's precision and recall."""
    measure, noun = PER_CLASS[record["over"]], NOUNS[record["over"]]
    columns = {name: model["per_class"] for name, model in record["models"].items()}
    own: dict[str, list[int]] = record["models"][judged].get("class_counts", {})
    more = {
        "examples": {label: f"{there:,}" for label, (_, _, there) in own.items()},
        "precision": {label: share(right, whole) for label, (right, whole, _) in own.items()},
        "recall": {label: share(right, whole) for label, (right, _, whole) in own.items()},
    }
    if noun == "class":  # that is its accuracy there
        del more["recall"]
    things = "examples" if noun == "class" else "predictions"
    note = (
        f"Precision{' and recall are' if 'recall' in more else ' is'} of {judged}: of the {things} "
        f"that it predicts to be of a {noun} the share that are. Few are of each: no interval says "
        "which differences are beyond chance."
    )
    beside: tuple[Any, ...] = (more, note) if own else ()
    return class_table(f"{measure} by {noun}", columns, judged, *beside)


def judged_model(record: EvaluationRecord, student: str | None) -> str:
    """The shipped student where it is evaluated here, else the last model that was judged on all
    examples; where none was, the last."""
    models = record["models"]
    if student is not None and student in models:
        return student
    return sorted(models, key=lambda name: "not_given" not in models[name])[-1]


def _scores(
    record: EvaluationRecord, student: str | None, speed: Mapping[str, Any] | None
) -> Table:
    """All models; a column of it stands here and nowhere else."""
    metric, *others = metrics_of(record).values()
    models, baseline = record["models"], record["baseline"]
    names = {
        name: name + (" (shipped)" if name == student else "") + limits_of(model)
        for name, model in models.items()
    }
    all_and_baseline = [*models.values(), baseline]
    apart = (difference_cell(metric, m["to_baseline"], m[metric.name]) for m in models.values())
    columns: dict[str, list[str | Cell]] = {
        "model": [*names.values(), f"always {answer_of(record)}"],
        "role": [*(model["role"] for model in models.values()), "baseline"],
        _head(metric): [
            Cell(metric.shown_as(value), share=value if metric.is_share() else None)
            for value in (model[metric.name] for model in all_and_baseline)
        ],
        "to the baseline": [*apart, ""],
    }
    for other in others:
        columns[_head(other)] = [other.shown_as(model[other.name]) for model in all_and_baseline]
    own = [model.get("own_tokens", {}) for model in all_and_baseline]
    if any(own):
        columns["own tokens"] = [f"{one['tokens']:,}" if one else "" for one in own]
        for other in (metric, *others):
            if any(other.name in one for one in own):
                columns[f"{other.title} on these"] = [
                    other.shown_as(one[other.name]) if other.name in one else "" for one in own
                ]
    of_speed, about_speed = _speed_columns(record, speed)
    columns |= {head: [*cells, ""] for head, cells in of_speed.items()}
    rows = list(zip(*columns.values(), strict=True))
    notes = [*_notes(record, metric, others, rows), *filter(None, [about_speed])]
    title, shipped = f"{metric.heading()} on {record['split']}", names.get(student or "", "")
    return Table(title, list(columns), rows, notes, shipped=shipped)


def _speed_columns(
    evaluation: EvaluationRecord, measured: Mapping[str, Any] | None
) -> tuple[dict[str, list[str]], str]:
    """Columns of a table, by their heads, with a cell for each model; and what they mean.

    measured: as `evaluation_tables` has it. The times of another task are not shown.
    """
    models = evaluation["models"]
    teachers = [name for name, model in models.items() if model["role"] == "teacher"]
    sizes = {name: model.get("parameters", 0) for name, model in models.items()}
    largest = max((sizes[name] for name in teachers), default=0)

    def size(name: str) -> str:
        if not sizes[name]:
            return "-"
        shown = f"{sizes[name] / 1e6:.1f} M" if sizes[name] >= 1e5 else f"{sizes[name]:,}"
        part = f" ({sizes[name] / largest:.0%})" if largest and name not in teachers else ""
        return shown + part

    columns = {"parameters": [*map(size, models)]}
    note = "Behind parameters their part of the largest teacher's." if largest else ""
    if measured is None or measured["task"] != evaluation["task"]:
        return columns, note
    timed = {name: seconds for name in models if (seconds := measured["seconds"].get(name))}
    columns["a text"] = [
        f"{1e3 * timed[name]:.3g} ms" if name in timed else "not timed" for name in models
    ]
    slowest = max((name for name in teachers if name in timed), key=timed.__getitem__, default=None)
    against = ""
    if slowest:
        columns["speed-up"] = [
            f"{timed[slowest] / timed[name]:.1f}×" if name in timed else "" for name in models
        ]
        against = f" Speed-up against {slowest}, the slowest teacher."
    where = measured["device"]
    if where == "CPU":
        where = f"{measured['threads']} CPU thread{'s' if measured['threads'] > 1 else ''}"
    return columns, (
        f"{note} Time: the median of a few passes over one text of {measured['length']} tokens at "
        f"the end of the run, in fp32 on {where}; ds-distill profile measures longer.{against}"
    )


def _head(metric: MetricClass) -> str:
    return metric.title + ("" if metric.higher_is_better else " ↓")


def _notes(
    record: EvaluationRecord,
    metric: MetricClass,
    others: Sequence[MetricClass],
    rows: Sequence[Sequence[str | Cell]],
) -> Iterator[str]:
    """What was judged, and what the columns mean."""
    baseline, models, metrics = record["baseline"], record["models"], [metric, *others]
    if note := settings_note(record):
        yield note
    if not all(one.higher_is_better for one in metrics):
        yield "↓: less is better."
    yield from _counted(record)
    of_frequencies = "; its perplexity is that of the token frequencies there"
    yield (
        f"The baseline predicts {baseline['rule']} of {baseline['split']}"
        f"{of_frequencies if 'perplexity' in baseline else ''}. In brackets: 95% interval, paired "
        "bootstrap; *: beyond chance."
    )
    if undefined := [one.title for one in metrics if baseline[one.name] is None]:
        yield f"What always predicts one number has no {' and no '.join(undefined)}."
    if any("own_tokens" in model for model in models.values()):
        yield "Own tokens: all masked ones that a model knows, also those that others do not."
    if any(model["role"] == "control" for model in models.values()):
        on = "without teachers" if "tokens" in baseline else "on labels alone"
        yield f"A control is a student trained {on}."
    for name, model in models.items():
        if lacks := model.get("not_given"):
            yield (
                f"The file of {name} says nothing of {lacks:,} of them: it is judged on the "
                "others, and students beside it there."
            )
        if knows := model.get("knows"):
            known, of = ", ".join(knows["labels"]), knows["of"]
            yield f"{name} knows {known}: its score counts examples of all {of} labels."
    yield from undefined_note(one[m.name] for one in (baseline, *models.values()) for m in metrics)
    yield from wide_note(metric, rows)


def _counted(record: EvaluationRecord) -> Iterator[str]:
    """The examples, and what of them was judged."""
    found = record["baseline"]
    examples, lacking = f"{found['examples']:,}", f"{found.get('words_without_token', 0):,}"
    dropped = f"{lacking} of {found.get('words', 0):,} words have no token that all models read"
    if "tokens" in found:
        yield f"{found['tokens']:,} masked tokens of {examples} examples, the same for all."
    elif "windows" in found:
        yield f"{examples} questions, whose contexts were read in {found['windows']:,} windows."
    else:
        yield f"{examples} examples."
    if "words" in found:
        how = "are in no predicted span" if "windows" in found else "count as O, or as wrong"
        yield f"{dropped} (a tokenizer drops them); they {how}."
    if "hidden_words" in found:
        yield (
            f"Nats a word are comparable between vocabularies: of {found['hidden_words']:,} words "
            "that are hidden from all models, each predicted piece by piece."
        )


def class_table(
    title: str,
    columns: Mapping[str, Mapping[str, float | None]],
    judged: str | None,
    more: Mapping[str, Mapping[str, str]] | None = None,
    note: str = "",
) -> Table:
    """Scores by class, a row each: of many those on which one model is worst and best.

    columns: by model, its scores by class. judged: the model, or else the first. more: columns
        before these, as they are shown. note: what they mean.
    """
    of = judged if judged is not None and judged in columns else next(iter(columns))
    more = more or {}
    labels, folded = worst_and_best(columns[of])

    def row(label: str) -> list[str | Cell]:
        values = (scores[label] for scores in columns.values())
        cells = (Cell(share(value), share=value) for value in values)
        return [label, *(shown[label] for shown in more.values()), *cells]

    notes = [f"Those on which {of} is worst and best."] * bool(folded)
    notes += ["“none” where no example has it."] * (None in columns[of].values())
    notes += [note] * bool(note)
    rows, others = [*map(row, labels)], [*map(row, folded)]
    return Table(title, ["", *more, *columns], rows, notes, others, judged or "", narrow=True)


def confusions(models: Mapping[str, Any], judged: str) -> Table | None:
    """The confusions of one model that cost it most examples, the commonest first, and of the same
    examples the share that each other model takes for that class too; None without any.

    models: of an evaluation over classes, by name.
    """
    names, totals = list(models[judged]["per_class"]), Counter[int]()
    counts = {
        name: confusion_counts(model["confusion"])
        for name, model in models.items()
        if name == judged or "not_given" not in model  # that one was asked of fewer examples
    }
    for (at, _), count in counts[judged].items():
        totals[at] += count
    wrong = {pair: count for pair, count in counts[judged].items() if pair[0] != pair[1]}
    rows: list[list[str | Cell]] = []
    for pair in sorted(wrong, key=lambda pair: (-wrong[pair], pair))[:MOST]:
        label, predicted = (names[at] for at in pair)
        whole = totals[pair[0]]
        shares = (of.get(pair, 0) / whole for of in counts.values())
        cells = (Cell(share(one), share=one) for one in shares)
        rows.append([f"{label}: {predicted}", f"{whole:,}", *cells])
    note = (
        f"The commonest mistakes of {judged}, and of the same examples of a class the share that "
        "each other model takes for that class too: what the teachers do as well it may have "
        "learnt from them."
    )
    heads = ["class: predicted", "examples", *counts]
    title = f"What {judged} takes for what"
    return Table(title, heads, rows, [note], shipped=judged, narrow=True) if rows else None


def confusion_counts(confusion: Any) -> dict[tuple[int, int], int]:
    """(class, predicted) -> examples, without those that are 0.

    confusion: as `ds_distill.evaluation.predictions.confusion_counts` makes it.
    """
    if isinstance(confusion, dict):
        cells = zip(confusion["true"], confusion["predicted"], confusion["count"], strict=True)
        return {(label, predicted): count for label, predicted, count in cells}
    return {
        (label, predicted): count
        for label, row in enumerate(confusion)
        for predicted, count in enumerate(row)
        if count
    }


_OF_PAIRS: dict[str, tuple[str, Callable[[float], str]]] = {
    "retention": ("retention", lambda part: share(part)),
    "gap closed": ("gap_closed", lambda part: share(part)),
    "median of classes": ("median_class_difference", POINTS.difference_as),
}
"""Head of a column -> the key of a comparison, and how it is shown."""


def pairs_table(record: EvaluationRecord, student: str | None) -> Table:
    """Each student against each other model, the shipped one first; two students once."""
    metric, models = task_metric_of(record), record["models"]
    pairs: dict[frozenset[str], dict[str, Any]] = {}
    for row in sorted(record["comparisons"], key=lambda row: row["student"] != student):
        pairs.setdefault(frozenset((row["student"], row["other"])), row)
    known = {key for row in pairs.values() for key, value in row.items() if value is not None}
    figures = {head: of for head, of in _OF_PAIRS.items() if of[0] in known}
    rows: list[list[str | Cell]] = []
    for row in pairs.values():
        against = f"{models[row['other']]['role']} {row['other']}"
        apart = difference_cell(metric, row, models[row["student"]][metric.name])
        shown = (
            "" if key not in row else "none" if (value := row[key]) is None else form(value)
            for key, form in figures.values()
        )
        rows.append([row["student"], against, apart, *shown])
    note = (
        "Differences are on the same examples, by paired bootstrap, without the effect of another "
        "seed. Retention: the student’s score in per cent of the teacher’s; gap closed: the part "
        "of the way to it from the untrained start, none where it is not better beyond chance; "
        "median of classes: of the differences by class, label or type, in points."
    )
    heads = ["student", "against", "points" if metric.is_share() else "difference", *figures]
    return Table("", heads, rows, [note, *wide_note(metric, rows)], shipped=student or "")


def difference_cell(metric: MetricClass, numbers: Mapping[str, Any], score: float | None) -> Cell:
    """A difference with its interval, whether it is beyond chance, and whether the test is too
    small to tell.

    numbers: `difference`, None where it is not defined, and its `interval`, None where that is not
        known. score: what the difference is from.
    """
    shown, interval = metric.difference_as(numbers["difference"]), numbers["interval"]
    if interval is None:
        return Cell(shown)
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


def share(part: float | None, whole: float = 1) -> str:
    """In per cent; `none` of nothing."""
    return "none" if part is None or not whole else f"{part / whole:.1%}"


_OUTCOMES: dict[Outcome | None, str] = {
    "better": "better than",
    "worse": "worse than",
    "": "not told apart from",
    None: "not comparable with",
}
"""Of a verdict, in their order."""


def verdict(results: Mapping[str, Any]) -> str:
    """The shipped student's score in the task's metric, beside the baseline and the other models,
    in a sentence; one of each task where it was evaluated on others alone.

    Better and worse mean that the 95% interval of the difference excludes zero, which the table of
    the report has.
    """
    student = results["student"]
    if student is None:
        return "No student was trained."
    as_it_is = evaluations_of_student(results)
    judged = [one for one in last_evaluations(results) if one in as_it_is]
    if not judged:
        return (
            f"The student is `{student}`. No evaluate phase comes after it, so its quality was "
            "not measured."
        )
    if len(judged) == 1:
        return f"Student `{student}`: {_judgement(judged[0], student)}."
    each = (f"on {one['task']}, {_judgement(one, student)}" for one in judged)
    return f"Student `{student}`: {'. '.join(each)}."


def _judgement(record: EvaluationRecord, student: str) -> str:
    """Its score, then what it is compared with, by outcome."""
    metric, models, baseline = task_metric_of(record), record["models"], record["baseline"]
    own, named = models[student], {told: list[str]() for told in _OUTCOMES.values()}

    def add(name: str, model: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        outcome = outcome_of(metric, interval) if (interval := numbers["interval"]) else None
        score = f" ({metric.shown_as(model[metric.name])}){limits_of(model)}"
        named[_OUTCOMES[outcome]].append(name + score)

    if baseline[metric.name] is not None:
        add(f"always predicting {answer_of(record)}", baseline, own["to_baseline"])
    for row in record["comparisons"]:
        if row["student"] == student:
            add(f"{models[row['other']]['role']} `{row['other']}`", models[row["other"]], row)
    score = f"{metric.title} {metric.shown_as(own[metric.name])}{limits_of(own)}"
    found = f"{score} on {own['examples']:,} examples of {record['split']}"
    clauses = "; ".join(f"{told} {', '.join(names)}" for told, names in named.items() if names)
    return ", ".join(filter(None, [found, clauses]))
