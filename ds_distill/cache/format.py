"""The cache's folder: names, manifest, index, checksums, fingerprints.

    manifest.json            what it holds; replaced at once when a build ends
    index-*.arrow            sorted content keys and their record indices
    TEACHER/shard-*.arrow    Arrow IPC streams, one record batch per block of examples
    .building/               an unfinished build (see `build`)

Record r is in block r // block_rows of every teacher. A manifest lists the offset, length and
xxh3-128 checksum of each block, so that a reader checks only the blocks that it reads; for each
teacher a fingerprint of everything that its signals depend on; and its own checksum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError
from ds_distill.files import checksum, new_file, publish_file, read_json
from ds_distill.keys import find_keys

FORMAT = 3
MANIFEST = "manifest.json"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The last bytes of a shard."""

Fingerprint = dict[str, Any]
"""What a teacher's signals depend on: weights, tokenizer, max_length, labels or masking, dtype;
JSON values."""
Teachers = Mapping[str, tuple[Fingerprint, SignalSchema]]
"""Name -> what its cached signals depend on, and how they are stored."""

Count = Annotated[int, Field(ge=0, strict=True)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""A plain file name, which cannot lead out of its folder."""


class Block(NamedTuple):
    """One record batch of a shard: offset, length and checksum of its message."""

    number: Count
    rows: Count
    """Number of examples: the cache's block_rows, fewer at the end of a split."""
    offset: Count
    length: Count
    checksum: str


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shard(_Part):
    """One Arrow stream file: schema, blocks, end of stream."""

    file: FileName
    bytes: Count
    checksum: str
    """Of the bytes before the first block (the schema) and after the last one (the end)."""
    blocks: Annotated[list[Block], Field(min_length=1)]


class Teacher(_Part):
    """One teacher's part of a cache."""

    fingerprint: Fingerprint
    signals: SignalSchema
    shards: list[Shard]
    not_given: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Examples of which it says nothing, of a teacher whose predictions are in a file."""


class Index(_Part):
    """The file that maps content keys to records."""

    file: FileName
    checksum: str


class Manifest(_Part):
    """The content of manifest.json."""

    format: int = FORMAT
    examples: Count
    block_rows: Annotated[int, Field(ge=1, strict=True)]
    blocks: Count
    """Number of blocks of each teacher; the next build continues with this number."""
    index: Index
    teachers: Annotated[dict[FileName, Teacher], Field(min_length=1)]

    def write(self, cache: Path, aside: Path) -> None:
        """Replace a cache's manifest. Raises FileNotFoundError, and replaces none, where its build
        has ended.

        aside: a folder of the build, which ends with it: the process may stand still, while another
            one finishes the build and begins the next.
        """
        content = self.model_dump(mode="json")
        text = json.dumps({**content, "checksum": _checksum(content)}, ensure_ascii=False)
        file = aside / MANIFEST
        file.write_text(text + "\n", encoding="utf-8")
        publish_file(file, cache / MANIFEST)

    @staticmethod
    def read_if_any(cache: Path) -> Manifest | None:
        """Raises UserError when there is one, and it is damaged or of another format."""
        return Manifest.read(cache) if (cache / MANIFEST).is_file() else None

    @staticmethod
    def read(cache: Path) -> Manifest:
        """Raises UserError when the manifest is missing, damaged, or of another format."""
        if not (cache / MANIFEST).is_file():
            raise UserError(
                f"cache {cache}: no {MANIFEST}, so no build of it has finished. "
                "Build it: ds-distill cache build RECIPE"
            )
        try:
            content = read_json(cache / MANIFEST)
            version = content["format"]
            if (
                version != FORMAT
            ):  # before the checksum, which other formats may compute differently
                raise UserError(
                    f"cache {cache}: has format {version}; this version reads format {FORMAT}. "
                    "Remove the folder and build it again."
                )
            if content.pop("checksum") != _checksum(content):
                raise damaged(cache, MANIFEST)
            return Manifest.model_validate(content)
        except _NOT_A_MANIFEST as error:
            raise damaged(cache, MANIFEST) from error


_NOT_A_MANIFEST = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading any other file raises; pydantic's errors are ValueErrors."""


def damaged(cache: Path, file: str) -> UserError:
    return UserError(
        f"cache {cache}: {file} is missing or damaged (not as the build wrote it). Remove the "
        "folder and build the cache again."
    )


def _checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def weights_fingerprint(reference: str, commit: str | None) -> str:
    """Fingerprint of a model's weights: the checksum of a local folder's weight and config files,
    or the commit of a hub model."""
    folder = Path(reference)
    if not folder.is_dir():
        return f"{reference}@{commit}"
    digest = xxhash.xxh3_128()
    for file in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        digest.update(f"{file.name}:{checksum(file)};".encode())
    return digest.hexdigest()


def check_fingerprint(cache: Path, teacher: str, stored: Fingerprint, wanted: Fingerprint) -> None:
    """Raises UserError when anything that a teacher's cached signals depend on has changed."""
    for what, value in wanted.items():
        if stored.get(what) != value:
            raise UserError(
                f"cache {cache}: teacher {teacher!r} was cached with {what} {stored.get(what)!r}, "
                f"and the run has {value!r}. Remove the folder, or name another one "
                "(phases.cache.folder), and build the cache again."
            )


SCHEMA = pa.schema([("key_hi", pa.int64()), ("key_lo", pa.int64()), ("row", pa.uint32())])


def write_index(file: Path, keys: np.ndarray, indices: np.ndarray) -> None:
    """Write an index of distinct keys. keys: int64 [N, 2]; indices: uint32 [N].

    Arrow IPC stream of one record batch, sorted by key. Synced; no manifest refers to it yet.
    """
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    columns = [pa.array(column[order]) for column in (keys[:, 0], keys[:, 1], indices)]
    del order
    with (
        new_file(file) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_stream(sink, SCHEMA) as stream,
    ):
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


class KeyIndex:
    """An index file, memory-mapped."""

    def __init__(self, cache: Path, name: str, written: str) -> None:
        """written: the file's checksum then.

        Raises UserError when the file is missing or damaged, OSError when it cannot be read.
        """
        self._cache = cache
        file = cache / name
        if not file.is_file() or checksum(file) != written:
            raise damaged(cache, name)
        with pa.memory_map(str(file)) as source:
            [batch] = list(pa.ipc.open_stream(source))
        self._hi, self._lo, self._rows = (column.to_numpy() for column in batch.columns)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> np.ndarray:
        """All keys, sorted: int64 [N, 2]."""
        return np.stack([self._hi, self._lo], axis=1)

    @property
    def all_indices(self) -> np.ndarray:
        """The record indices of `keys`: uint32 [N]."""
        return self._rows

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Record indices of keys, -1 where a key is missing: int64 [B, 2] -> int64 [B]."""
        positions = find_keys(self._hi, self._lo, keys)
        if not len(self):
            return positions
        return np.where(positions < 0, -1, self._rows[positions].astype(np.int64))

    def indices(self, keys: torch.Tensor) -> np.ndarray:
        """Record indices of keys: int64 [B, 2] -> int64 [B].

        Raises UserError when a key is missing.
        """
        wanted = keys.numpy()
        indices = self.find(wanted)
        missing = wanted[indices < 0]
        if len(missing):
            shown = ", ".join(str(key.tolist()) for key in missing[:3])
            raise UserError(
                f"cache {self._cache}: lacks {len(missing)} of {len(wanted)} examples, e.g. with "
                f"the keys {shown}. The data changed since it was built: build it again, which "
                "adds the missing examples."
            )
        return indices
