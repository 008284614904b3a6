"""Builds: what one adds, how much room it takes, who may write. One that is killed at any
moment goes on where it was, and ends with the same blocks, byte for byte, in other files."""

import errno
import os
import random
import shutil
import signal
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cache_files import (
    PRINT,
    TWO,
    block_checksums,
    check_rows,
    contents,
    make_keys,
    published,
    write_block,
    write_cache,
)
from processes import fork

from ds_distill.cache import build
from ds_distill.cache.build import Build, known_teachers
from ds_distill.cache.build_plan import BUILDING, Plan, block_rows_for
from ds_distill.cache.codecs import CompactCodec, TailShape
from ds_distill.cache.format import MANIFEST, Manifest
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.caching.build import missing_from
from ds_distill.data.batches import Units
from ds_distill.errors import UserError


@pytest.fixture
def cache(tmp_path):
    """Two teachers on 50 examples."""
    path, keys = tmp_path / "cache", make_keys(50)
    write_cache(path, keys, TWO)
    return path, keys


def test_a_superset_adds_what_is_missing_and_touches_nothing_else(cache):
    path, keys = cache
    before = contents(path)
    more = np.concatenate([make_keys(30, "more "), keys])
    write_cache(path, more, TWO, block_rows=64, ranks=2)
    after = contents(path)
    shards = {name for name in before if "shard" in name}
    assert {name: after[name] for name in shards} == {name: before[name] for name in shards}
    assert len([name for name in after if "shard" in name]) == 2 * (7 + 4)
    assert len(after) == 22 + 2  # the manifest and one index
    assert CacheReader(path).manifest.examples == 80
    check_rows(path, more, TWO)
    CacheReader(path).verify()
    write_cache(path, more[::-1], TWO)
    assert contents(path) == after


@pytest.mark.parametrize(
    ("schemas", "fingerprint", "message"),
    [
        ({**TWO, "third": TWO["first"]}, PRINT, "no teacher 'third', only first, second"),
        (TWO, {**PRINT, "weights": "w2"}, "weights 'w1', and the run has 'w2'"),
        (
            {**TWO, "second": SignalSchema(dtype="float16", classes=5)},
            PRINT,
            r"hidden \{-1: 4\}, and the run has \{\}",
        ),
        (
            {**TWO, "first": SignalSchema(dtype="float32", classes=3, mask_variants=2)},
            PRINT,
            "mask_variants None, and the run has 2",
        ),
    ],
)
def test_rows_of_others_are_not_added(cache, schemas, fingerprint, message):
    path, _ = cache
    before = contents(path)
    with pytest.raises(UserError, match=message):
        write_cache(path, make_keys(60), schemas, fingerprint=fingerprint)
    assert contents(path) == before


def test_rows_are_added_by_the_same_attention_alone(cache):
    path, keys = cache
    write_cache(path.with_name("other"), keys, TWO, fingerprint={**PRINT, "attention": "kernel 1"})
    path = path.with_name("other")
    now = {name: ({**PRINT, "attention": "padded"}, schemas) for name, schemas in TWO.items()}

    def split(keys):
        collate = SimpleNamespace(lengths=np.full(len(keys), 7))
        return Units.plain(torch.from_numpy(keys), np.zeros(len(keys), dtype=np.int64)), collate

    plan, _ = missing_from(path, [split(keys[::2])], now)
    assert plan.examples == 0
    with pytest.raises(UserError, match="with attention 'kernel 1', and the run has 'padded'"):
        missing_from(path, [split(make_keys(51))], now)
    same = {name: ({**PRINT, "attention": "kernel 1"}, schemas) for name, schemas in TWO.items()}
    assert missing_from(path, [split(make_keys(51))], same)[0].examples == 1


