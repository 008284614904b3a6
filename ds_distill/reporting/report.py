"""report.html: what a run found, as one self-contained page that opens offline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ds_distill.evaluation.predictions import RELIABILITY_BINS
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.policies import candidates
from ds_distill.recipe.terms import TERMS
from ds_distill.records import EvaluationRecord, Expansion, ExpertisePhaseRecord
from ds_distill.reporting.page import Block, Figure, Figures, Fold, Page, Section, Text, tag
from ds_distill.reporting.result_tables import (
    class_table,
    confusions,
    difference_cell,
    evaluation_tables,
    judged_model,
    pairs_table,
    share,
    wide_note,
)
from ds_distill.reporting.results import (
    NOUNS,
    PER_CLASS,
    last_evaluations,
    limits_of,
    records_of,
    task_metric_of,
)
from ds_distill.tables import Cell, Table

MOST_WARNINGS = 3
"""That are shown at once."""


def report(
    results: Mapping[str, Any],
    curves: Section | None = None,
    *,
    loading: Sequence[str] = (),
    recipe: str = "",
) -> Page:
    """The page of a run's results (the content of results.json).

    curves: how its trainings went, see `curves`. loading: see `how_to_load`. recipe: its YAML.
    """
    name = results.get("run", "")
    blocks = [*_head(results), *_sections(results)]
    if curves is not None:
        blocks.append(curves)
    blocks += _of_phases(results)
    if loading:
        where = Text("In the folder `student` of the run, or with its path:", "soft")
        blocks.append(Section("How to load the student", [where, Text("\n".join(loading), "pre")]))
    if recipe:
        fold = Fold("recipe.yaml, with all defaults", [Text(recipe, "pre")])
        blocks.append(Section("The recipe", [fold]))
    return Page(f"{name}: distillation report", name, blocks)


def _head(results: Mapping[str, Any]) -> Iterator[Block]:
    if description := results.get("description"):
        yield Text(description, "soft")
    yield Text(results["verdict"], "lead")
    found = [line for record in results["phases"] for line in record.get("warnings", [])]
    warnings: list[Block] = [Text(line, "down") for line in found]
    if len(warnings) > MOST_WARNINGS:
        warnings = [Fold(f"{len(warnings)} warnings", warnings, kind="down")]
    yield from warnings


def _sections(results: Mapping[str, Any]) -> Iterator[Block]:
    """What models do, and what their teachers knew."""
    evaluations = last_evaluations(results)
    for evaluation in evaluations:
        yield from evaluation_sections(evaluation, results, named=len(evaluations) > 1)
    for record in records_of(results, "expertise")[-1:]:
        yield from routing_sections(record)


def evaluation_sections(
    evaluation: EvaluationRecord, results: Mapping[str, Any], *, named: bool = False
) -> Iterator[Section]:
    """Every model on one split of one task.

    named: whether the task is, because others are on the same page.
    """
    student, models = results["student"], evaluation["models"]
    first, *rest = evaluation_tables(evaluation, student, results.get("speed"))
    task = f"{evaluation['task']}, " if named else ""
    heading = task_metric_of(evaluation).heading()
    yield Section(f"{heading} on {task}{evaluation['split']}", [first])
    judged = judged_model(evaluation, student)
    if "confusion" in models[judged] and (table := confusions(models, judged)):
        rest.append(table)
    for table in rest:
        yield Section(table.title[0].upper() + table.title[1:], [table])
    if "reliability" in models[judged]:
        figures = [_reliability(name, model["reliability"]) for name, model in models.items()]
        note = Text(_about_reliability(evaluation["over"]), "soft")
        yield Section("Reliability", [Figures(figures), note])
    if evaluation["comparisons"]:
        yield Section("Each student against the others", [pairs_table(evaluation, student)])


def _reliability(name: str, bins: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy over confidence, both from 0 to 1; the area of a point is its share."""
    whole = sum(one["count"] for one in bins)
    drawn = [
        tag("rect", width=100, height=100, class_="frame"),
        tag("line", x1=0, y1=100, x2=100, y2=0, class_="ideal"),
    ]
    for one in bins:
        at = {"cx": 100.0 * one["confidence"], "cy": 100 - 100.0 * one["accuracy"]}
        drawn.append(tag("circle", **at, r=1.5 + 9 * (one["count"] / whole) ** 0.5))
    label, box = f"Accuracy over confidence of {name}", (-4, -4, 108, 108)
    return Figure(f"reliability-{name}", label, box, drawn, name, 9)


