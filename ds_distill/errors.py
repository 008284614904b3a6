"""The one exception for mistakes that the user can fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import shorten


class UserError(Exception):
    """Wrong input. The command line prints the message as one paragraph and exits with 2.

    A message names the file or key, the value given, the rule it breaks, and the fix.
    """

    def __init__(self, *mistakes: str) -> None:
        super().__init__(*mistakes)
        self.mistakes = mistakes

    def __str__(self) -> str:
        if len(self.mistakes) == 1:
            return self.mistakes[0]
        lines = [f"{number}. {mistake}" for number, mistake in enumerate(self.mistakes, 1)]
        return "\n".join([f"{len(lines)} mistakes:", *lines, "Nothing was started."])


def refuse(mistakes: Iterable[str]) -> None:
    """Raises UserError with all mistakes, each once; nothing without any."""
    if found := list(dict.fromkeys(mistakes)):
        raise UserError(*found)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts `where` before the message of a UserError in this block, which does not know it."""
    try:
        yield
    except UserError as error:
        raise UserError(*(f"{where}: {mistake}" for mistake in error.mistakes)) from error


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """A message's ` Did you mean ...?`, or nothing where no known name is near."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(value.lower(), by_lower, n=1)
    found = by_lower[close[0]] if close else value
    return f" Did you mean `{found}`?" if found != value else ""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what has led to it, the latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def short(value: object) -> str:
    """A value in a message: some are as long as a vocabulary."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:96]} ..."


def first_line(error: BaseException) -> str:
    """The first line of a message, by whole words."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return shorten(lines[0] if lines else type(error).__name__, 300, placeholder=" ...")
