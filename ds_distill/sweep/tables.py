"""What a sweep and a suite found, for a reader: tables, a figure, report.html and results.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ds_distill.files import write_json, write_text
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.figures import of_scores
from ds_distill.reporting.page import Block, Figure, Figures, page, tag
from ds_distill.reporting.result_tables import difference_cell, wide_note
from ds_distill.reporting.results import interval_as, undefined_note
from ds_distill.sweep.found import (
    Found,
    lacking,
    metric_class,
    students_of,
    suite_results,
    summary,
    undefined_settings,
)
from ds_distill.sweep.suite import Suite
from ds_distill.sweep.sweep import Sweep
from ds_distill.tables import Cell, Row, Table


def write_sweep(sweep: Sweep) -> str:
    """Write results.json, report.html and figures/scores.svg of the runs that have ended. Returns
    the table as text."""
    found = summary(sweep.ended(), sweep.draws())
    name = sweep.runs[0].recipe.name
    figures = [scores_figure(found)] if found["settings"] else []
    for figure in figures:
        write_text(sweep.path / "figures" / "scores.svg", figure.file())
    sentences = [f"{len(sweep.runs)} runs of {name}."]
    return _write(sweep, found, f"{name}: settings", sentences, [sweep_table(found)], figures)


def write_suite(suite: Suite, reference: str, sweep: Sweep) -> str:
    """Likewise of a suite, without a figure. reference: the checkpoint that others are compared
    with."""
    runs = [run.variant for run in sweep.runs]
    found = suite_results(runs, sweep.ended(), reference, suite.weights(), sweep.draws())
    found |= {"suite": suite.name, "lacks": suite.lacks}
    sentences = [suite.description, suite.lacks and f"It lacks: {suite.lacks}"]
    return _write(sweep, found, f"Suite {suite.name}", sentences, [*suite_tables(found)], [])


def _write(
    sweep: Sweep,
    found: Found,
    title: str,
    sentences: Sequence[str],
    tables: Sequence[Table],
    figures: Sequence[Figure],
) -> str:
    write_json(sweep.path / "results.json", {**found, "missing": sweep.missing})
    lines = [sentence for sentence in sentences if sentence]
    if sweep.missing:
        lines.append(f"Not finished, and not counted: {', '.join(sweep.missing)}.")
    drawn: list[Block] = [Figures(figures)] if figures else []
    write_text(sweep.path / "report.html", page(title, lines, [*tables, *drawn]).html())
    return "\n\n".join(map(Table.text, tables))


def shown(numbers: Found, form: Callable[[float | None], str]) -> str:
    """A mean, with its interval where there is one; `undefined` where a value is."""
    if not numbers["values"]:
        return "-"
    text = form(numbers["mean"])
    if numbers["interval"] is not None:
        text += f" ({interval_as(form, numbers['interval'])})"
    return text


def _apart(metric: MetricClass, numbers: Found, score: float | None) -> str | Cell:
    """A difference. score: what it is from."""
    if not numbers["values"]:
        return "-"
    return difference_cell(metric, {**numbers, "difference": numbers["mean"]}, score)


# --------------------------------------------------------------------------------- a sweep


def sweep_table(found: Found) -> Table:
    """The summary for a reader."""
    if not found["settings"]:
        return Table("", ["setting"], [], ["No run has a student that was evaluated."])
    metric = metric_class(found)
    several = len(found["settings"]) > 1
    heads = ["setting", "student", "runs", f"{metric.title} on {found['split']}", "by seed"]
    heads += ["choosing", *(["to the first"] if several else [])]
    rows: list[Row] = []
    for row in found["settings"]:
        choosing = shown({**row["choosing"], "interval": None}, metric.shown_as)
        for student, numbers in students_of(row):
            line: list[str | Cell] = [
                _name(row),
                student,
                str(len(row["seeds"])),
                shown(numbers["score"], metric.shown_as),
                " ".join(map(metric.shown_as, numbers["score"]["values"])),
                "" if numbers is not row else choosing if row["chooses"] else "-",
            ]
            if several:
                apart, mean = numbers.get("to_first"), numbers["score"]["mean"]
                line.append("" if apart is None else _apart(metric, apart, mean))
            rows.append(line)
    return Table("", heads, rows, [*_notes(found, metric), *wide_note(metric, rows)])


def _name(row: Found) -> str:
    return ", ".join(row["setting"]) or "the recipe's"


def _notes(found: Found, metric: MetricClass) -> Iterator[str]:
    rows = found["settings"]
    others: dict[str, list[float]] = {}
    for row in rows:
        for name, numbers in row["models"].items():
            if numbers["role"] != "student" and numbers["mean"] is not None:
                others.setdefault(name, []).append(numbers["mean"])
    for name, means in others.items():
        ends = sorted({metric.shown_as(min(means)), metric.shown_as(max(means))})
        yield f"{name}: {' to '.join(ends)}"
    if majority := _majority(rows):
        yield f"always {found['rule']}: {metric.shown_as(majority[0])}"
    if len(rows) > 1:
        yield from _choice(found, metric)
    scores = [numbers["score"] for row in rows for _, numbers in students_of(row)]
    judged = scores + [row["choosing"] for row in rows if row["chooses"]]
    yield from undefined_note([score for numbers in judged for score in numbers["values"]])
    yield from _learnt_notes([(", ".join(row["setting"]) or "The recipe's", row) for row in rows])
    yield from _interval_notes(scores)


def _majority(rows: Sequence[Found]) -> list[float]:
    """The baseline's scores, of settings that have one."""
    return [row["majority"]["mean"] for row in rows if row["majority"]["mean"] is not None]


