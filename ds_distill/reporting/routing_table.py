"""The comparison of routing policies: their targets, who knows which class, whom they follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.policies import candidates
from ds_distill.records import ExpertisePhaseRecord
from ds_distill.reporting.page import Block, Fold, Section, Text
from ds_distill.reporting.result_tables import class_table, difference_cell, share, wide_note
from ds_distill.reporting.results import NOUNS, PER_CLASS, task_metric_of
from ds_distill.tables import Cell, Table


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
    left_out = record["left_out"].items()
    blocks: list[Block] = [
        *(Text(f"Left out: teacher {teacher}, which {why}.") for teacher, why in left_out),
        *(Text(f"{table.title}."), table),
    ]
    yield Section("Which policy’s target is right?", blocks)
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
        return [
            answer["label"],
            "right" if answer["label"] == label else "wrong",
            share(answer["probability"]),
        ]

    rows = [
        [name, *cells_of(answer), share(one["followed"][name])]
        for name, answer in one["teachers"].items()
    ]
    predicted, outcome, probability = cells_of(one["target"])
    heads = ["teacher", "says", "which is", "probability", "followed"]
    blocks: list[Block] = [Text(text, "blockquote"), Table("", heads, rows, narrow=True)]
    summary = f"{label}: {policy} is {outcome}, with {predicted} {probability}"
    return Fold(summary, blocks, is_open)
