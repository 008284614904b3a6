"""The one exception for mistakes that the user can fix."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any, NamedTuple


class Mistake(NamedTuple):
    """One thing that the user can fix: its text is `at: what`."""

    at: str
    """Where: a key as overrides have it, alone or with its value (`phases.distil.start`,
    `deepspeed=zero9`), or a file and line."""
    what: str
    """The value given, the rule it breaks, and the fix."""

    def __str__(self) -> str:
        return f"{self.at}: {self.what}" if self.at else self.what


class UserError(Exception):
    """Wrong input. The command line prints the message as one paragraph and exits with 2.

    A message names the file or key, the value given, the rule it breaks, and the fix.
    """

    def __init__(self, *mistakes: Mistake | str, at: str = "") -> None:
        """at: where those are of which only this tells it."""
        self.mistakes = [Mistake(at, one) if isinstance(one, str) else one for one in mistakes]
        super().__init__(*self.mistakes)

    def __str__(self) -> str:
        if len(self.mistakes) == 1:
            return str(self.mistakes[0])
        lines = [f"{number}. {mistake}" for number, mistake in enumerate(self.mistakes, 1)]
        return "\n".join([f"{len(lines)} mistakes:", *lines, "Nothing was started."])


def refuse(
    mistakes: Iterable[Mistake], line_of: Callable[[str], str | None] = lambda key: None
) -> None:
    """Raises UserError with all mistakes; nothing without any. What is wrong in several places is
    told once, with all of them.

    line_of: gives the file and line of a key, which then stand before it.
    """
    places: dict[str, dict[str, None]] = {}
    for at, what in mistakes:
        places.setdefault(what, {})[at] = None
    found = []
    for what, several in places.items():
        line = line_of(next(iter(several)).partition("=")[0])
        at = "" if "" in several else ", ".join(several)
        found.append(Mistake(at if line is None else f"{line}  {at}", what))
    if found:
        raise UserError(*found)


@contextmanager
def collecting(found: list[Mistake], at: str = "") -> Iterator[None]:
    """Adds what a UserError in this block tells to the mistakes that were found; at: where, if it
    does not know it."""
    try:
        yield
    except UserError as error:
        found += [Mistake(at, str(one)) if at else one for one in error.mistakes]


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts `where` before the message of a UserError in this block, which does not know it."""
    try:
        yield
    except UserError as error:
        raise UserError(*(Mistake(where, str(mistake)) for mistake in error.mistakes)) from error


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


def short(value: object, form: Callable[[Any], str] = repr) -> str:
    """A value in a message, as `form` writes it: some are as long as a vocabulary."""
    text = form(value)
    return text if len(text) <= 100 else f"{text[:96]} ..."


def first_line(error: BaseException) -> str:
    """The first line of a message, by whole words."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return shorten(lines[0] if lines else type(error).__name__, 300, placeholder=" ...")
