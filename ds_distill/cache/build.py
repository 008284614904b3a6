"""Build a cache, on any number of ranks and processes; after a kill at any moment the same call
continues.

    .building/plan.json          what is built, with all fingerprints (see `build_plan`)
    .building/DIGEST/            of that plan alone: leases, and blocks that are being written
    TEACHER/shard-BLOCK.arrow    a block: there when it is whole, with the plan's digest in its
                                 schema

The records that a cache lacks are cut into blocks. A process leases the next ones for its ranks,
and a lease ends with its process; a block that is there is done. When all are, one of the
processes lists them in the manifest. One that stood still finds its folder gone, and writes no
more.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from filelock import FileLock, Timeout

from ds_distill.cache.build_plan import (
    BUILDING,
    PLAN,
    Plan,
    other_plan,
    plan_content,
    read_plan,
    write_plan,
)
from ds_distill.cache.format import (
    END_OF_STREAM,
    MANIFEST,
    Block,
    Index,
    KeyIndex,
    Manifest,
    Shard,
    Teacher,
    Teachers,
    write_index,
)
from ds_distill.files import checksum, publish_file, refuse_links_out, sync
from ds_distill.process.activity import Tell

LOCK = ".lock"
"""In a cache's folder: held for the moment in which a build begins or ends."""


