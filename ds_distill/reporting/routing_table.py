"""The comparison of routing policies as a console table."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.policies import candidates
from ds_distill.routing.comparison import Comparison, Score


def routing_table(comparison: Comparison, split: str) -> Group:
    """The console table, with a line on the choice."""
    examples = f"{comparison.examples:,} examples of {split}"
    metric, title = comparison.metric_class, comparison.metric_class.title
    table = Table(
        title=f"{metric.heading()} of each policy's target, on {examples}, cross-validated",
        title_justify="left",
        box=SIMPLE_HEAD,  # plain enough for a log file
    )
    table.add_column("target", no_wrap=True)
    for column in (title, f"to {comparison.baseline}", "95% interval"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what it is")
    meanings = {**candidates(), **candidates(partial=True)}
    for name, score in comparison.policies.items():
        style = "bold" if name == comparison.choice else None
        table.add_row(*_cells(metric, name, score, meanings[name].meaning), style=style)
    table.add_section()
    for name, score in comparison.teachers.items():
        table.add_row(*_cells(metric, f"teacher {name}", score, "one teacher alone"))
    table.add_row(
        *_cells(
            metric,
            "any teacher",
            comparison.any_teacher,
            "a teacher that is right, where one is: how far choosing can go",
        )
    )
    agreement = "; ".join(f"{pair} {share:.0%}" for pair, share in comparison.agreement.items())
    lines = [f"Choice: {comparison.choice}. {reason(comparison)}"]
    lines += [f"Not compared: {name}, as {why}." for name, why in comparison.not_compared.items()]
    if agreement:
        lines.append(f"Teachers predict the same: {agreement}.")
    return Group(table, *map(Text, lines))


def reason(comparison: Comparison) -> str:
    """The reason of the choice, in one sentence."""
    metric = comparison.metric_class
    if comparison.choice != comparison.baseline:
        bounds = sorted(map(abs, comparison.policies[comparison.choice].interval))
        low, high = (metric.difference_as(bound).lstrip("+") for bound in bounds)
        return (
            f"The {metric.title} of its target is better than the average's, by {low} to "
            f"{high}{' points' if metric.is_share() else ''}."
        )
    best = metric.best({name: policy.score for name, policy in comparison.policies.items()})
    if best == comparison.baseline:
        return f"No policy's target has a better {metric.title}."
    return f"The best target, of {best}, is better only within chance."


def _cells(metric: MetricClass, name: str, score: Score, meaning: str) -> list[Text]:
    low, high = (metric.difference_as(bound) for bound in score.interval)
    numbers = [metric.shown_as(score.score), metric.difference_as(score.difference)]
    return [Text(cell) for cell in (name, *numbers, f"{low} to {high}", meaning)]
