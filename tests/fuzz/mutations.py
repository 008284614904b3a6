"""Changes of files that a stranger, a crash or a careless edit could make."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_FOUND = yaml.safe_load(Path(__file__).with_name("odd.yaml").read_text(encoding="utf-8"))
ODD: list[Any] = [*_FOUND["values"], "a" * 5000]
KEYS: list[Any] = _FOUND["keys"]


def positions(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value within a JSON value, itself included."""
    yield place
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from positions(inner, (*place, key))


def changed(value: Any, draw: random.Random) -> Any:
    """A JSON value with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        *way, last = draw.choice([place for place in positions(value) if place] or [(None,)])
        if last is None:
            return draw.choice(ODD)
        inner = value
        for key in way:
            inner = inner[key]
        kind = draw.randrange(6)
        if kind == 0:
            del inner[last]
        elif kind == 1 and isinstance(inner, dict):
            inner[draw.choice(KEYS)] = draw.choice(ODD)
        elif kind == 2 and isinstance(inner, list):
            inner.append(copy.deepcopy(draw.choice([inner[last], *ODD])))
        elif kind == 3:
            place = draw.choice(list(positions(value)))
            other = value
            for key in place:
                other = other[key]
            inner[last] = copy.deepcopy(other)
        else:
            inner[last] = copy.deepcopy(draw.choice(ODD))
    return value


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes with one to three changes."""
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(content) + 1)
        end = min(len(content), at + draw.choice([1, 1, 4, 30, 400]))
        some = content[at:end]
        kind = draw.randrange(7)
        if kind == 0:
            content = content[:at]
        elif kind == 1:
            content = content[:at] + content[end:]
        elif kind == 2:
            content = content[:at] + some + some + content[end:]
        elif kind == 3:
            content = content[:at] + draw.randbytes(len(some)) + content[end:]
        elif kind == 4:
            odd = [b"\x00", b"\xff\xfe", b"\n", b"\r", b'"', b"{", b"]", b",", b"\t", b": ", b"- "]
            odd += [b"9" * 5000, b"\x1b[2J", "\u202e".encode(), b'"a"b', b"NaN", b"1e999"]
            content = content[:at] + draw.choice(odd) + content[at:]
        elif kind == 5:
            content = content[:at] + b"[" * draw.choice([3, 3000, 10_000]) + content[at:]
        else:
            content = content[end:] + content[:at]
    return content


def changed_json(content: bytes, draw: random.Random) -> bytes:
    """A JSON file changed as a value or as bytes."""
    if draw.random() < 0.3:
        return damaged(content, draw)
    return json.dumps(changed(json.loads(content), draw), default=str).encode(errors="replace")


def changed_lines(content: bytes, draw: random.Random) -> bytes:
    """JSON lines of which some are changed, or bytes are."""
    if draw.random() < 0.4:
        return damaged(content, draw)
    lines = content.splitlines()
    for _ in range(draw.choice([1, 2, len(lines)])):
        at = draw.randrange(len(lines))
        try:
            row = changed(json.loads(lines[at]), draw)
        except ValueError:
            continue
        lines[at] = json.dumps(row, default=str).encode(errors="replace")
    return b"\n".join(lines)


def changed_yaml(content: bytes, draw: random.Random) -> bytes:
    """A YAML file changed as a value or as bytes."""
    if draw.random() < 0.3:
        return damaged(content, draw)
    value = changed(yaml.safe_load(content), draw)
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode(errors="replace")


def gzip_of_one_line(content: bytes, draw: random.Random) -> bytes:
    """A small file of a line of gigabytes, or a damaged one."""
    if draw.random() < 0.9:
        return gzip.compress(damaged(gzip.decompress(content), draw), compresslevel=1)
    return _BOMB


_BOMB = gzip.compress(b"a" * 2**24) * 200
"""3.3 GB of one line, in 3 MB: members of a gzip file follow each other."""


def hostile_node(path: Path, victim: Path, draw: random.Random) -> None:
    """Put a link to a victim, to nothing or to itself, a pipe or a folder in a file's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = draw.randrange(6)
    if kind == 0:
        path.symlink_to(victim)
    elif kind == 1:
        path.symlink_to(victim / "not there")
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        os.mkfifo(path)
    else:
        path.mkdir()
