"""What a sweep found, for a reader: tables, report.html and results.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ds_distill.files import write_json, write_text
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.reporting.page import page
from ds_distill.reporting.result_tables import POINTS, difference_cell, share, wide_note
from ds_distill.reporting.results import interval_as, task_metric_of, undefined_note
from ds_distill.sweep.found import (
    Found,
    lacking,
    of_model,
    results,
    setting_name,
    students_of,
    undefined_settings,
)
from ds_distill.sweep.sweep import Sweep
from ds_distill.tables import Cell, Row, Table


def write_report(sweep: Sweep) -> str:
    """Write results.json and report.html of the runs that have ended. Returns the tables."""
    found = results(sweep.runs, sweep.ended(), sweep.draws())
    write_json(sweep.path / "results.json", {**found, "missing": sweep.missing})
    name = sweep.runs[0].recipe.name
    if "recipes" in found:
        name = f"{len(found['recipes'])} recipes"
    lines = [f"{len(sweep.runs)} runs of {name}."]
    if sweep.missing:
        lines.append(f"Not finished, and not counted: {', '.join(sweep.missing)}.")
    tables = sweep_tables(found)
    write_text(sweep.path / "report.html", page(f"{name}: settings", lines, tables).html())
    return "\n\n".join(map(Table.text, tables))


def sweep_tables(found: Found) -> list[Table]:
    """Of one recipe its settings; of several each model's scores and their means, and a table for
    each."""
    if "recipes" not in found:
        return [sweep_table(found)]
    tables = (replace(sweep_table(of), title=name) for name, of in found["recipes"].items())
    return [_means_table(found), *tables]


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


def _means_table(found: Found) -> Table:
    recipes = {name: of for name, of in found["recipes"].items() if of["settings"]}
    metrics = {name: task_metric_of(of) for name, of in recipes.items()}
    first, *others = found["means"]
    rows: list[list[str | Cell]] = []
    for model, *means in (one.values() for one in found["means"]):
        rows.append([model or "the recipe's"])
        for name, of in recipes.items():
            row = of_model(of, model)
            lost = undefined_settings(of["grids"][str(model)]["settings"])
            score = shown(row["score"], metrics[name].shown_as) if row else "-"
            rows[-1].append("undefined" if row is None and lost else score)
        for of in means:
            rows[-1].append(shown(of["score"], POINTS.shown_as) if of["score"] else "-")
            if others:
                rows[-1].append("-" if of["retention"] is None else share(of["retention"]))
                rows[-1].append(_apart(POINTS, of["to_first"], None))
    heads = ["model", *(f"{name}, {one.title}" for name, one in metrics.items())]
    for kind in [*first][1:]:
        heads.append(kind)
        if others:
            heads += [f"{kind} of {first['model']}'s", f"{kind} less {first['model']}"]
    note = (
        "The setting was chosen by recipe and model, on the examples that choose. Differences are "
        "seed by seed, on the same test examples; *: beyond chance, the 95% interval excludes 0. A "
        "macro mean is that over groups of recipes."
    )
    return Table("Scores", heads, rows, [note, *wide_note(POINTS, rows)])


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
    for grid in found.get("grids", {}).values():
        if last := undefined_settings(grid["settings"]):
            yield f"Undefined, and ranked last: {'; '.join(last)}."
    if len(rows) > 1 and "grids" not in found:
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
