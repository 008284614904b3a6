"""A manifest that no build writes is refused when it is read, also where its checksum fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_files import make_keys, manifest_of, write_cache, write_manifest

from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Blocks of 8 and of 4 examples."""
    schemas = {"t": SignalSchema(dtype="float32", classes=3)}
    write_cache(tmp_path / "cache", make_keys(12), schemas, block_rows=8)
    return tmp_path / "cache"


HUGE = 2**70


def at(*path: str | int) -> Callable[[Any, Any], None]:
    """Sets the value at a path of a manifest."""

    def put(content: Any, value: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    return put


SHARD = ("teachers", "t", "shards", 0)
FORGED = [
    *((at(*SHARD, "file"), name) for name in ("../x", "/etc/passwd", "a/b", "", ".", "x\n")),
    *((at("index", "file"), name) for name in ("../index-2.arrow", "/etc/passwd", "t/../x")),
    *((at("teachers"), {name: None}) for name in ("..", "/tmp", "a/b", "")),
    (at("teachers"), {}),
    *((at("block_rows"), value) for value in (0, -8, 7, 4, 2**32, HUGE, "8", 8.5, None)),
    *((at("blocks"), value) for value in (0, 1, 3, -1, 2**40, HUGE, None)),
    *((at("examples"), value) for value in (0, 11, 13, HUGE)),
    *((at(*SHARD, "blocks", 0, 0), value) for value in (1, 2, -1, HUGE)),
    *((at(*SHARD, "blocks", 0, 1), value) for value in (0, 7, 9, -8, HUGE)),
    *((at(*SHARD, "blocks", 1, 2), value) for value in (0, 8, -8, 2**40, HUGE)),
    *((at(*SHARD, "blocks", 1, 3), value) for value in (0, 8, -8, 2**40, HUGE)),
    *((at(*SHARD, "bytes"), value) for value in (0, 8, 2**40, HUGE)),
    (at(*SHARD, "blocks"), []),
    (at("teachers", "t", "shards"), []),
    (at("teachers", "t", "signals"), {"dtype": "float16", "classes": 0}),
    (at("teachers", "t", "signals"), {"dtype": "object", "classes": 3}),
    (at("teachers", "t", "signals"), {"dtype": "float16", "classes": 3, "mask_variants": 0}),
]


@pytest.mark.parametrize("case", range(len(FORGED)))
def test_manifests_that_no_build_writes_are_refused(case, cache):
    put, value = FORGED[case]
    manifest = manifest_of(cache)
    if isinstance(value, dict) and None in value.values():
        value = dict.fromkeys(value, manifest["teachers"]["t"])
    put(manifest, value)
    write_manifest(cache, manifest)
    with pytest.raises(UserError, match=r"manifest\.json is"):
        CacheReader(cache)


@pytest.mark.parametrize("how", ["twice", "missing", "overlap", "other teacher", "two shards"])
def test_blocks_must_be_there_once_each(how, cache):
    manifest = manifest_of(cache)
    teachers = manifest["teachers"]
    [shard] = teachers["t"]["shards"]
    first, second = shard["blocks"]
    if how == "twice":
        shard["blocks"] = [first, [first[0], *second[1:]]]
    elif how == "missing":
        shard["blocks"] = [first]
    elif how == "overlap":
        shard["blocks"] = [first, [second[0], second[1], *first[2:]]]
    elif how == "other teacher":  # whose blocks hold other numbers of rows
        changed = [[0, 4, *first[2:]], [1, 8, *second[2:]]]
        teachers["u"] = {**teachers["t"], "shards": [{**shard, "blocks": changed}]}
        shutil.copytree(cache / "t", cache / "u")
    else:
        teachers["t"]["shards"] = [shard, shard]
    write_manifest(cache, manifest)
    with pytest.raises(UserError, match=r"manifest\.json is"):
        CacheReader(cache)
