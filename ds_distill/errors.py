"""The one exception for mistakes that the user can fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Wrong input. The command line prints the message as one paragraph and exits with 2.

    The message names the file or key, the value given, the rule it breaks, and the fix.
    """


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts `where` before the message of a UserError in this block, which does not know it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """A message's ` Did you mean ...?`, or nothing where no known name is near."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(value.lower(), by_lower, n=1)
    found = by_lower[close[0]] if close else value
    return f" Did you mean `{found}`?" if found != value else ""
