"""Tables as a page of HTML that opens offline, and what all pages share."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jinja2

from ds_distill.recipe.metrics.metric import no_width
from ds_distill.tables import Table

ALL_SHOWN = 40
"""Classes that a table shows at most; of more it shows the worst and the best, and folds the
rest."""

ENDS = 10
"""How many of each these are."""


def worst_and_best(values: Mapping[str, float | None]) -> tuple[list[str], list[str]]:
    """The names that a table by class shows, and those that it folds: of many classes the worst and
    the best, from low to high, and the rest in their own order.

    values: of a model, by class; None of a class without examples, which is folded.
    """
    if len(values) <= ALL_SHOWN:
        return list(values), []
    known = {name: value for name, value in values.items() if value is not None}
    ranked = sorted(known, key=lambda name: known[name])
    shown = list(dict.fromkeys(ranked[:ENDS] + ranked[-ENDS:]))
    return shown, [name for name in values if name not in set(shown)]


def page(title: str, sentences: Sequence[str], tables: Sequence[Table], figure: str = "") -> str:
    """An HTML page, with all that it needs in it.

    sentences: above the tables. figure: an SVG.
    """
    template = environment().get_template("page.html.jinja")
    inline = jinja2.utils.markupsafe.Markup(figure[max(figure.find("<svg"), 0) :])
    return template.render(title=title, sentences=sentences, tables=tables, figure=inline)


@functools.cache
def environment() -> jinja2.Environment:
    """For the pages' templates."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("ds_distill.reporting", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals.update(no_width=no_width)
    return found
