"""The plan of a build: the records that a cache lacks, and the teachers that will run on them.

    .building/plan.json      exists while the build is unfinished

An unfinished build continues only with the same plan, and only the user deletes it: it may hold
days of the teachers' inference.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ds_distill.cache.format import Manifest, Teachers
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError, short
from ds_distill.files import read_json, write_json

BUILDING = ".building"
"""Teachers cannot have this name."""
PLAN = "plan.json"

MIN_BLOCK_ROWS, MAX_BLOCK_ROWS, MAX_BLOCK_BYTES = 256, 8192, 4 << 20
"""Small blocks are better for readers, which check the whole block of a record, and for kills,
which lose at most a block per rank; but a block is a file, with about 600 bytes around its rows and
230 in the manifest."""

MOST_BLOCKS = 1 << 14
"""Of a build, where rows are large: Linux maps at most 65,530 files at once."""

BLOCKS_OF_A_BUILD = 64
"""The aim, where the limits above allow it: a kill then loses a small share."""


@dataclass(frozen=True)
class Plan:
    """The records that a cache lacks, in the order in which they will be stored."""

    first_block: int
    """Number of the first new block: the number of blocks in the cache."""
    block_rows: int
    keys: list[np.ndarray]
    """int64 [n, 2] per split, longest example first; a block belongs to one split."""

    def __post_init__(self) -> None:
        assert self.block_rows >= 1 and not self.block_rows & (self.block_rows - 1)

    @cached_property
    def blocks(self) -> list[tuple[int, slice]]:
        """Split and its slice of `keys`, for each new block in order."""
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
        """Record indices of all keys, in their order: uint32 [n]."""
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
    """Examples per block: a power of two, a small share of `examples`, and few bytes.

    row_bytes: estimated bytes of an example.
    """
    wanted = min(max(examples // BLOCKS_OF_A_BUILD, MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)
    most_bytes = max(MAX_BLOCK_BYTES, examples * row_bytes // MOST_BLOCKS)
    limit = min(wanted, most_bytes // max(row_bytes, 1))
    return 1 << max(limit, 1).bit_length() - 1


@dataclass(frozen=True)
class Written:
    """The plan in the folder of an unfinished build."""

    content: dict[str, Any]
    teachers: Teachers


def write_plan(cache: Path, plan: Plan, teachers: Teachers) -> None:
    write_json(cache / BUILDING / PLAN, plan_content(plan, teachers))


def read_plan(cache: Path, manifest: Manifest | None) -> Written | None:
    """The plan of a cache's unfinished build. None without one: also when a build was killed before
    its plan was written, or finished and was killed before its folder was removed.

    manifest: of the cache, if it has one.
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
            f"{file}: the plan of an unfinished build is damaged (not as the build wrote it), so "
            f"the build cannot continue. Remove {file.parent} and build again: what that build has "
            "written is lost."
        ) from error
    return None if finished else Written(content, teachers)


def other_plan(cache: Path, unfinished: Written, plan: Plan, teachers: Teachers) -> UserError:
    """What to tell where an unfinished build has another plan."""
    folder = cache / BUILDING
    return UserError(
        f"cache {cache}: {folder} holds an unfinished build that was started with "
        f"{_difference(unfinished.content, plan_content(plan, teachers))}. Continue with what it "
        "was started with, wait until other processes that write it have ended, name another "
        f"folder (phases.cache.folder), or remove {folder} to start again: what that build has "
        "written is then lost."
    )


def plan_content(plan: Plan, teachers: Teachers) -> dict[str, Any]:
    described = {
        name: {"fingerprint": fingerprint, "signals": schema.model_dump(mode="json")}
        for name, (fingerprint, schema) in teachers.items()
    }
    # As it will be read back: JSON turns tuples into lists and keys into text.
    return {"teachers": json.loads(json.dumps(described)), **plan.to_json()}


_PLAIN_NAMES = {
    "examples": "the number of examples",
    "keys": "the content keys of the examples",
    "first_block": "the number of blocks in the cache",
    "block_rows": "the examples per block",
}


def _difference(stored: Any, wanted: Any, *path: str) -> str:
    """The first key where two plans differ, with both values."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in stored if key not in wanted)]:
            if stored.get(key) != wanted.get(key):
                return _difference(stored.get(key), wanted.get(key), *path, key)
    if path[0] != "teachers":
        return f"another value for {_PLAIN_NAMES.get(path[0], path[0])}: {stored}, not {wanted}"
    if len(path) == 2:
        return f"{'no' if stored is None else 'a'} teacher {path[1]!r}"
    what = " ".join(path[3:])  # after the teacher's name: `fingerprint` or `signals`
    return f"teacher {path[1]!r} with {what} {short(stored)}, not {short(wanted)}"
