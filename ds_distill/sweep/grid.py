"""The settings of a sweep: every combination of the values that its arguments list."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product

from ds_distill.errors import UserError

SEED = "seed"
_OPEN, _CLOSE, _QUOTES = "([{", ")]}", "'\""
_BEFORE_A_QUOTE = _OPEN + _QUOTES + ",:"
"""Elsewhere a quote is a letter, as in `it's`. After a quote it stands for one."""


@dataclass(frozen=True)
class Variant:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """KEY=VALUE of each key with several values, in the order of the arguments."""

    @property
    def setting(self) -> tuple[str, ...]:
        """Its overrides without the seed."""
        return tuple(each for each in self.overrides if not each.startswith(f"{SEED}="))

    @property
    def seed(self) -> str | None:
        """None where the sweep has one seed, the recipe's."""
        mine = (each for each in self.overrides if each not in self.setting)
        return next((each.partition("=")[2] for each in mine), None)

    @property
    def name(self) -> str:
        """Of its folder: keys by their last part, and values."""
        pairs = [each.partition("=") for each in self.overrides]
        keys = [key.rpartition(".")[2] for key, _, _ in pairs]
        whole = ",".join(f"{key}={value}" for key, (_, _, value) in zip(keys, pairs, strict=True))
        safe = re.sub(r"[^\w.+=,-]", "_", whole)[:100]
        if safe == whole and len(set(keys)) == len(keys):
            return safe
        return f"{safe}-{hashlib.sha256(','.join(self.overrides).encode()).hexdigest()[:8]}"


def variants(arguments: Sequence[str]) -> tuple[list[str], list[Variant]]:
    """(overrides that all runs have, the runs), the last key's values changing fastest.

    arguments: KEY=A,B,C; a comma inside of brackets or quotes divides nothing. Of
        `losses.kl+cosine` both have the same value in each run.

    Without a key of several values there is one run. Raises UserError where a key or value stands
    twice.
    """
    fixed, swept, seen = [], [], set()
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"{argument}: write KEY=VALUE, or KEY=A,B,C for a run of each.")
        keys = [".".join(parts) for parts in product(*(part.split("+") for part in key.split(".")))]
        for one in keys:
            if one in seen:
                raise UserError(f"{one} is given twice. List its values once: {one}=A,B,C.")
            seen.add(one)
        values = split(text)
        if len(values) == 1:
            fixed += [f"{one}={text}" for one in keys]
            continue
        if len(set(values)) < len(values) or "" in values:
            raise UserError(f"{argument}: a value is empty or stands twice.")
        swept.append([[f"{one}={value}" for one in keys] for value in values])
    return fixed, [Variant(tuple(chain(*chosen))) for chosen in product(*swept)]


def split(text: str) -> list[str]:
    """At its commas, those in brackets and quotes apart.

    Raises UserError where one of these has no end, and a comma may or may not be in it.
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES and (parts[-1].rstrip()[-1:] or ",") in _BEFORE_A_QUOTE:
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    if "," in text and (quote or depth):
        raise UserError(
            f"{text}: a quote or bracket has no end, or no beginning, so that it cannot be told "
            "where values end. Add it, or set a value that holds one in quotes."
        )
    return parts
