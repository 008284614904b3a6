"""The hosts of a run and what is used of each, as DeepSpeed's hostfiles and filters name them."""

from __future__ import annotations

import re
from pathlib import Path

from ds_distill.errors import UserError, did_you_mean

Hosts = dict[str, list[int]]
"""The numbers of the GPUs (or CPU ranks) to use on each host, in the order of the ranks."""

NAME = re.compile(r"([\w.-]+@)?\w[\w.-]*", re.ASCII)
"""No name begins with `-`: ssh would take it for an option."""


def read_hostfile(path: Path) -> Hosts:
    """Read lines `host slots=N`. Raises UserError with the line that is not one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"launch: --hostfile {path} cannot be read: {error}.") from error
    hosts: Hosts = {}
    numbers: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        found = re.fullmatch(r"slots=([0-9]+)", fields[1]) if len(fields) == 2 else None
        if found is None or not NAME.fullmatch(fields[0]):
            raise UserError(f"{path}:{number}: not of the form `host slots=N`: {line!r}.")
        name, slots = fields[0], int(found[1])
        if name in hosts:
            raise UserError(
                f"{path}:{number}: {name} stands in line {numbers[name]} already. Give each host "
                "one line, with the number of all its GPUs."
            )
        if slots == 0:
            raise UserError(
                f"{path}:{number}: {name} has slots=0. Give the number of its GPUs, or take the "
                "line out."
            )
        hosts[name], numbers[name] = list(range(slots)), number
    if not hosts:
        raise UserError(f"launch: --hostfile {path} names no host.")
    return hosts


def choose(hosts: Hosts, include: str | None, exclude: str | None) -> Hosts:
    """The part of the hosts that a filter leaves, in the same order.

    A filter is `HOST[:SLOT,...][@HOST...]`, hosts as the hostfile names them: without slots, all of
    the host. Raises UserError when there are two, when one names what is not there, and when
    nothing is left.
    """
    if include is None and exclude is None:
        return hosts
    if include is not None and exclude is not None:
        raise UserError("launch: give either --include or --exclude, not both.")
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    assert text is not None
    named = _named(hosts, option, text)
    chosen = {
        host: [slot for slot in slots if (slot in named.get(host, ())) == (exclude is None)]
        for host, slots in hosts.items()
    }
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        raise UserError(f"launch: {option} {text} leaves no slot of any host.")
    return chosen


def _named(hosts: Hosts, option: str, text: str) -> dict[str, set[int]]:
    named: dict[str, set[int]] = {}
    for part in _parts(hosts, text):
        host, colon, numbers = part.partition(":")
        if host not in hosts:
            raise UserError(
                f"launch: {option} {text}: the hostfile has no host {host!r}."
                f"{did_you_mean(host, hosts)}"
            )
        slots = numbers.split(",") if colon else [str(slot) for slot in hosts[host]]
        for slot in slots:
            if not slot.isdecimal() or int(slot) not in hosts[host]:
                raise UserError(
                    f"launch: {option} {text}: {host} has no slot {slot!r}; it has "
                    f"0 to {hosts[host][-1]}."
                )
        named.setdefault(host, set()).update(map(int, slots))
    return named


def _parts(hosts: Hosts, text: str) -> list[str]:
    """What a filter says of each host: `@` is between two, and within a name that has a user."""
    parts: list[str] = []
    for part in text.split("@"):
        if parts and f"{parts[-1]}@{part.partition(':')[0]}" in hosts:
            parts[-1] += f"@{part}"
        else:
            parts.append(part)
    return parts


def count_ranks(hosts: Hosts) -> int:
    return sum(map(len, hosts.values()))
