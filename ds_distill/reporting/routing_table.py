"""The comparison of routing policies as a table."""

from __future__ import annotations

from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.policies import candidates
from ds_distill.routing.comparison import Comparison, Score
from ds_distill.tables import Table


def routing_table(comparison: Comparison, split: str) -> Table:
    """Targets of policies, then the teachers, with a line on the choice."""
    metric = comparison.metric_class
    meanings = {**candidates(), **candidates(partial=True)}
    rows = [
        _cells(metric, name, score, meanings[name].meaning)
        for name, score in comparison.policies.items()
    ]
    rows += [
        _cells(metric, f"teacher {name}", score, "one teacher alone")
        for name, score in comparison.teachers.items()
    ]
    most = "a teacher that is right, where one is: how far choosing can go"
    rows.append(_cells(metric, "any teacher", comparison.any_teacher, most))
    agreement = "; ".join(f"{pair} {share:.0%}" for pair, share in comparison.agreement.items())
    notes = [
        f"Routing `chosen` is {comparison.choice} here. {reason(comparison)} These are targets: "
        "which student is shipped, its own score decides."
    ]
    notes += [f"Not compared: {name}, as {why}." for name, why in comparison.not_compared.items()]
    if agreement:
        notes.append(f"Teachers predict the same: {agreement}.")
    examples = f"{comparison.examples:,} examples of {split}"
    title = f"{metric.heading()} of each policy's target, on {examples}, cross-validated"
    to_baseline = f"to {comparison.baseline}"
    heads = ["target", metric.title, to_baseline, "95% interval", "what it is"]
    return Table(title, heads, rows, notes)


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


def _cells(metric: MetricClass, name: str, score: Score, meaning: str) -> list[str]:
    low, high = (metric.difference_as(bound) for bound in score.interval)
    numbers = [metric.shown_as(score.score), metric.difference_as(score.difference)]
    return [name, *numbers, f"{low} to {high}", meaning]
