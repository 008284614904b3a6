"""What a sweep and a suite found, for a reader: tables, report.html and results.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ds_distill.files import write_json, write_text
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.page import page
from ds_distill.reporting.result_tables import difference_cell, share, wide_note
from ds_distill.reporting.results import interval_as, task_metric_of, undefined_note
from ds_distill.sweep.found import (
    Found,
    lacking,
    of_checkpoint,
    setting_name,
    students_of,
    suite_results,
    summary,
    undefined_settings,
)
from ds_distill.sweep.suite import Suite
from ds_distill.sweep.sweep import Sweep
from ds_distill.tables import Cell, Row, Table


def write_sweep(sweep: Sweep) -> str:
    """Write results.json and report.html of the runs that have ended. Returns the table as text."""
    found = summary(sweep.ended(), sweep.draws())
    name = sweep.runs[0].recipe.name
    about = [f"{len(sweep.runs)} runs of {name}."]
    return _write(sweep, found, f"{name}: settings", about, [sweep_table(found)])


def write_suite(suite: Suite, reference: str, sweep: Sweep) -> str:
    """Likewise of a suite. reference: the checkpoint that others are compared with."""
    runs = [run.variant for run in sweep.runs]
    found = suite_results(runs, sweep.ended(), reference, suite.weights(), sweep.draws())
    found |= {"suite": suite.name, "lacks": suite.lacks}
    about = [suite.description, suite.lacks and f"It lacks: {suite.lacks}"]
    return _write(sweep, found, f"Suite {suite.name}", about, suite_tables(found))


def _write(
    sweep: Sweep, found: Found, title: str, about: Sequence[str], tables: Sequence[Table]
) -> str:
    write_json(sweep.path / "results.json", {**found, "missing": sweep.missing})
    lines = [sentence for sentence in about if sentence]
    if sweep.missing:
        lines.append(f"Not finished, and not counted: {', '.join(sweep.missing)}.")
    write_text(sweep.path / "report.html", page(title, lines, tables).html())
    return "\n\n".join(map(Table.text, tables))


def sweep_table(found: Found) -> Table:
    """A summary: a row for each student of each setting."""
    if not found["settings"]:
        return Table("", ["setting"], [], ["No run has a student that was evaluated."])
    metric = task_metric_of(found)
    several = len(found["settings"]) > 1
    heads = ["setting", "student", "runs", f"{metric.title} on {found['split']}", "by seed"]
    heads += ["choosing", *(["to the first"] if several else [])]
    rows: list[Row] = []
    for row in found["settings"]:
        choosing = shown({**row["choosing"], "interval": None}, metric.shown_as)
        for student, numbers in students_of(row):
            score = numbers["score"]
            line: list[str | Cell] = [
                setting_name(row),
                student,
                str(len(row["seeds"])),
                shown(score, metric.shown_as),
                " ".join(map(metric.shown_as, score["values"])),
                "" if numbers is not row else choosing if row["chooses"] else "-",
            ]
            if several:
                line.append(_apart(metric, numbers.get("to_first"), score["mean"]))
            rows.append(line)
    return Table("", heads, rows, [*_notes(found, metric), *wide_note(metric, rows)])


def suite_tables(found: Found) -> list[Table]:
    """The checkpoints' scores and their means over the tasks, and a table for each task."""
    reference = found["reference"]
    tasks = {task: of for task, of in found["tasks"].items() if of["settings"]}
    metrics = {task: task_metric_of(of) for task, of in tasks.items()}
    # A mean is of shares alone, which all are shown alike.
    metric = next(iter(metrics.values()), None)
    rows: list[list[str | Cell]] = []
    for name, means in found["checkpoints"].items():
        rows.append([name])
        for task, of in tasks.items():
            row, lost = of_checkpoint(of, name), undefined_settings(of["grids"][name]["settings"])
            score = shown(row["score"], metrics[task].shown_as) if row else "-"
            rows[-1].append("undefined" if row is None and lost else score)
        for of in means.values():
            mean = of["score"]
            part = "-" if of["retention"] is None else share(of["retention"])
            if metric is None or mean is None:
                rows[-1] += ["-", part, ""]
            else:
                rows[-1] += [
                    shown(mean, metric.shown_as),
                    part,
                    _apart(metric, of["to_reference"], None),
                ]
    heads = ["checkpoint", *(f"{task}, {metrics[task].title}" for task in tasks)]
    for kind in next(iter(found["checkpoints"].values())):
        heads += [kind, f"{kind} of {reference}'s", f"{kind} less {reference}"]
    note = (
        "The setting was chosen by task and checkpoint, on the examples that choose. Differences "
        "are seed by seed, on the same test examples; *: beyond chance, the 95% interval excludes "
        "0. A macro mean is that over groups of tasks."
    )
    return [
        Table("Scores", heads, rows, [note, *(wide_note(metric, rows) if metric else [])]),
        *(_task_table(task, of) for task, of in tasks.items()),
    ]