def test_class_logits_cost_two_bytes_each_and_at_most_36_more(tmp_path):
    """24 of 400,000 examples, whose blocks are of more rows."""
    examples, classes, teachers = 20_000, 6, 3
    schemas = {
        f"teacher-{n}": SignalSchema(dtype="float16", classes=classes) for n in range(teachers)
    }
    rows = block_rows_for(examples, 2 * classes)
    write_cache(tmp_path / "cache", make_keys(examples), schemas, block_rows=rows, ranks=8)
    size = sum(len(content) for content in contents(tmp_path / "cache").values())
    assert size <= examples * (2 * classes * teachers + 36)
    check_rows(tmp_path / "cache", make_keys(examples)[::97], schemas)


FITTED = TailShape.fit([torch.randn(40, 50, generator=torch.Generator().manual_seed(0))], 0.1)
LM = {"dtype": "float16", "classes": 50, "mask_variants": 2, "temperature": 2.0}
BEGUN = {
    "first": SignalSchema(dtype="float32", classes=3, mask_variants=2),
    "lm": SignalSchema(codec=CompactCodec(50, 0.1).to_json(), **LM),
}


@pytest.fixture
def started(tmp_path):
    """A cache with 20 examples, and an unfinished build of 20 others with one block written."""
    path = tmp_path / "cache"
    write_cache(path, make_keys(20), BEGUN)
    plan = Plan(3, 8, [make_keys(20, "more ")])
    write_block(join(path, plan, BEGUN, kept=0), "first", 0)
    join(path, plan, BEGUN, kept=1)
    return path, plan


def join(path, plan, schemas, kept):
    build = Build(path, plan, with_fingerprint(schemas))
    assert build.join() == kept
    return build


def with_fingerprint(schemas, **changes):
    return {name: ({**PRINT, **changes}, kept) for name, kept in schemas.items()}


@pytest.mark.parametrize(
    ("keys", "first_block", "schemas", "changes", "message"),
    [
        (make_keys(19, "more "), 3, BEGUN, {}, "the number of examples: 20, not 19"),
        (make_keys(20, "other "), 3, BEGUN, {}, "the content keys of the examples: "),
        (None, 3, BEGUN, {"max_length": 64}, "teacher 'first' with max_length 128, not 64"),
        (None, 3, {"lm": BEGUN["lm"]}, {}, "started with a teacher 'first'"),
        (
            None,
            3,
            {**BEGUN, "lm": SignalSchema(codec=CompactCodec(50, 0.1, FITTED).to_json(), **LM)},
            {},
            "teacher 'lm' with codec tail None, not {'step': ",
        ),
    ],
)
def test_an_unfinished_build_of_something_else_is_refused(
    started, keys, first_block, schemas, changes, message
):
    path, plan = started
    before = contents(path)
    other = Plan(first_block, 8, [plan.keys[0] if keys is None else keys])
    with pytest.raises(UserError) as refused:
        Build(path, other, with_fingerprint(schemas, **changes)).join()
    text = str(refused.value)
    assert message in text and f"remove {path / BUILDING} to start again" in text
    assert len(text) < 700
    assert contents(path) == before
    shutil.rmtree(path / BUILDING)  # as the message says
    write_cache(path, np.concatenate([make_keys(20), make_keys(20, "other ")]), BEGUN)
    check_rows(path, make_keys(20, "other "), {"first": BEGUN["first"]})


@pytest.mark.parametrize("name", [f"{BUILDING}/plan.json", "first/shard-00000003.arrow"])
def test_a_read_that_fails_is_reported_and_nothing_is_deleted(started, name, monkeypatch):
    path, plan = started
    # The link by which a test makes an input/output error would be refused for where it leads.
    monkeypatch.setattr(build, "refuse_links_out", lambda cache: None)
    file, aside = path / name, path.with_name("aside")
    file.rename(aside)
    file.symlink_to("/proc/self/mem")  # reading its first byte is an input/output error
    left = sorted(path.rglob("*"))
    with pytest.raises(OSError) as failed:
        known_teachers(path)
        Build(path, plan, with_fingerprint(BEGUN)).join()
    assert failed.value.errno == errno.EIO
    assert sorted(path.rglob("*")) == left
    aside.replace(file)
    join(path, plan, BEGUN, kept=1)
    write_cache(path, np.concatenate([make_keys(20), *plan.keys]), BEGUN)
    check_rows(path, plan.keys[0], {"first": BEGUN["first"]})


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"teachers": 3}', "\udcff"])
def test_a_damaged_plan_is_refused(started, text):
    path, plan = started
    (path / BUILDING / "plan.json").write_text(text, errors="surrogateescape")
    before = contents(path)
    for read in (known_teachers, lambda path: join(path, plan, BEGUN, kept=1)):
        with pytest.raises(UserError, match=f"damaged .* Remove {path / BUILDING} and build again"):
            read(path)
    assert contents(path) == before


