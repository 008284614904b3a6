"""Build a cache, on any number of ranks and processes; after a kill at any moment the same call
continues.

The records that a cache lacks are cut into blocks. Workers, which come and go, claim and write them
(see `workers`, `shards`); when all are written, one of the workers turns their journals into the
manifest.

    .building/plan.json    what is being built (see `plan`)
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from ds_distill.cache.format import (
    MANIFEST,
    Fingerprint,
    Index,
    Manifest,
    Teacher,
    file_checksum,
)
from ds_distill.cache.index import KeyIndex, write_index
from ds_distill.cache.plan import BUILDING, Plan, check_same_plan, read_plan, write_plan
from ds_distill.cache.schema import SignalSchema
from ds_distill.cache.shards import close_shard, written
from ds_distill.cache.workers import CLAIMS, WORKERS, Worker, writing
from ds_distill.files import refuse_links_out, sync
from ds_distill.lock import FolderLock

Teachers = Mapping[str, tuple[Fingerprint, SignalSchema]]


def join_build(cache: Path, plan: Plan, teachers: Teachers) -> tuple[Worker, int] | None:
    """Begin the build of a plan, or join the one that is there: blocks that are written are not
    written again. Main process; the others wait for it.

    Returns this process as a worker, and how many blocks, of all teachers together, are already
    written; None where the cache is no longer what the plan was made from, because another build
    of it has finished. Raises UserError when an unfinished build has another plan, or its plan is
    damaged, and for a folder with a link out of it.
    """
    refuse_links_out(cache)
    with _lock(cache):
        manifest = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
        if (manifest.blocks if manifest else 0) != plan.first_block:
            return None
        unfinished = read_plan(cache, manifest)
        if unfinished is not None:
            check_same_plan(cache, unfinished, plan, teachers, writing(cache))
        else:
            _begin(cache, plan, teachers)
        blocks = sum(len(blocks) for name in teachers for blocks in written(cache, name).values())
        return Worker(cache, plan, list(teachers)), blocks


def _begin(cache: Path, plan: Plan, teachers: Teachers) -> None:
    _discard_build(cache)
    for name in teachers:
        (cache / name).mkdir(exist_ok=True)
        sync(cache / name)
    folder = cache / BUILDING
    for part in (folder, folder / WORKERS, folder / CLAIMS):
        part.mkdir()
    sync(folder)
    sync(cache)
    for parent in (cache.parent, cache.parent.parent):
        sync(parent)
    write_plan(cache, plan, teachers)


def finish_build(cache: Path, plan: Plan, teachers: Teachers, worker: Worker) -> None:
    """Add a build whose blocks are all written to the cache, unless another worker has done so.
    Main process of a worker that is closed, as its others are or have given no sign for long."""
    with _lock(cache):
        if not worker.build_goes_on():
            return
        old = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
        if read_plan(cache, old) is None:  # a kill came between the manifest and the tidying up
            _discard_build(cache)
            return
        entries = {}
        for name, (fingerprint, schema) in teachers.items():
            by_file = written(cache, name)
            numbers = {block.number for blocks in by_file.values() for block in blocks}
            wanted = set(range(plan.first_block, plan.first_block + len(plan.blocks)))
            assert numbers == wanted, f"blocks {sorted(wanted ^ numbers)[:5]} of {name}"
            shards = [
                close_shard(cache / name / file, blocks, schema, in_use=worker.in_use(file))
                for file, blocks in by_file.items()
            ]
            sync(cache / name)
            before = old.teachers[name].shards if old else []
            entries[name] = Teacher(fingerprint=fingerprint, signals=schema, shards=before + shards)
        _write_manifest(cache, plan, old, entries)
        _discard_build(cache)


def _write_manifest(
    cache: Path, plan: Plan, old: Manifest | None, teachers: dict[str, Teacher]
) -> None:
    keys, indices = np.concatenate(plan.keys), plan.indices()
    if old is not None:
        index = KeyIndex(cache, old.index.file, old.index.checksum)
        keys = np.concatenate([index.keys, keys])
        indices = np.concatenate([index.all_indices, indices])
    blocks = plan.first_block + len(plan.blocks)
    index_file = cache / f"index-{blocks}.arrow"
    write_index(index_file, keys, indices)
    Manifest(
        examples=len(keys),
        block_rows=plan.block_rows,
        blocks=blocks,
        index=Index(file=index_file.name, checksum=file_checksum(index_file)),
        teachers=teachers,
    ).write(cache)


def remove_leftovers(cache: Path) -> None:
    """Remove the files of builds that are finished or had no plan yet. Main process."""
    with _lock(cache):
        manifest = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
        if read_plan(cache, manifest) is None:
            _discard_build(cache)


def _lock(cache: Path) -> FolderLock:
    """For the short times in which a cache's folder is one worker's alone."""
    return FolderLock(cache, what="cache", wait=True)


def _discard_build(cache: Path) -> None:
    folder = cache / BUILDING
    if folder.exists():
        with suppress(OSError):  # a worker that gave no sign for long may be claiming something
            shutil.rmtree(folder)
    if folder.exists():
        shutil.rmtree(folder)
    _remove_unlisted(cache)


def _remove_unlisted(cache: Path) -> None:
    """Remove shards of builds that never finished, and replaced indexes."""
    listed = set()
    if (cache / MANIFEST).is_file():
        manifest = Manifest.read(cache)
        listed.add(manifest.index.file)
        for name, teacher in manifest.teachers.items():
            listed |= {f"{name}/{shard.file}" for shard in teacher.shards}
    for pattern in ("index-*.arrow", "*/shard-*.arrow"):
        for file in cache.glob(pattern):
            if str(file.relative_to(cache)) not in listed:
                file.unlink()


def known_teachers(cache: Path) -> dict[str, tuple[Fingerprint, SignalSchema]]:
    """The teachers of the unfinished build, else those of the cache, else none.

    Raises UserError when the plan or the cache is damaged, OSError when it cannot be read.
    """
    manifest = Manifest.read(cache) if (cache / MANIFEST).is_file() else None
    unfinished = read_plan(cache, manifest)
    if unfinished is not None:
        return unfinished.teachers
    entries = manifest.teachers if manifest else {}
    return {name: (entry.fingerprint, entry.signals) for name, entry in entries.items()}