def _about_reliability(over: str) -> str:
    sure, right = "how sure a model is of its prediction", "how often it is right"
    if over == "labels":
        sure, right = "the probability that it gives a label", "how often the example has it"
    return (
        f"From left to right: {sure}; upwards: {right}, both from 0 to 1. Below the line it is too "
        f"sure. Each point is one of {RELIABILITY_BINS} bins, and the larger, the more predictions "
        f"are in it.{' ECE is the mean distance from the line.' if over == 'classes' else ''}"
    )


# --------------------------------------------------------------------- routing policies


def routing_table(comparison: Mapping[str, Any], split: str) -> Table:
    """Targets of policies, then the teachers, and the choice.

    comparison: see `ds_distill.routing.comparison.Comparison.to_json`.
    """
    metric, choice = task_metric_of(comparison), comparison["choice"]
    baseline = comparison.get("baseline", "average")
    meanings = {**candidates(), **candidates(partial=True)}
    rows: list[list[str | Cell]] = []

    def add(name: str, score: Mapping[str, Any], meaning: str) -> None:
        apart = "" if name == baseline else difference_cell(metric, score, score["score"])
        shown = name + (" (chosen)" if name == choice else "")
        rows.append([shown, metric.shown_as(score["score"]), apart, meaning])

    for name, score in comparison["policies"].items():
        add(name, score, meanings[name].meaning if name in meanings else "")
    for name, score in comparison["teachers"].items():
        add(f"teacher {name}", score, "one teacher alone")
    most = "a teacher that is right, where one is: how far choosing can go"
    add("any teacher", comparison["any_teacher"], most)
    notes = [
        f"Routing `chosen` is {choice} here. {_reason(comparison, metric, baseline)} These are "
        "targets: which student is shipped, its own score decides."
    ]
    not_compared = comparison.get("not_compared", {}).items()
    notes += [f"Not compared: {name}, as {why}." for name, why in not_compared]
    if comparison["agreement"]:
        pairs = (f"{pair} {same:.0%}" for pair, same in comparison["agreement"].items())
        notes.append(f"Teachers predict the same: {'; '.join(pairs)}.")
    notes += wide_note(metric, rows)
    examples = f"{comparison['examples']:,} examples of {split}"
    title = f"{metric.heading()} of each policy's target, on {examples}, cross-validated"
    heads = ["target", metric.title, f"to {baseline}", "what it is"]
    return Table(title, heads, rows, notes, shipped=f"{choice} (chosen)")


def _reason(comparison: Mapping[str, Any], metric: MetricClass, baseline: str) -> str:
    """The reason of the choice, in one sentence."""
    policies, choice = comparison["policies"], comparison["choice"]
    if choice != baseline:
        return f"The {metric.title} of its target is better than the average's, beyond chance."
    best = metric.best({name: policy["score"] for name, policy in policies.items()})
    if best == baseline:
        return f"No policy's target has a better {metric.title}."
    return f"The best target, of {best}, is better only within chance."


def routing_sections(record: ExpertisePhaseRecord) -> Iterator[Section]:
    """What an expertise phase found.

    record: its.
    """
    comparison, split = record["comparison"], record["split"]
    over, choice = comparison["over"], comparison["choice"]
    noun, measure = NOUNS.get(over, "tag"), PER_CLASS.get(over, "F1")
    table = routing_table(comparison, split)
    left_out = [
        Text(f"Left out: teacher {t}, which {why}.") for t, why in record["left_out"].items()
    ]
    yield Section("Which policy’s target is right?", [*left_out, Text(f"{table.title}."), table])
    scores = {name: score["per_class"] for name, score in comparison["policies"].items()}
    teachers = {name: score["per_class"] for name, score in comparison["teachers"].items()}
    scores |= {f"teacher {name}": of for name, of in teachers.items()}
    scores["any teacher"] = comparison["any_teacher"]["per_class"]
    tables = [(f"{measure} of each target, and of each teacher", class_table("", scores, choice))]
    for policy in sorted(comparison["policies"], key=lambda name: name != choice):
        if followed := comparison["policies"][policy].get("followed"):
            shares = {
                name: {label: followed.get(label, {}).get(name) for label in of}
                for name, of in teachers.items()
            }
            chosen = " (chosen)" if policy == choice else ""
            tables.append((f"Whom {policy}{chosen} follows", class_table("", shares, None)))
    note = (
        f"How far a policy follows a teacher is the mean share of its weight on the examples of a "
        f"{noun}, each example by what was fitted on others; a policy that treats all examples "
        "alike is not shown."
    )
    parts: list[Block] = [Section(title, [one], level=3) for title, one in tables if one.rows]
    if parts:
        title = f"Which teacher knows which {noun}, and who was followed"
        yield Section(title, [*parts, Text(note, "soft")])
    shown = zip(comparison.get("disagreements", []), record.get("texts", []), strict=False)
    policy = comparison.get("disagreements_of") or choice
    folds = [_disagreement(*one, policy, number < 3) for number, one in enumerate(shown)]
    if folds:
        note = (
            f"Some of the examples of {split} on which teachers predict several classes, and what "
            f"{policy}, fitted on other examples, made of them."
        )
        yield Section("Where the teachers disagree", [*folds, Text(note, "soft")])