def _choice(found: Found, metric: MetricClass) -> Iterator[str]:
    """Which setting is chosen, and which could not be."""
    rows, short = found["settings"], lacking(found["settings"])
    if found["chosen"] is None:
        why = "some runs have no"
        if all(row["chooses"] for row in rows):
            why = f"none{' with all seeds' if short else ''} has a {metric.title} on the"
        yield f"No setting is chosen: {why} examples that choose."
    else:
        row = rows[found["chosen"]]
        nothing = " It has learnt nothing, see below." if {*row["learnt"]} == {False} else ""
        yield (
            f"Chosen, on the examples that choose: {', '.join(row['setting'])}. Its score on "
            f"{found['split']}: {shown(row['score'], metric.shown_as)}.{nothing}"
        )
    if short:
        most = max(len(row["seeds"]) for row in rows)
        of = [f"{', '.join(row['setting'])} ({len(row['seeds'])} of {most})" for row in short]
        yield f"Seeds are missing, and it is not chosen: {'; '.join(of)}."
    if last := undefined_settings(rows):
        yield f"Undefined, and ranked last: {'; '.join(last)}."


def _learnt_notes(rows: Sequence[tuple[str, Found]]) -> list[str]:
    """A sentence where students are no better than the baseline.

    rows: settings, each by the name that it has in the sentence.
    """
    named = []
    for name, row in rows:
        if nothing := row["learnt"].count(False):
            seeds = len(row["learnt"])
            named.append(name if nothing == seeds else f"{name} ({nothing} of {seeds} seeds)")
    if not named:
        return []
    return [
        "Nothing was learnt, the student is no better than the baseline beyond chance: "
        f"{'; '.join(named)}."
    ]


def _interval_notes(numbers: Sequence[Found]) -> Iterator[str]:
    """What the intervals of these numbers are over; see `over_seeds`."""
    over = {tuple(each["over"]) for each in numbers}
    if any(over):
        yield (
            "In brackets: 95% intervals of the mean over seeds and test examples; *: beyond chance."
        )
    if ("seeds",) in over:
        yield (
            "Predictions of some runs are gone, or of other examples: intervals of these are over "
            "seeds alone, and too narrow: where the test is small, equal settings seem to differ "
            "in 15 to 47% of cases."
        )
    if any(len(each["values"]) == 1 for each in numbers):
        yield "With one seed nothing is known about chance in training: add seed=1,2,3."


WIDTH, HEIGHT = 480, 30
"""Of the figure, and of a line of it, in its own units."""


def scores_figure(found: Found) -> Figure:
    """A line for each student of each setting, the shipped one's in colour, with a dot for each
    seed and the mean with its interval, and a line where the baseline is. Of a student whose scores
    are undefined it says so.

    found: as `summary` makes it, with settings.
    """
    metric, rows = metric_class(found), found["settings"]
    lines = [
        (
            f"{_name(row)}, {student}" if row["others"] else _name(row),
            numbers["score"],
            "line-0" if numbers is row else "line-1",
        )
        for row in rows
        for student, numbers in students_of(row)
    ]
    majority = _majority(rows)[:1]
    every = (one for _, score, _ in lines for one in (*score["values"], *(score["interval"] or ())))
    known = [one for one in every if one is not None] + majority
    whole = 100 if metric.is_share() else 1
    limits = of_scores([whole * one for one in known or [0.0]], in_percent=metric.is_share())
    low, high = (limit / whole for limit in limits)

    def x(value: float) -> float:
        return WIDTH * (value - low) / (high - low)

    bottom = HEIGHT * len(lines) + 4
    drawn = [tag("rect", width=WIDTH, height=bottom, class_="frame")]
    for value in majority:
        drawn.append(tag("line", x1=x(value), x2=x(value), y1=0, y2=bottom, class_="ideal"))
    for number, (name, score, colour) in enumerate(lines):
        y = HEIGHT * (number + 0.75)
        drawn.append(tag("text", name, x=6, y=y - 10))
        values = [value for value in score["values"] if value is not None]
        drawn += [tag("circle", cx=x(value), cy=y, r=2, class_=colour) for value in values]
        if not values:
            drawn.append(tag("text", "undefined", x=6, y=y + 4))
        if score["interval"] is not None:
            ends, mean = [x(end) for end in score["interval"]], x(score["mean"])
            points = f"{ends[0]:.1f},{y:.1f} {ends[1]:.1f},{y:.1f}"
            drawn.append(tag("polyline", points=points, class_=colour))
            drawn.append(tag("rect", x=mean - 2, y=y - 4, width=4, height=8, class_=colour))
    title = f"{metric.title} on {found['split']}"
    axis = f"{metric.shown_as(low)} to {metric.shown_as(high)}"
    drawn.append(tag("text", axis, x=6, y=bottom + 14))
    return Figure("scores", title, (-4, -4, WIDTH + 8, bottom + 24), drawn, title, 40)


