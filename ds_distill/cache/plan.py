"""What a build is of: the rows that a cache lacks, and the teachers to be asked for them.

    .building/plan.json      as long as the build is unfinished

An unfinished build goes on by its own plan alone, and nothing but the user drops it: what it
has written may be days of teachers' time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ds_distill.cache.format import Fingerprint, Manifest
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError
from ds_distill.files import read_json, write_json

BUILDING = ".building"
"""A name that no teacher has."""
PLAN = "plan.json"

MIN_BLOCK_ROWS, MAX_BLOCK_ROWS, MAX_BLOCK_BYTES = 256, 8192, 4 << 20
"""A reader checks a block when it touches one row of it, and a kill loses a block at most; but
each costs about 200 bytes in its shard and 80 in the manifest."""

BLOCKS_OF_A_BUILD = 64
"""So many are wanted: what a kill loses is then a small share."""


@dataclass(frozen=True)
class Plan:
    """The rows that a cache lacks, in the order in which they will lie."""

    first_block: int
    """Number of its first block: as many as the cache holds."""
    block_rows: int
    keys: list[np.ndarray]
    """int64 [n, 2] per split, longest example first; a block has rows of one split."""

    def __post_init__(self) -> None:
        assert self.block_rows >= 1 and not self.block_rows & (self.block_rows - 1)

    @property
    def blocks(self) -> list[tuple[int, slice]]:
        """Split and its rows, for each block from the first on."""
        size = self.block_rows
        return [
            (split, slice(start, min(start + size, len(keys))))
            for split, keys in enumerate(self.keys)
            for start in range(0, len(keys), size)
        ]

    @property
    def examples(self) -> int:
        return sum(len(keys) for keys in self.keys)

    def indices(self) -> np.ndarray:
        """Indices of all keys, in their order: uint32 [n]."""
        parts, block = [], self.first_block
        for keys in self.keys:
            first = block * self.block_rows
            parts.append(np.arange(first, first + len(keys), dtype=np.uint32))
            block += -(-len(keys) // self.block_rows)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def to_json(self) -> dict[str, Any]:
        digest = xxhash.xxh3_128()
        for keys in self.keys:
            digest.update(len(keys).to_bytes(8, "big"))
            digest.update(np.ascontiguousarray(keys).tobytes())
        return {
            "first_block": self.first_block,
            "block_rows": self.block_rows,
            "examples": self.examples,
            "keys": digest.hexdigest(),
        }


def block_rows_for(examples: int, row_bytes: int) -> int:
    """Examples of a block: a power of two that is a small share of them and of few bytes.

    row_bytes: of an example, as well as it is known.
    """
    wanted = min(max(examples // BLOCKS_OF_A_BUILD, MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)
    limit = min(wanted, MAX_BLOCK_BYTES // max(row_bytes, 1))
    return 1 << max(limit, 1).bit_length() - 1


@dataclass(frozen=True)
class Written:
    """A plan as it lies in the folder of an unfinished build."""

    content: dict[str, Any]
    teachers: dict[str, tuple[Fingerprint, SignalSchema]]


def write_plan(
    cache: Path, plan: Plan, teachers: Mapping[str, tuple[Fingerprint, SignalSchema]]
) -> None:
    write_json(cache / BUILDING / PLAN, _content(plan, teachers))


def read_plan(cache: Path, manifest: Manifest | None) -> Written | None:
    """The plan of a cache's unfinished build. None where there is none, be it that it was killed
    before its plan was whole, or finished and then killed before its folder was removed.

    manifest: of the cache as it is.
    Raises UserError when the plan is damaged, OSError when it cannot be read.
    """
    file = cache / BUILDING / PLAN
    try:
        content = read_json(file)
        teachers = {
            name: (entry["fingerprint"], SignalSchema.model_validate(entry["signals"]))
            for name, entry in content["teachers"].items()
        }
        finished = manifest is not None and content["first_block"] < manifest.blocks
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file}: the plan of an unfinished build is damaged (it is not what a build wrote), "
            f"so the build cannot go on. Remove {file.parent} and build again: what that build "
            "has written is lost."
        ) from error
    return None if finished else Written(content, teachers)


def check_same_plan(
    cache: Path, held: Written, plan: Plan, teachers: Mapping[str, tuple[Fingerprint, SignalSchema]]
) -> None:
    """Refuse to go on with an unfinished build of something else. Raises UserError."""
    wanted = _content(plan, teachers)
    if held.content == wanted:
        return
    folder = cache / BUILDING
    raise UserError(
        f"cache {cache}: an unfinished build lies in {folder}, and it was begun with "
        f"{_difference(held.content, wanted)}. Go on with what it was begun with, name another "
        f"folder (phases.cache.folder), or remove {folder} to start anew: what that build has "
        "written is lost then."
    )


def _content(
    plan: Plan, teachers: Mapping[str, tuple[Fingerprint, SignalSchema]]
) -> dict[str, Any]:
    described = {
        name: {"fingerprint": fingerprint, "signals": schema.model_dump(mode="json")}
        for name, (fingerprint, schema) in teachers.items()
    }
    # As it is read back: JSON has no tuples, and no keys but text.
    return {"teachers": json.loads(json.dumps(described)), **plan.to_json()}


_PLAIN_NAMES = {
    "examples": "the number of examples",
    "keys": "the content keys of the examples",
    "first_block": "the number of blocks in the cache",
    "block_rows": "the examples of a block",
}


def _difference(held: Any, wanted: Any, *path: str) -> str:
    """The first path where two plans differ, with both values."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in held if key not in wanted)]:
            if held.get(key) != wanted.get(key):
                return _difference(held.get(key), wanted.get(key), *path, key)
    if path[0] != "teachers":
        return f"another value for {_PLAIN_NAMES.get(path[0], path[0])}: {held}, not {wanted}"
    if len(path) == 2:
        return f"{'no' if held is None else 'a'} teacher {path[1]!r}"
    what = " ".join(path[3:])  # after the teacher's name: `fingerprint` or `signals`
    return f"teacher {path[1]!r} with {what} {_short(held)}, not {_short(wanted)}"


def _short(value: Any) -> str:
    """Some values, as a fitted tail's, are as long as a vocabulary."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
