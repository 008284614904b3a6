"""What a terminal shows. Labels, keys, paths and names of hosts may be strangers': their escape
sequences and marks of direction are shown, not obeyed."""

from __future__ import annotations

import re
import sys

LONGEST = 2000
"""Characters of a message."""

_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except the ends of lines and tabs, marks of direction (Unicode TR 36), and
halves of surrogate pairs, which cannot be printed."""


def escaped(text: str) -> str:
    r"""A text with active characters as \uXXXX, which inside a string of JSON means the same."""
    return _ACTIVE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def message(text: str) -> str:
    """A text for standard error: escaped, and of a long one the middle is left out. Its end has the
    fix."""
    text = escaped(text)
    if len(text) <= LONGEST:
        return text
    kept = LONGEST // 2
    return f"{text[:kept]} [... {len(text) - 2 * kept:,} characters ...] {text[-kept:]}"


def say(text: str, *, end: str = "\n", error: bool = False) -> None:
    """Print a text on standard output, or as a message on standard error."""
    if error:
        print(message(text), end=end, file=sys.stderr, flush=True)
    else:
        print(escaped(text), end=end, flush=True)
