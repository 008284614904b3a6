"""The comparison of routing policies as a console table."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ds_distill.parts.policies import BASELINE, candidates
from ds_distill.routing.comparison import Comparison, Score


def routing_table(comparison: Comparison, split: str) -> Group:
    """The console table, with a line on the choice."""
    examples = f"{comparison.examples:,} examples of {split}"
    table = Table(
        title=f"Accuracy of each policy's target, on {examples}, cross-validated",
        title_justify="left",
        box=SIMPLE_HEAD,  # plain enough for a log file
    )
    table.add_column("target", no_wrap=True)
    for column in ("right", f"to {BASELINE}", "95% interval"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what it is")
    for name, score in comparison.policies.items():
        style = "bold" if name == comparison.choice else None
        table.add_row(*_cells(name, score, candidates()[name].meaning), style=style)
    table.add_section()
    for name, score in comparison.teachers.items():
        table.add_row(*_cells(f"teacher {name}", score, "one teacher alone"))
    table.add_row(
        *_cells(
            "any teacher", comparison.any_teacher, "at least one teacher is right: an upper bound"
        )
    )
    agreement = "; ".join(f"{pair} {share:.0%}" for pair, share in comparison.agreement.items())
    lines = [f"Choice: {comparison.choice}. {reason(comparison)}"]
    if agreement:
        lines.append(f"Teachers predict the same class: {agreement}.")
    return Group(table, *map(Text, lines))


def reason(comparison: Comparison) -> str:
    """The reason of the choice, in one sentence."""
    if comparison.choice != BASELINE:
        low, high = comparison.policies[comparison.choice].interval
        return (
            f"Its target is right more often than the {BASELINE}'s, by {100 * low:.1f} to "
            f"{100 * high:.1f} points."
        )
    best = max(comparison.policies, key=lambda name: comparison.policies[name].accuracy)
    if best == BASELINE:
        return "No policy's target is right more often."
    return f"The best target, of {best}, is better only within chance."


def _cells(name: str, score: Score, meaning: str) -> list[Text]:
    interval = "{:+.1f} to {:+.1f}".format(*(100 * bound for bound in score.interval))
    numbers = [f"{score.accuracy:.1%}", f"{100 * score.difference:+.1f}", interval]
    return [Text(cell) for cell in (name, *numbers, meaning)]