# --------------------------------------------------------------------------------- a suite


def suite_tables(found: Found) -> Iterator[Table]:
    """Scores; differences to the reference; the settings that were chosen."""
    tasks, reference, checkpoints = found["tasks"], found["reference"], found["checkpoints"]
    metrics = {task: metric_class(of) for task, of in tasks.items() if of["metric"] is not None}
    chosen = [
        (task, name, {**of["settings"][of["chosen"]], "score": of["score"]})
        for task in metrics
        for name, of in tasks[task]["checkpoints"].items()
    ]
    means = ["mean", *(["macro mean"] if "macro" in checkpoints[reference] else [])]
    rows = [
        [*_line(name, found, metrics, "score"), "-" if part is None else f"{part:.1%}"]
        for name, part in ((name, of["retention"]) for name, of in checkpoints.items())
    ]
    heads = [f"{task}, {metric.title}" for task, metric in metrics.items()]
    majority = (metric.shown_as(tasks[task]["majority"]) for task, metric in metrics.items())
    of_groups = ", the macro mean that over groups of tasks" if means[1:] else ""
    yield Table(
        "Scores",
        ["checkpoint", *heads, *means, f"of {reference}'s"],
        [*rows, ["the baseline", *majority, *("" for _ in means), ""]],
        [
            *_learnt_notes([(f"{name} on {task}", row) for task, name, row in chosen]),
            *_interval_notes([row["score"] for _, _, row in chosen]),
            "The setting was chosen by task and checkpoint, on the examples that choose. The "
            "baseline is the best that can be answered without reading a text, as the most "
            f"frequent class. The last column is of the mean over tasks{of_groups}.",
        ],
    )
    if others := [name for name in checkpoints if name != reference]:
        rows = [_line(name, found, metrics, "to_reference") for name in others]
        wide = dict.fromkeys(note for one in metrics.values() for note in wide_note(one, rows))
        note = (
            "Points of shares, seed by seed, on the same test examples; *: beyond chance, the 95% "
            "interval excludes 0."
        )
        heads = ["checkpoint", *metrics, *means]
        yield Table(f"Less {reference}", heads, rows, [note, *wide])
    yield _chosen_settings(chosen, tasks, metrics)


def _chosen_settings(
    chosen: Sequence[tuple[str, str, Found]],
    tasks: Mapping[str, Any],
    metrics: Mapping[str, MetricClass],
) -> Table:
    rows = []
    for task, name, row in chosen:
        form = metrics[task].shown_as
        by_seed = " ".join(map(form, row["score"]["values"]))
        setting, choosing = ", ".join(row["setting"]), form(row["choosing"]["mean"])
        rows.append([task, name, setting, choosing, by_seed])
    notes = [
        f"Undefined, and ranked last, {task}, {name}: {'; '.join(settings)}."
        for task in metrics
        for name, settings in tasks[task]["undefined"].items()
        if settings
    ]
    heads = ["task", "checkpoint", "setting", "choosing", "by seed"]
    return Table("Settings that were chosen", heads, rows, notes)


def _line(
    name: str, found: Found, metrics: Mapping[str, MetricClass], key: str
) -> list[str | Cell]:
    """A checkpoint's numbers of each task, and their means. key: `score` or `to_reference`."""

    def cell(metric: MetricClass, numbers: Found | None, score: float | None) -> str | Cell:
        if numbers is None:
            return "-"
        if key == "score":
            return shown(numbers, metric.shown_as)
        return _apart(metric, numbers, score)

    cells: list[str | Cell] = [name]
    for task, metric in metrics.items():
        of = found["tasks"][task]
        own = of["checkpoints"].get(name)
        if own is None and key == "score" and of["undefined"][name]:
            cells.append("undefined")
        else:
            cells.append(cell(metric, own and own[key], own and own["score"]["mean"]))
    of = found["checkpoints"][name]
    for each in (of, *([of["macro"]] if "macro" in of else [])):
        # A mean is of shares alone, which all are shown alike.
        share = next(iter(metrics.values()), None)
        numbers = each["mean" if key == "score" else key]
        cells.append("-" if share is None else cell(share, numbers, None))
    return cells