def _task_table(task: str, of: Found) -> Table:
    table = sweep_table(of)
    lost = {name: undefined_settings(grid["settings"]) for name, grid in of["grids"].items()}
    notes = (
        f"Undefined, and ranked last, {name}: {'; '.join(settings)}."
        for name, settings in lost.items()
        if settings
    )
    return replace(table, title=task, notes=[*table.notes, *notes])


def shown(numbers: Found, form: Callable[[float | None], str]) -> str:
    """A mean, with its interval where there is one; `undefined` where a value is."""
    if not numbers["values"]:
        return "-"
    text = form(numbers["mean"])
    if numbers["interval"] is not None:
        text += f" ({interval_as(form, numbers['interval'])})"
    return text


def _apart(metric: MetricClass, numbers: Found | None, score: float | None) -> str | Cell:
    """A difference. score: what it is from."""
    if numbers is None:
        return ""
    if not numbers["values"]:
        return "-"
    return difference_cell(metric, {**numbers, "difference": numbers["mean"]}, score)


# ----------------------------------------------------------------------------------- sentences


def _notes(found: Found, metric: MetricClass) -> Iterator[str]:
    rows = found["settings"]
    others: dict[str, list[float]] = {}
    for row in rows:
        for name, numbers in row["models"].items():
            is_row = numbers["role"] == "student" or name in row["students"]
            if not is_row and numbers["mean"] is not None:
                others.setdefault(name, []).append(numbers["mean"])
    for name, means in others.items():
        ends = sorted({metric.shown_as(min(means)), metric.shown_as(max(means))})
        yield f"{name}: {' to '.join(ends)}"
    majority = [score for row in rows for score in row["majority"] if score is not None]
    if majority:
        yield f"always {found['rule']}: {metric.shown_as(majority[0])}"
    if len(rows) > 1 and "chosen" in found:
        yield from _choice(found, metric)
    scores = [numbers["score"] for row in rows for _, numbers in students_of(row)]
    judged = scores + [row["choosing"] for row in rows if row["chooses"]]
    yield from undefined_note([score for numbers in judged for score in numbers["values"]])
    yield from _learnt_note(rows)
    yield from _interval_notes(scores)


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
            f"Chosen, on the examples that choose: {setting_name(row)}. Its score on "
            f"{found['split']}: {shown(row['score'], metric.shown_as)}.{nothing}"
        )
    if short:
        most = max(len(row["seeds"]) for row in rows)
        of = [f"{setting_name(row)} ({len(row['seeds'])} of {most})" for row in short]
        yield f"Seeds are missing, and it is not chosen: {'; '.join(of)}."
    if last := undefined_settings(rows):
        yield f"Undefined, and ranked last: {'; '.join(last)}."


def _learnt_note(rows: Sequence[Found]) -> Iterator[str]:
    """A sentence where students are no better than the baseline."""
    named = []
    for row in rows:
        if nothing := row["learnt"].count(False):
            seeds = len(row["learnt"])
            some = "" if nothing == seeds else f" ({nothing} of {seeds} seeds)"
            named.append(setting_name(row) + some)
    if named:
        yield (
            "Nothing was learnt, the student is no better than the baseline beyond chance: "
            f"{'; '.join(named)}."
        )


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
