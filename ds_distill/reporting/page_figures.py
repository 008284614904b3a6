"""The figures of a page as files."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FIGURE = re.compile(
    r'<svg (?P<attributes>[^>]*data-figure="(?P<name>[^"]*)"[^>]*)>(?P<drawn>.*?)</svg>', re.DOTALL
)
_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)


def page_figures(page: str) -> Iterator[tuple[str, str]]:
    """(file name, SVG) of each figure of a report's page, with the page's style in it."""
    style = found.group() if (found := _STYLE.search(page)) else ""
    for number, figure in enumerate(_FIGURE.finditer(page), start=1):
        name = re.sub(r"&[#a-z0-9]*;|[^A-Za-z0-9]+", "-", figure["name"])[:60].strip("-")
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {figure["attributes"]}>'
        yield f"{number:02d}-{name}.svg", f"{opening}{style}{figure['drawn']}</svg>\n"
