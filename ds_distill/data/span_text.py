"""The text that a span of characters says it has, beside the one at its offsets."""

from __future__ import annotations

from typing import Any

from ds_distill.errors import UserError

_UNITS = {
    "UTF-16 code units, as JavaScript does": ("utf-16-le", 2),
    "bytes of UTF-8": ("utf-8", 1),
}
"""What tools count in place of characters: the encoding, and the bytes of a unit."""


def check_own_text(span: dict[str, Any], text: str, what: str) -> None:
    """Raises UserError for a span, {start, end} and perhaps its own text, that has another one than
    the characters from its start up to its end. what: it is, at the start of a message."""
    its_text, there = span.get("text"), text[span["start"] : span["end"]]
    if its_text not in (None, there):
        raise UserError(
            f"{what} is {its_text!r}, and its characters {span['start']} to {span['end']} are "
            f"{there!r}. {true_offsets(span, text)}Correct the numbers, which count characters, or "
            "take the text out."
        )


def true_offsets(span: Any, text: str) -> str:
    """A sentence on where a span's own text stands, where it has one and that does: its start may
    count other units than characters."""
    start, its_text = (span.get("start"), span.get("text")) if isinstance(span, dict) else (0, None)
    if type(start) is not int or not isinstance(its_text, str) or not its_text:
        return ""
    for unit, (encoding, size) in _UNITS.items():
        before = text.encode(encoding)[: max(start, 0) * size].decode(encoding, errors="ignore")
        at, units = len(before), len(before.encode(encoding)) // size
        if at != start == units and text.startswith(its_text, at):
            return f"It counts {unit}: in characters it is {at} to {at + len(its_text)}. "
    at = text.find(its_text, max(start, 0))
    at = text.find(its_text) if at < 0 else at
    return f"It stands at {at} to {at + len(its_text)}, exclusive. " if at >= 0 else ""