def _disagreement(one: Mapping[str, Any], text: str, policy: str, is_open: bool) -> Fold:
    label = one["label"]

    def cells_of(answer: Mapping[str, Any]) -> list[str]:
        which = "right" if answer["label"] == label else "wrong"
        return [answer["label"], which, share(answer["probability"])]

    rows = [
        [name, *cells_of(answer), share(one["followed"][name])]
        for name, answer in one["teachers"].items()
    ]
    predicted, outcome, probability = cells_of(one["target"])
    heads = ["teacher", "says", "which is", "probability", "followed"]
    blocks: list[Block] = [Text(text, "blockquote"), Table("", heads, rows, narrow=True)]
    summary = f"{label}: {policy} is {outcome}, with {predicted} {probability}"
    return Fold(summary, blocks, is_open)


# ------------------------------------------------------------------------- of the phases


def _of_phases(results: Mapping[str, Any]) -> Iterator[Section]:
    if expansions := records_of(results, "start"):
        yield Section("Words that were added to the vocabulary", [_expansions(expansions)])
    if scores := results.get("teacher_scores"):
        yield Section("Teachers before a student learnt from them", [_teachers(scores)])
    yield Section("Which examples were used for what", [_uses(results["uses"])])
    yield Section("What it took", [_cost(results), *map(Text, _about_caches(results))])


def _expansions(records: Sequence[Expansion]) -> Table:
    heads = ["model", "tokens before", "added", "of which never used", "share of all tokens"]
    rows, notes = [], []
    for one in records:
        numbers = [f"{one[key]:,}" for key in ("known", "added", "not_used")]
        lengths = f"{one['tokens_before']:.1f}, then {one['tokens_after']:.1f}"
        rows.append([one["output"], *numbers, share(one["share_of_tokens"]), lengths])
        words = ", ".join(f"`{word}` {n:,}" for word, n in one["most_frequent"].items())
        notes.append(f"{one['output']}, counted in {one['split']}; the commonest: {words}.")
    return Table("", [*heads, "tokens a text"], rows, notes)


def _teachers(scores: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[str | Cell]] = []
    for one in scores:
        metric = task_metric_of(one)
        of = Cell(one["split"], warning=one.get("doubt") or "")
        score, examples = f"{metric.title} {metric.shown_as(one['score'])}", f"{one['examples']:,}"
        rows.append([one["teacher"] + limits_of(one), score, examples, of, one["phase"]])
    heads = ["teacher", "score", "examples", "of", "before phase"]
    note = "Of a teacher that this run trained, the same examples chose the epoch."
    return Table("", heads, rows, [note])


def _uses(uses: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[str | Cell]] = []
    for one in uses:
        why = "; ".join(one["warnings"])
        warning = f"Figures on these are too optimistic: {why}." if why else ""
        of = Cell(", ".join(one["of"]), warning=warning)
        rows.append([one["use"], one["split"], f"{one['examples']:,}", of])
    note = (
        "train: weights were trained on them. fit: routing was fitted on them (temperatures, "
        "a gate). choose: the best score on them chose the epoch and the shipped student; where "
        "a split is also used to fit, these are its other part. judge: the figures on this page."
    )
    return Table("", ["use", "split", "examples", "of"], rows, [note])


def _cost(results: Mapping[str, Any]) -> Table:
    phases, seconds = results["phases"], results["seconds"]
    environment = results.get("environment")
    rows = [
        [
            phase["phase"],
            phase["kind"],
            f"{phase['seconds']:.1f}",
            f"{phase['seconds'] / max(seconds, 1e-9):.0%}",
            f"{peak / 2**30:.2f} GiB" if (peak := phase.get("peak_bytes")) else "",
        ]
        for phase in phases
    ]
    rows.append(["all", "", f"{seconds:.1f}", "", ""])
    heads = ["phase", "kind", "seconds", "share", "memory"]
    on_gpu = environment and environment["gpus"]
    of = "that torch had allocated on its GPU" if on_gpu else "of its process"
    notes = [f"Memory: the most that rank 0 held in the phase, {of}."]
    if environment:
        used = ("torch", "deepspeed", "transformers")
        versions = ", ".join(f"{name} {environment['packages'][name]}" for name in used)
        where = ", ".join(environment["gpus"]) or environment["processor"]
        notes.append(
            f"{environment['ranks']} rank(s), {where}, {environment['cores']} cores; {versions}."
        )
    return Table("", heads, rows, notes)