def test_what_a_finished_build_left_is_no_unfinished_one(started):
    """A kill after the manifest was written and before the build's folder was removed."""
    path, plan = started
    keys = np.concatenate([make_keys(20), *plan.keys])
    shutil.copytree(path / BUILDING, path.with_name("left"), symlinks=True)
    write_cache(path, keys, BEGUN)
    path.with_name("left").rename(path / BUILDING)
    assert known_teachers(path) == with_fingerprint(BEGUN)
    write_cache(path, np.concatenate([keys, make_keys(9, "third ")]), BEGUN)
    check_rows(path, np.concatenate([keys, make_keys(9, "third ")]), {"first": BEGUN["first"]})
    assert not (path / BUILDING).exists()


SCHEMAS = {
    "first": SignalSchema(dtype="float32", classes=3),
    "second": SignalSchema(dtype="float16", classes=5, hidden={-1: 4}),
}
OLD, ALL = make_keys(20), make_keys(140)
BLOCK_ROWS = 4
BLOCKS = 2 * len(ALL) // BLOCK_ROWS


def write_all(path, ledger, ranks=2):
    """Write everything; the ledger gets a line for each block that was acknowledged."""
    descriptor = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def acknowledge(teacher, number):
        os.write(descriptor, f"{teacher} {number}\n".encode())

    write_cache(path, ALL, SCHEMAS, block_rows=BLOCK_ROWS, ranks=ranks, acknowledge=acknowledge)


