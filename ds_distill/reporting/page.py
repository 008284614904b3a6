"""A page of HTML that opens offline: blocks, and how each is written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from markupsafe import Markup, escape

from ds_distill.tables import Cell, Table

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


# ---------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Text:
    text: str
    """`code` stands between backticks, of a paragraph."""
    kind: Literal["", "soft", "lead", "down", "pre", "blockquote"] = ""


@dataclass(frozen=True)
class Figure:
    name: str
    """Of its file."""
    label: str
    """What it shows, for who does not see it."""
    box: tuple[float, float, float, float]
    """Left, top, width and height, in its own units."""
    drawn: Sequence[Markup]
    caption: str
    """Markup, or a text."""
    rems: float
    """How wide it is on a page."""

    def svg(self, *more: Markup, **attributes: str) -> Markup:
        box = " ".join(f"{one:g}" for one in self.box)
        about = {"viewBox": box, "role": "img", "aria_label": self.label}
        return tag("svg", *more, Markup("\n").join(self.drawn), **about, **attributes)

    def file(self) -> str:
        """An SVG with the page's style in it."""
        return f"{self.svg(_style(), xmlns='http://www.w3.org/2000/svg')}\n"


@dataclass(frozen=True)
class Figures:
    """Side by side."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]
    level: int = 2


@dataclass(frozen=True)
class Fold:
    """What is shown when asked to."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False
    kind: str = ""


Block = Table | Text | Figures | Section | Fold | Markup


# ------------------------------------------------------------------------------------ HTML


def tag(element: str, *content: object, **attributes: object) -> Markup:
    """An element, with all escaped that is no Markup, and numbers with one digit. `_` in the name
    of an attribute is a `-`, and one at its end nothing; an attribute that is empty is left out."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="'
        f'{escape(f"{value:.1f}" if isinstance(value, float) else value)}"'
        for name, value in attributes.items()
        if value != ""
    )
    return Markup(f"<{element}{given}>{Markup().join(map(escape, content))}</{element}>")


@dataclass(frozen=True)
class Page:
    title: str
    """Of the document."""
    heading: str
    blocks: Sequence[Block]

    def html(self) -> str:
        """The whole page, with all that it needs in it."""
        body = [tag("h1", self.heading), *(_html(block) for block in self.blocks)]
        main = Markup("\n").join(body)
        return str(_template().format(title=self.title, style=_style(), main=main))

    def figures(self) -> Iterator[tuple[str, str]]:
        """(file name, SVG) of each figure, with the page's style in it."""
        for number, figure in enumerate(_figures(self.blocks), start=1):
            name = re.sub(r"[^A-Za-z0-9]+", "-", figure.name)[:60].strip("-")
            yield f"{number:02d}-{name}.svg", figure.file()


def page(title: str, sentences: Sequence[str], blocks: Sequence[Block]) -> Page:
    """A page of tables, each with its title above it. sentences: above them all."""
    lead: list[Block] = [Text(sentence, "lead") for sentence in sentences]
    for one in blocks:
        lead.append(Section(one.title, [one]) if isinstance(one, Table) and one.title else one)
    return Page(title, title, lead)


def _template() -> Markup:
    return Markup(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def _style() -> Markup:
    css = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return Markup(f"<style>\n{css}</style>")


def _figures(blocks: Sequence[Block]) -> Iterator[Figure]:
    for block in blocks:
        if isinstance(block, Figures):
            yield from block.figures
        elif isinstance(block, Section | Fold):
            yield from _figures(block.blocks)


def _html(block: Block) -> Markup:
    match block:
        case Section(title, blocks, level):
            content = [tag(f"h{level}", title), *map(_html, blocks)]
        case Fold(summary, blocks, is_open, kind):
            more: dict[str, Any] = {"open": "open"} if is_open else {}
            return tag("details", tag("summary", summary, class_=kind), *map(_html, blocks), **more)
        case Figures(figures):
            return tag("div", *map(_figure, figures), class_="figures")
        case Text(text, "pre" | "blockquote" as kind):
            return tag(kind, text)
        case Text(text, kind):
            parts = enumerate(text.split("`"))
            return tag(
                "p", *(tag("code", part) if n % 2 else part for n, part in parts), class_=kind
            )
        case Table():
            content = list(_table(block))
        case _:
            return block
    return Markup("\n").join(content)


def _figure(figure: Figure) -> Markup:
    caption = tag("figcaption", figure.caption)
    return tag("figure", figure.svg(), caption, style=f"width: {figure.rems:g}rem")


def _table(table: Table) -> Iterator[Markup]:
    """Of many columns in parts."""
    parts = list(table.parts(8 if table.narrow else 20))
    yield from (_part(part, part.rows) for part in parts)
    if table.folded:
        folded = (_part(part, part.folded) for part in parts)
        yield tag("details", tag("summary", f"{len(table.folded):,} more"), *folded)
    if table.notes:
        yield _html(Text(" ".join(table.notes), "soft"))


def _part(part: Table, rows: Sequence[Sequence[str | Cell]]) -> Markup:
    columns = list(zip(part.heads, part.numbers(), strict=True))

    def kinds(head: str, is_number: bool, *more: str) -> str:
        is_shipped = bool(head) and head == part.shipped
        return " ".join(filter(None, ["word" * (not is_number), "shipped" * is_shipped, *more]))

    def td(head: str, is_number: bool, cell: str | Cell) -> Markup:
        shown = cell if isinstance(cell, Cell) else Cell(cell)
        text = re.sub(r"^[+-]\d.*", lambda found: found[0].replace("-", "−"), shown.text)
        share, color = shown.share or 0.0, {"better": "up", "worse": "down", "": ""}
        content: list[object] = [text, "*" * bool(shown.outcome)]
        style = ""
        if shown.share is not None and part.narrow:
            style = f"background: color-mix(in srgb, var(--bar) {60 * share:.0f}%, transparent)"
        elif shown.share is not None:
            content += [" ", tag("span", class_="bar", style=f"width: {3 * share:.1f}rem")]
        if shown.warning:
            content.append(tag("div", shown.warning, class_="down"))
        return tag("td", *content, class_=kinds(head, is_number, color[shown.outcome]), style=style)

    # A head without words is no heading.
    heads = (
        tag("th" if head else "td", head, class_=kinds(head, is_number))
        for head, is_number in columns
    )
    lines = [
        tag(
            "tr",
            *(td(*column, cell) for column, cell in zip(columns, row, strict=True)),
            class_="shipped" if part.shipped and str(row[0]) == part.shipped else "",
        )
        for row in rows
    ]
    body = Markup("\n").join([tag("thead", tag("tr", *heads)), *lines])
    made = tag("table", body, class_="narrow" if part.narrow else "")
    return tag("div", made, class_="scroll", tabindex=0)
