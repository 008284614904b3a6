"""The cache's folder: names, versions, fingerprints.

    manifest.json          what it holds, written last: without it there is no cache
    index.npy              sorted content keys, int64 [N, 2]; row i of every teacher is key i's
    TEACHER/shard-*.arrow  Arrow IPC streams with a column `logits`

A manifest lists every file with its rows and xxh3-128 checksum, per teacher the fingerprint of
what its words depend on, and last its own checksum.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from ds_distill.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
INDEX = "index.npy"

Fingerprint = dict[str, Any]
"""weights, tokenizer, max_length, labels, compute dtype: JSON values."""


def file_checksum(path: Path) -> str:
    """xxh3-128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """xxh3-128 of what a manifest says beside its own checksum."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def weights_fingerprint(reference: str, commit: str | None) -> str:
    """What stands for a model's weights: the checksum of a local folder's weight and config
    files, or the commit of a hub model."""
    folder = Path(reference)
    if not folder.is_dir():
        return f"{reference}@{commit}"
    digest = xxhash.xxh3_128()
    for file in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(f"{file.name}:{file_checksum(file)};".encode())
    return digest.hexdigest()


def check_fingerprint(cache: Path, teacher: str, held: Fingerprint, wanted: Fingerprint) -> None:
    """Refuse a teacher's cached words when anything they depend on has changed."""
    for what, value in wanted.items():
        if held.get(what) != value:
            raise UserError(
                f"cache {cache}: teacher {teacher!r} was cached with {what} {held.get(what)!r}, "
                f"and the run has {value!r}. Remove the folder and run the cache phase again."
            )