class Build:
    """A plan that is written to a cache, by this process and any others."""

    def __init__(self, cache: Path, plan: Plan, teachers: Teachers) -> None:
        self._cache, self.plan, self.teachers = cache, plan, teachers
        content = json.dumps(plan_content(plan, teachers), sort_keys=True)
        self._digest = xxhash.xxh3_128_hexdigest(content.encode())
        self._folder = cache / BUILDING / self._digest
        self._leases: dict[tuple[str, int], FileLock] = {}
        self._pending: dict[str, dict[int, None]] = {}
        self._tell = Tell()

    def join(self) -> int | None:
        """Begin the build, or join the one that is there. Main process; the others wait for it.

        Returns how many blocks, of all teachers together, are already written; None where the cache
        is no longer what the plan was made from, because another build of it has finished. Raises
        UserError when an unfinished build has another plan, or its plan is damaged, and for a
        folder with a link out of it.
        """
        refuse_links_out(self._cache)
        with _locked(self._cache):
            manifest = Manifest.read_if_any(self._cache)
            if (manifest.blocks if manifest else 0) != self.plan.first_block:
                return None
            unfinished = read_plan(self._cache, manifest)
            if unfinished is None:
                self._begin()
            elif unfinished.content != plan_content(self.plan, self.teachers):
                raise other_plan(self._cache, unfinished, self.plan, self.teachers)
            self._folder.mkdir(exist_ok=True)
            return sum(len(self.plan.blocks) - len(self.left(name)) for name in self.teachers)

    def _begin(self) -> None:
        _discard_build(self._cache)
        for folder in (*(self._cache / name for name in self.teachers), self._cache / BUILDING):
            folder.mkdir(exist_ok=True)
            sync(folder)
        for folder in (self._cache, self._cache.parent, self._cache.parent.parent):
            sync(folder)
        write_plan(self._cache, self.plan, self.teachers)

    def left(self, teacher: str) -> list[int]:
        """Positions in `plan.blocks` of the blocks that are not written yet, ascending."""
        there = self.there(teacher)
        return [
            at
            for at in range(len(self.plan.blocks))
            if at not in there or self._published(teacher, at) is None
        ]

    def there(self, teacher: str) -> set[int]:
        """Positions of the blocks whose files are there; that of another plan may be."""
        names = set(os.listdir(self._cache / teacher))
        return {at for at in range(len(self.plan.blocks)) if self._file(teacher, at).name in names}

    def claim(self, teacher: str, ranks: int) -> list[int | None] | None:
        """Lease a teacher's next blocks, positions in `plan.blocks`, one for each rank or None.
        Main process.

        All are None as long as other processes write what is left. None: all blocks are written, or
        about to be by this one.
        """
        if not self._goes_on():
            return None
        for key in [key for key in self._leases if self._published(*key)]:
            self._leases.pop(key).release()
        if teacher not in self._pending:
            self._pending[teacher] = dict.fromkeys(self.left(teacher))
        pending = self._pending[teacher]
        claimed: list[int | None] = []
        for at in list(pending):
            if len(claimed) == ranks:
                break
            if self._published(teacher, at):
                del pending[at]
            elif self._lease(teacher, at):
                del pending[at]
                claimed.append(at)
        if claimed:
            self._tell = Tell()
        elif not pending:
            return None
        else:
            self._tell("waiting for blocks that other processes write, until those end")
        return claimed + [None] * (ranks - len(claimed))

    def _lease(self, teacher: str, at: int) -> bool:
        lease = FileLock(self._folder / f"{teacher}.{at:08d}.lock")
        with suppress(Timeout):
            lease.acquire(blocking=False)
            if self._published(teacher, at) is None:
                self._leases[teacher, at] = lease
                return True
            lease.release()
        return False

    def _goes_on(self) -> bool:
        """Whether the build is unfinished; there may be another one of the cache by now."""
        return (self._cache / BUILDING / PLAN).is_file() and self._folder.is_dir()

    def write(self, teacher: str, at: int, batch: pa.RecordBatch, examples: int) -> None:
        """Publish the block at a position of the plan: after the return it survives a power cut.
        Nothing is written where the build has ended without this process.

        Raises OSError; the blocks written before stay, and the same call can be made again.
        """
        message = memoryview(batch.serialize())
        noted = {
            "plan": self._digest,
            "examples": str(examples),
            "checksum": xxhash.xxh3_128_hexdigest(message),
        }
        aside = self._folder / uuid.uuid4().hex
        try:
            with open(aside, "xb") as file:
                file.write(batch.schema.with_metadata(noted).serialize())
                file.write(message)
                file.write(END_OF_STREAM)
            publish_file(aside, self._file(teacher, at))
        except FileNotFoundError:
            if self._goes_on():
                raise
        finally:
            aside.unlink(missing_ok=True)

    def _file(self, teacher: str, at: int) -> Path:
        return self._cache / teacher / f"shard-{self.plan.first_block + at:08d}.arrow"

    def _published(self, teacher: str, at: int) -> Shard | None:
        """A block of this plan, as the manifest lists it; None where it is not there."""
        file = self._file(teacher, at)
        try:
            with pa.OSFile(str(file)) as source:
                noted = pa.ipc.read_schema(source).metadata or {}
                start, size = source.tell(), source.size()
                source.seek(0)
                header = source.read(start)
        except (FileNotFoundError, pa.ArrowInvalid):
            return None
        if noted.get(b"plan") != self._digest.encode():
            return None
        return Shard(
            file=file.name,
            bytes=size,
            checksum=xxhash.xxh3_128_hexdigest(header + END_OF_STREAM),
            blocks=[
                Block(
                    number=self.plan.first_block + at,
                    rows=int(noted[b"examples"]),
                    offset=start,
                    length=size - start - len(END_OF_STREAM),
                    checksum=noted[b"checksum"].decode(),
                )
            ],
        )

    def finish(self) -> None:
        """Add the build to the cache, unless another process has done so. Main process, when all
        ranks have written what was claimed for them."""
        with _locked(self._cache):
            if not self._goes_on():
                return
            old = Manifest.read_if_any(self._cache)
            if read_plan(self._cache, old) is not None:
                self._list_blocks(old)
            _discard_build(self._cache)

    def _list_blocks(self, old: Manifest | None) -> None:
        teachers = {}
        for name, (fingerprint, schema) in self.teachers.items():
            found = [self._published(name, at) for at in range(len(self.plan.blocks))]
            shards = [shard for shard in found if shard is not None]
            assert len(shards) == len(found), f"{len(found) - len(shards)} blocks of {name}"
            before = old.teachers[name] if old else None
            lacks = _not_given(self._cache / name, shards) if schema.lacks_rows else None
            if lacks is not None and before is not None:
                lacks += before.not_given or 0
            teachers[name] = Teacher(
                fingerprint=fingerprint,
                signals=schema,
                shards=[*(before.shards if before else []), *shards],
                not_given=lacks,
            )
        _manifest(self._cache, self.plan, old, teachers).write(self._cache, self._folder)


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
    with _locked(cache):
        if read_plan(cache, Manifest.read_if_any(cache)) is None:
            _discard_build(cache)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Do what one process at a time may do in a cache's folder. It takes a moment."""
    cache.mkdir(parents=True, exist_ok=True)
    lock, tell = FileLock(cache / LOCK), Tell()
    while not lock.is_locked:
        tell(f"waiting for a process that begins or ends a build of {cache}, until it ends")
        with suppress(Timeout):
            lock.acquire(timeout=1)
    try:
        yield
    finally:
        lock.release()


def _discard_build(cache: Path) -> None:
    folder = cache / BUILDING
    if folder.exists():
        with suppress(OSError):  # a process that stood still may be leasing something
            shutil.rmtree(folder)
    if folder.exists():
        shutil.rmtree(folder)
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