def _about_caches(results: Mapping[str, Any]) -> Iterator[str]:
    for phase in records_of(results, "cache"):
        if added := phase["added"]:
            where = f"{phase['phase']}, {phase['seconds']:.1f} seconds"
            yield f"The teachers ran once on {added:,} examples ({where})."
        for teacher, texts in phase.get("not_given", {}).items():
            yield (
                f"Of {texts:,} of the {phase['examples']:,} texts of {phase['phase']} the file of "
                f"{teacher} says nothing; students follow no such teacher there."
            )


MOST_POINTS = 200
"""Of a line; of more, each as many times further apart."""
WIDTH, HEIGHT = 240, 110
"""Of a panel, in its own units."""
COLOURS = 6
"""That the page's style has, `line-0` the first."""
UNFOLDED = 6
"""Trainings that are shown at once."""

Points = list[tuple[int, float]]
"""(optimizer step, value), in order."""


def curves(
    events: Iterable[Mapping[str, Any]], phases: Sequence[str], metrics: Sequence[MetricClass]
) -> Section | None:
    """Of a run's events, the trainings in their order; None without any.

    phases: their names. metrics: of each phase, the one by which its models are compared.
    """
    losses: dict[tuple[int, str], dict[str, Points]] = {}
    scores: dict[tuple[int, str], Points] = {}
    for event in events:
        at, step = (event["number"], event["phase"]), event.get("step", 0)
        if event["event"] == "train":
            of_terms = losses.setdefault(at, {"loss": []})
            for name in ("loss", *(name for name in event if name in TERMS)):
                of_terms.setdefault(name, []).append((step, event[name]))
        elif event["event"] == "validation":
            value = event.get(metrics[event["number"]].name)
            if value is not None:
                scores.setdefault(at, []).append((step, value))
    found: list[Block] = []
    for (number, models), of_terms in losses.items():
        if len(of_terms) == 2:  # its one term is the loss
            of_terms = {"loss": of_terms["loss"]}
        name = f"curve-{phases[number]}-{models}"
        panels = [panel(name, models, "loss", of_terms, lambda value: f"{value:.3g}")]
        metric = metrics[number]
        judged = {
            model: scores[number, model] for model in models.split("+") if (number, model) in scores
        }
        if judged:
            title = f"{metric.title} on validation"
            panels.append(panel(name, models, title, judged, metric.shown_as))
        within = f" in {phases[number]}" if phases[number] != models else ""
        found.append(Section(models + within, [Figures(panels)], level=3))
    if not found:
        return None
    note = (
        "From metrics.jsonl; a loss is the mean of the steps since the last event, each term with "
        "its weight. Beside a name its last value."
    )
    if more := found[UNFOLDED:]:
        found[UNFOLDED:] = [Fold(f"{len(more)} more trainings", more)]
    return Section("How the models learnt", [*found, Text(note, "soft")])


def panel(
    name: str, models: str, title: str, lines: Mapping[str, Points], shown: Callable[[float], str]
) -> Figure:
    """Lines over the steps of a training.

    name: of its file, with the title. models: those that it trained.
    """
    values = [v for points in lines.values() for _, v in points if math.isfinite(v)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    steps = max((step for points in lines.values() for step, _ in points), default=0)
    span = high - low

    def drawn(points: Points, colour: str) -> Markup:
        every = math.ceil(len(points) / MOST_POINTS)
        kept = [
            (WIDTH * step / max(steps, 1), HEIGHT * (high - value) / span if span else HEIGHT / 2)
            for step, value in points[::-1][::every][::-1]  # the last one is among them
            if math.isfinite(value)
        ]
        if len(kept) == 1:  # of which a polyline shows nothing
            [(x, y)] = kept
            return tag("circle", cx=x, cy=y, r=3, class_=colour)
        return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in kept), class_=colour)

    found, entries = [tag("rect", width=WIDTH, height=HEIGHT, class_="frame")], []
    for number, (line, points) in enumerate(lines.items()):
        colour = f"line-{number % COLOURS}"
        found.append(drawn(points, colour))
        last = f" {line} {shown(points[-1][1])}"
        entries.append(tag("span", tag("span", "■", class_=colour), last, class_="entry"))
    axis = f"{title}, {shown(low)} to {shown(high)}, {steps:,} steps"
    caption = Markup("{} {}").format(tag("strong", axis), Markup(" ").join(entries))
    box = (-4, -4, WIDTH + 8, HEIGHT + 8)
    label = f"{models}: {axis}"
    return Figure(f"{name}-{title}", label, box, found, caption, 19)
