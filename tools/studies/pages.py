"""What studies write into the documents: text between two marks of a page."""

from __future__ import annotations

from pathlib import Path

from ds_distill.files import write_text


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"<!-- end of {name} -->"


def shown(page: Path, name: str) -> str:
    """What is between the marks of `name`. Raises SystemExit where they are not."""
    opening, closing = marks(name)
    _, before, rest = page.read_text(encoding="utf-8").partition(opening)
    text, after, _ = rest.partition(closing)
    if not before or not after:
        raise SystemExit(f"{page} has no place for {name}: {opening}{closing}")
    return text


def show(page: Path, name: str, text: str) -> None:
    """Put a text between the marks of `name`, in place of what is there."""
    opening, closing = marks(name)
    old = f"{opening}{shown(page, name)}{closing}"
    write_text(page, page.read_text(encoding="utf-8").replace(old, f"{opening}{text}{closing}"))


def row(cells: list[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cells) + " |\n"