def die_at_call(count, draw):
    """Let this process kill itself at one of its next calls that change files: before it or
    after it."""
    left = [count]

    def counted(call):
        def run(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                how = draw.choice(["before", "after"])
                if how == "after":
                    call(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return run

    for name in ("open", "fsync", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def forked(work):
    """Do work in a child. Returns whether it was killed; raises AssertionError if it failed."""
    status = os.waitpid(fork(work), 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0
    return killed


def stage(path):
    """How far a build had come when it was killed."""
    if not (path / BUILDING / "plan.json").is_file():
        done = (path / MANIFEST).is_file() and Manifest.read(path).examples == len(ALL)
        return "cleaning up" if done else "before the plan"
    if (path / MANIFEST).is_file() and Manifest.read(path).examples == len(ALL):
        return "cleaning up"
    return "blocks" if len(published(path, SCHEMAS)) < BLOCKS else "finishing"


class Series:
    """Builds that are killed again and again until they end; each from nothing, or from a cache
    with a few rows."""

    def __init__(self, tmp_path, seed):
        self.place, self.draw = tmp_path, random.Random(seed)
        self.stages = Counter()
        write_cache(tmp_path / "old", OLD, SCHEMAS, block_rows=BLOCK_ROWS, ranks=2)
        shutil.copytree(tmp_path / "old", tmp_path / "whole-added")
        for name in ("whole-new", "whole-added"):
            write_all(tmp_path / name, tmp_path / "whole-ledger")

    def run(self, kills, ranks, among_blocks=0):
        """Until there were so many kills, and so many of them while blocks were written. Returns
        the finished caches."""
        made = []
        while self.stages.total() < kills or self.stages["blocks"] < among_blocks:
            assert self.stages.total() < 10 * kills, f"too few among blocks: {self.stages}"
            path = self.place / f"cache-{len(made)}"
            if len(made) % 2:
                shutil.copytree(self.place / "old", path)
            ledger = self.place / f"ledger-{len(made)}"
            while self.one(path, ledger, ranks()):
                pass
            made.append(path)
        return made

    def one(self, path, ledger, ranks):
        """Write until the end or a kill. Returns whether it was killed."""
        before = published(path, SCHEMAS)
        seed = self.draw.random()
        calls = self.draw.choice([20, 60, 300])

        def work():
            draw = random.Random(seed)
            die_at_call(draw.randint(1, calls), draw)
            write_all(path, ledger, ranks)

        killed = forked(work)
        if killed:
            self.stages[stage(path)] += 1
        lines = ledger.read_text().splitlines() if ledger.is_file() else []
        assert len(lines) == len(set(lines)), "a block that was acknowledged was written again"
        if (path / BUILDING / "plan.json").is_file() and stage(path) != "cleaning up":
            there = published(path, SCHEMAS)
            assert {tuple(line.split()) for line in lines} <= {(t, str(n)) for t, n in there}
            assert before.items() <= there.items(), "a block that was there is lost or another"
        return killed

    def check_equal(self, made):
        for number, path in enumerate(made):
            whole = self.place / ("whole-added" if number % 2 else "whole-new")
            assert block_checksums(path) == block_checksums(whole)
            assert {file.name for file in path.iterdir()} == {file.name for file in whole.iterdir()}
            CacheReader(path).verify()


def test_kills_between_other_numbers_of_ranks_keep_every_row(tmp_path):
    """Rows and their bytes are the same; only the files that they lie in are others."""
    series = Series(tmp_path, seed=3)
    made = series.run(kills=20, ranks=lambda: series.draw.randint(1, 3))
    wanted = block_checksums(tmp_path / "whole-new")
    for number, path in enumerate(made):
        check_rows(path, np.concatenate([ALL[::3], ALL[1::3]]), SCHEMAS)
        CacheReader(path).verify()
        assert not (path / BUILDING).exists()
        if number % 2 == 0:
            assert block_checksums(path) == wanted


def begun(path, keys=ALL, first_block=0):
    teachers = {name: (PRINT, schema) for name, schema in SCHEMAS.items()}
    build = Build(path, Plan(first_block, BLOCK_ROWS, [keys]), teachers)
    assert build.join() == 0
    return build


def test_a_block_is_leased_to_one_process_until_it_ends(tmp_path):
    one, other = begun(tmp_path), Build(tmp_path, begun(tmp_path).plan, begun(tmp_path).teachers)
    assert one.claim("first", 2) == [0, 1] and other.claim("first", 3) == [2, 3, 4]
    write_block(one, "first", 1)
    assert one.claim("first", 30) == [*range(5, 35)]
    assert other.claim("first", 2) == [None, None], "blocks that the other one writes"
    del one  # as the end of its process does
    assert other.claim("first", 2) == [0, 5], "1 is written"


def test_one_that_stood_still_until_after_the_end_writes_nothing(tmp_path):
    late = begun(tmp_path)
    assert late.claim("second", 1) == [0]
    late._leases.clear()
    write_cache(tmp_path, ALL, SCHEMAS, block_rows=BLOCK_ROWS)
    before = contents(tmp_path)
    write_block(late, "second", 0)
    late.finish()
    assert late.claim("second", 1) is None
    begun(tmp_path, make_keys(9, "more "), first_block=len(ALL) // BLOCK_ROWS)
    write_block(late, "second", 0)
    assert late.claim("second", 1) is None
    late.finish()
    assert {name: contents(tmp_path)[name] for name in before} == before


def test_where_another_one_was_faster_the_plan_is_made_anew(tmp_path):
    write_cache(tmp_path, OLD, SCHEMAS)
    before = contents(tmp_path)
    teachers = {name: (PRINT, schema) for name, schema in SCHEMAS.items()}
    assert Build(tmp_path, Plan(0, 8, [ALL]), teachers).join() is None
    assert contents(tmp_path) == before
