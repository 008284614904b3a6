"""Build a cache, on any number of ranks and processes; after a kill at any moment the same call
continues.

The records that a cache lacks are cut into blocks. Workers, which come and go, claim and write them
(see `workers`, `shards`); when all are written, one of the workers turns their journals into the
manifest.

    .building/plan.json    what is being built (see `plan`)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from ds_distill.cache.build_plan import (
    BUILDING,
    Plan,
    other_plan,
    plan_content,
    read_plan,
    write_plan,
)
from ds_distill.cache.format import (
    MANIFEST,
    Index,
    Manifest,
    Shard,
    Teacher,
    Teachers,
)
from ds_distill.cache.index import KeyIndex, write_index
from ds_distill.cache.shards import WORKERS, close_shard, written, written_to
from ds_distill.cache.workers import CLAIMS, Worker, writing
from ds_distill.files import checksum, refuse_links_out, sync
from ds_distill.process.lock import FolderLock, LockLost

T = TypeVar("T")


def join_build(cache: Path, plan: Plan, teachers: Teachers) -> tuple[Worker, int] | None:
    """Begin the build of a plan, or join the one that is there: blocks that are written are not
    written again. Main process; the others wait for it.

    Returns this process as a worker, and how many blocks, of all teachers together, are already
    written; None where the cache is no longer what the plan was made from, because another build
    of it has finished. Raises UserError when an unfinished build has another plan, or its plan is
    damaged, and for a folder with a link out of it.
    """
    refuse_links_out(cache)
    return _in_lock(cache, lambda lock: _join(cache, plan, teachers, lock))


def _join(
    cache: Path, plan: Plan, teachers: Teachers, lock: FolderLock
) -> tuple[Worker, int] | None:
    manifest = Manifest.read_if_any(cache)
    if (manifest.blocks if manifest else 0) != plan.first_block:
        return None
    unfinished = read_plan(cache, manifest)
    if unfinished is None:
        _begin(cache, plan, teachers, lock)
    elif unfinished.content != plan_content(plan, teachers):
        raise other_plan(cache, unfinished, plan, teachers, writing(cache))
    blocks = sum(len(blocks) for name in teachers for blocks in written(cache, name).values())
    worker = Worker(cache, plan, list(teachers))
    try:
        lock.check_held()  # so its folder is in the build that it has seen
    except LockLost:
        worker.close()
        raise
    return worker, blocks


def _begin(cache: Path, plan: Plan, teachers: Teachers, lock: FolderLock) -> None:
    _discard_build(cache, lock)
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
    _in_lock(cache, lambda lock: _finish(cache, plan, teachers, worker, lock))


def _finish(cache: Path, plan: Plan, teachers: Teachers, worker: Worker, lock: FolderLock) -> None:
    if not worker.build_goes_on():
        return
    old = Manifest.read_if_any(cache)
    if read_plan(cache, old) is None:  # a kill came between the manifest and the tidying up
        _discard_build(cache, lock)
        return
    entries = {}
    for name, (fingerprint, schema) in teachers.items():
        by_file, in_use = written(cache, name), written_to(cache, name)
        numbers = {block.number for blocks in by_file.values() for block in blocks}
        wanted = set(range(plan.first_block, plan.first_block + len(plan.blocks)))
        assert numbers == wanted, f"blocks {sorted(wanted ^ numbers)[:5]} of {name}"
        shards = []
        for file, blocks in by_file.items():
            lock.check_held()
            shards.append(close_shard(cache / name / file, blocks, schema, in_use=file in in_use))
        sync(cache / name)
        before = old.teachers[name] if old else None
        lacks = _not_given(cache / name, shards) if schema.lacks_rows else None
        if lacks is not None and before is not None:
            lacks += before.not_given or 0
        entries[name] = Teacher(
            fingerprint=fingerprint,
            signals=schema,
            shards=[*(before.shards if before else []), *shards],
            not_given=lacks,
        )
    _manifest(cache, plan, old, entries).write(cache, worker.folder)
    _discard_build(cache, lock)


def _not_given(folder: Path, shards: list[Shard]) -> int:
    """Examples of closed shards of which their teacher says nothing."""
    count = 0
    for shard in shards:
        with pa.memory_map(str(folder / shard.file)) as source:
            for batch in pa.ipc.open_stream(source):
                given = batch.column("given")
                if pa.types.is_list(given.type):  # of all words of an example, or of none
                    given = given.values.take(given.offsets[:-1])
                count += int(np.count_nonzero(given.flatten().to_numpy() == 0))
    return count


def _manifest(
    cache: Path, plan: Plan, old: Manifest | None, teachers: dict[str, Teacher]
) -> Manifest:
    keys, indices = np.concatenate(plan.keys), plan.indices()
    if old is not None:
        index = KeyIndex(cache, old.index.file, old.index.checksum)
        keys = np.concatenate([index.keys, keys])
        indices = np.concatenate([index.all_indices, indices])
    blocks = plan.first_block + len(plan.blocks)
    index_file = cache / f"index-{blocks}.arrow"
    write_index(index_file, keys, indices)
    return Manifest(
        examples=len(keys),
        block_rows=plan.block_rows,
        blocks=blocks,
        index=Index(file=index_file.name, checksum=checksum(index_file)),
        teachers=teachers,
    )


def remove_leftovers(cache: Path) -> None:
    """Remove the files of builds that are finished or had no plan yet. Main process."""

    def remove(lock: FolderLock) -> None:
        manifest = Manifest.read_if_any(cache)
        if read_plan(cache, manifest) is None:
            _discard_build(cache, lock)

    _in_lock(cache, remove)


def _in_lock(cache: Path, work: Callable[[FolderLock], T]) -> T:
    """Do what one process at a time may do in a cache's folder. It takes a moment; where it does
    not, because this process stands still, another one takes the lock, and `work` begins again. It
    asks whether the lock is held before each step that the other one's work would not bear."""
    while True:
        with FolderLock(cache, what="cache", wait=True) as lock:
            try:
                return work(lock)
            except Exception:  # what it has read may have been changed meanwhile
                if lock.is_held():
                    raise


def _discard_build(cache: Path, lock: FolderLock) -> None:
    folder = cache / BUILDING
    lock.check_held()
    if folder.exists():
        with suppress(OSError):  # a worker that gave no sign for long may be claiming something
            shutil.rmtree(folder)
    if folder.exists():
        shutil.rmtree(folder)
    _remove_unlisted(cache, lock)


def _remove_unlisted(cache: Path, lock: FolderLock) -> None:
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
                lock.check_held()
                file.unlink()


def known_teachers(cache: Path) -> Teachers:
    """The teachers of the unfinished build, else those of the cache, else none.

    Raises UserError when the plan or the cache is damaged, OSError when it cannot be read.
    """
    manifest = Manifest.read_if_any(cache)
    unfinished = read_plan(cache, manifest)
    if unfinished is not None:
        return unfinished.teachers
    entries = manifest.teachers if manifest else {}
    return {name: (entry.fingerprint, entry.signals) for name, entry in entries.items()}
