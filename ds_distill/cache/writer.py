"""Write what teachers said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ds_distill.cache.format import (
    FORMAT,
    INDEX,
    MANIFEST,
    Fingerprint,
    file_checksum,
    manifest_checksum,
)
from ds_distill.errors import UserError
from ds_distill.files import new_folder, write_json

BATCH_ROWS = 16_384
"""Rows of an Arrow record batch."""


def write_cache(
    path: Path,
    keys: np.ndarray,
    logits: Mapping[str, np.ndarray],
    fingerprints: Mapping[str, Fingerprint],
    dtype: str,
) -> int:
    """Write a cache folder at once; examples with the same key share a row.

    keys: int64 [N, 2] content keys; logits: float [N, C] by teacher; dtype: `float32` or
    `float16`, as stored. Returns the number of rows.

    Raises UserError when a teacher said something that is not finite, or that `dtype` cannot
    hold.
    """
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
    kept = order[fresh]
    with new_folder(path) as folder:
        np.save(folder / INDEX, keys[kept], allow_pickle=False)
        teachers = {}
        for name, values in logits.items():
            said = values[kept]
            with np.errstate(over="ignore"):  # found below
                stored = said.astype(dtype)
            broken = np.flatnonzero(~np.isfinite(stored).all(axis=1))
            if len(broken):
                mend = (
                    "Set the cache phase's dtype to float32."
                    if np.isfinite(said).all()
                    else "Its weights are damaged or its training diverged."
                )
                raise UserError(
                    f"teacher {name!r} gave logits that are not finite in {dtype} for "
                    f"{len(broken)} of {len(kept)} examples, e.g. key "
                    f"{keys[kept[broken[0]]].tolist()}. {mend}"
                )
            (folder / name).mkdir()
            file = folder / name / "shard-00000.arrow"
            _write_stream(file, stored)
            teachers[name] = {
                "fingerprint": fingerprints[name],
                "dtype": dtype,
                "shards": [{"file": file.name, "rows": len(kept), "checksum": file_checksum(file)}],
            }
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "rows": len(kept),
            "index": {"file": INDEX, "checksum": file_checksum(folder / INDEX)},
            "teachers": teachers,
        }
        manifest["checksum"] = manifest_checksum(manifest)
        write_json(folder / MANIFEST, manifest)
    return len(kept)


def _write_stream(file: Path, values: np.ndarray) -> None:
    kind = pa.list_(pa.from_numpy_dtype(values.dtype), values.shape[1])
    schema = pa.schema([("logits", kind)])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        for start in range(0, len(values), BATCH_ROWS):
            rows = np.ascontiguousarray(values[start : start + BATCH_ROWS])
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), values.shape[1])
            stream.write_batch(pa.record_batch([column.cast(kind)], schema=schema))
