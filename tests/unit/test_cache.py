"""What is written is read: any rows, in any order, by any number of threads and processes."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import datasets
import numpy as np
import pytest
import torch
import xxhash
from cache_files import (
    LISTS,
    PRINT,
    TWO,
    block,
    check_reads,
    check_rows,
    contents,
    list_lengths,
    make_keys,
    manifest_of,
    write_cache,
    write_manifest,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.cache.codecs import CompactCodec, TailShape
from ds_distill.cache.format import END_OF_STREAM, weights_fingerprint
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import NotFinite, SignalSchema
from ds_distill.errors import UserError
from ds_distill.types import Signals


@pytest.fixture
def cache(tmp_path):
    """Two teachers on 50 examples."""
    path, keys = tmp_path / "cache", make_keys(50)
    write_cache(path, keys, TWO)
    return path, keys


# ---------------------------------------------------------------------- what is read


@st.composite
def all_schemas(draw):
    variants = draw(st.none() | st.integers(1, 3))
    return {
        name: SignalSchema(
            dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
            classes=draw(st.integers(1, 9)),
            hidden=draw(st.dictionaries(st.integers(-2, 1), st.integers(1, 5), max_size=2)),
            mask_variants=variants,
        )
        for name in draw(st.sampled_from([["t"], ["t", "u"], ["a-b", "b"]]))
    }


@settings(max_examples=15)
@given(
    schemas=all_schemas(),
    parts=st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=3),
    block_rows=st.sampled_from([1, 2, 8, 64]),
    ranks=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    data=st.data(),
)
def test_any_rows_in_any_order_read_what_was_written(
    tmp_path_factory, schemas, parts, block_rows, ranks, data
):
    """Built in several parts, each of several splits, by as many ranks as there are then."""
    path = tmp_path_factory.mktemp("round-trip") / "cache"
    for number, (sizes, rank) in enumerate(zip(parts, ranks, strict=False)):
        splits = [make_keys(size, f"{number}.{at} ") for at, size in enumerate(sizes)]
        write_cache(path, splits, schemas, block_rows=block_rows, ranks=rank)
    every = [
        key
        for number, sizes in enumerate(parts)
        for at, size in enumerate(sizes)
        for key in make_keys(size, f"{number}.{at} ")
    ]
    if not every:
        assert contents(path) == {}
        return
    asked = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=30))
    check_rows(path, np.array(every)[asked], schemas)
    assert CacheReader(path).teachers == list(schemas)
    assert CacheReader(path).manifest.examples == len(every)
    CacheReader(path).verify()


def test_a_cache_knows_the_names_of_the_classes(tmp_path):
    mapped = {"labels": ["a", "b"], "outputs": [1, 0]}  # by the recipe
    for number, (held, wanted) in enumerate(((mapped, ["a", "b"]), (["a"], ["a"]), (None, None))):
        path = tmp_path / str(number)
        write_cache(path, make_keys(4), TWO, fingerprint={**PRINT, "labels": held})
        assert CacheReader(path).labels == wanted


@pytest.mark.parametrize("hidden", [{}, {-1: 17_000}])
@pytest.mark.parametrize("codec", ["dense", "compact"])
def test_a_batch_without_a_masked_token_has_no_rows_and_a_dummy(codec, hidden, tmp_path):
    """Rows from 32 KiB on are read singly: dense logits of a real vocabulary, or wide states."""
    classes = 20_000
    kept = {}
    if codec != "dense":
        kept = {"codec": CompactCodec(classes, 0.1).to_json(), "temperature": 2.0}
    schema = SignalSchema(dtype="float16", classes=classes, hidden=hidden, mask_variants=2, **kept)
    keys = make_keys(40)
    none = keys[list_lengths(keys, 0) == 0][:3]
    write_cache(tmp_path / "cache", keys, {"t": schema}, block_rows=32)
    reader = CacheReader(tmp_path / "cache")
    outputs = reader.read("t", reader.indices(torch.from_numpy(none)), variant=0)
    assert len(outputs) == 0 and {
        layer: state.shape for layer, state in outputs.hidden.items()
    } == {layer: (0, width) for layer, width in hidden.items()}
    dummy = outputs.dummy()
    assert len(dummy) == 1
    for layer, width in hidden.items():
        assert torch.equal(dummy.hidden[layer], torch.zeros(1, width))
    assert dummy.logits.shape == (1, classes)


def test_keys_that_share_their_first_half_are_distinguished(tmp_path):
    low, high = -(2**63), 2**63 - 1
    keys = np.array([[7, 5], [7, -5], [7, 0], [low, high], [high, low], [high, high], [low, low]])
    write_cache(tmp_path / "cache", keys, TWO)
    check_rows(tmp_path / "cache", keys[[6, 0, 3, 2, 5, 1, 4]], TWO)
    reader = CacheReader(tmp_path / "cache")
    for missing in ([7, 1], [7, 6], [high, 0], [0, 0], [high - 1, high], [low, 0]):
        with pytest.raises(UserError, match="1 of 1 examples"):
            reader.indices(torch.tensor([missing]))


@pytest.mark.parametrize("schemas", [TWO, LISTS])
def test_files_are_arrow_streams_that_other_tools_open(schemas, tmp_path):
    keys = make_keys(20)
    write_cache(tmp_path / "cache", keys, schemas, ranks=2)
    for name, kept in schemas.items():
        files = sorted((tmp_path / "cache" / name).iterdir())
        for file, part in zip(files, (keys[:8], keys[8:16], keys[16:]), strict=True):
            shard = datasets.Dataset.from_file(str(file))
            rows = shard.with_format("arrow")["logits"]
            assert shard.num_rows == len(part) * (kept.mask_variants or 1)
            assert rows.to_pylist() == block(name, kept, part)["logits"].to_pylist()


@pytest.mark.parametrize("schemas", [TWO, LISTS])
def test_a_cache_of_before_with_shards_of_several_blocks_is_read_and_added_to(schemas, tmp_path):
    path, keys = tmp_path / "cache", make_keys(44)
    write_cache(path, keys[:30], schemas, ranks=2)
    manifest = manifest_of(path)
    for name, teacher in manifest["teachers"].items():
        content, blocks = schemas[name].arrow_schema().serialize().to_pybytes(), []
        header = content
        for shard in teacher["shards"]:
            [[number, rows, offset, length, checksum]] = shard["blocks"]
            file = path / name / shard["file"]
            blocks.append([number, rows, len(content), length, checksum])
            content += file.read_bytes()[offset : offset + length]
            file.unlink()
        frame = xxhash.xxh3_128_hexdigest(header + END_OF_STREAM)
        one = {"file": "shard-00000000.arrow", "bytes": len(content) + 8, "checksum": frame}
        teacher["shards"] = [{**one, "blocks": blocks}]
        (path / name / "shard-00000000.arrow").write_bytes(content + END_OF_STREAM)
    write_manifest(path, manifest)
    for more in (keys[:30], keys):
        write_cache(path, more, schemas)
        check_rows(path, more, schemas)
        CacheReader(path).verify()


# ------------------------------------------------------------- threads and processes


@pytest.mark.parametrize("schemas", [TWO, LISTS])
def test_threads_share_a_reader(schemas, tmp_path):
    """All touch the same blocks first at once."""
    keys = make_keys(64)
    write_cache(tmp_path / "cache", keys, schemas, block_rows=4, ranks=2)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(4):
            reader, together = CacheReader(tmp_path / "cache"), threading.Barrier(16)

            def read(seed, reader=reader, together=together):
                order = np.random.default_rng(seed).permutation(len(keys))
                rows = reader.indices(torch.from_numpy(keys[order]))
                together.wait()
                check_reads(reader, rows, keys[order], schemas)
                check_reads(reader, rows[::-1].copy(), keys[order][::-1], schemas)

            with ThreadPoolExecutor(16) as threads:
                list(threads.map(read, range(100 * attempt, 100 * attempt + 16)))
    finally:
        sys.setswitchinterval(before)


def test_open_files_do_not_grow_with_the_shards(tmp_path):
    """A cache of 64 nodes has more shards than a process may open files."""
    keys = make_keys(60)
    write_cache(tmp_path / "cache", keys, TWO, block_rows=1, ranks=60)
    reader = CacheReader(tmp_path / "cache")
    before = len(os.listdir("/proc/self/fd"))
    check_reads(reader, reader.indices(torch.from_numpy(keys)), keys, TWO)
    assert len(os.listdir("/proc/self/fd")) <= before + 5


# ------------------------------------------------------------------- what is refused


def test_a_missing_key_is_an_error_with_counts_and_an_example(cache):
    path, keys = cache
    strange = make_keys(2, "strange ")
    wanted = np.concatenate([keys[:3], strange, keys[4:5]])
    with pytest.raises(UserError, match="2 of 6 examples") as caught:
        CacheReader(path).indices(torch.from_numpy(wanted))
    assert str(strange[0].tolist()) in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("block_rows", [1, 8])
@pytest.mark.parametrize("schemas", [TWO, LISTS])
def test_missing_records_and_variants_are_never_read(block_rows, schemas, tmp_path):
    write_cache(tmp_path / "cache", make_keys(21), schemas, block_rows=block_rows)
    last = 20 if block_rows < 8 else 2 * 8 + 4
    for checked_before in (False, True):
        reader = CacheReader(tmp_path / "cache")
        if checked_before:
            reader.verify()
        for row in (-1, -2, -8, last + 1, last + 4, 10**6, 2**62, -(2**63)):
            with pytest.raises(IndexError):
                reader.read("first", np.array([0, row]))
        for variant in (-1, 3, 1000) if schemas is LISTS else ():
            with pytest.raises(IndexError):
                reader.read("first", np.array([0]), variant)


def test_a_changed_fingerprint_is_refused_with_both_values(cache):
    reader = CacheReader(cache[0])
    reader.check("first", PRINT)
    for what, value in (("weights", "w2"), ("tokenizer", "t2"), ("max_length", 64), ("dtype", "x")):
        with pytest.raises(UserError) as caught:
            reader.check("first", {**PRINT, what: value})
        for part in (what, repr(value), repr(PRINT.get(what)), "'first'"):
            assert part in str(caught.value)
    with pytest.raises(UserError, match=r"no teacher 'third', only first, second"):
        reader.check("third", PRINT)


def test_teachers_whose_signals_differ_are_refused_by_name(cache):
    reader = CacheReader(cache[0])
    same = {name: (PRINT, schema) for name, schema in TWO.items()}
    reader.check_same(same)
    changed = TWO["second"].model_copy(update={"classes": 6})
    with pytest.raises(UserError, match=rf"^cache {cache[0]}: teacher 'second' .* classes "):
        reader.check_same({**same, "second": (PRINT, changed)})
    with pytest.raises(UserError, match=rf"^cache {cache[0]}: also has teacher 'second'"):
        reader.check_same({"first": same["first"]})


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distributions_are_stored_at_the_temperature(temperature):
    """What is read has the softmax of logits / T at T."""
    vocabulary = 50
    logits = torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(0))
    wanted = (logits / temperature).log_softmax(1)
    codec = CompactCodec(vocabulary, 1e-9, TailShape.even(vocabulary))
    schema = SignalSchema(
        dtype="float16", classes=vocabulary, codec=codec.to_json(), temperature=temperature
    )
    kept = schema.encode(Signals(logits)).columns
    read = schema.decode(kept).to(torch.device("cpu"))
    # Half a step of the codec's values, which have 4 bits.
    half_a_step = (wanted.max() - wanted.min()).item() / 30
    found = (read.logits / temperature).log_softmax(1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=half_a_step)


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 70_000.0])
@pytest.mark.parametrize("column", ["logits", "hidden"])
def test_signals_that_are_not_finite_are_not_stored(value, column):
    schema = SignalSchema(dtype="float16", classes=3, hidden={-1: 2})
    parts = [Signals(torch.zeros(4, 3), {-1: torch.zeros(4, 2)}) for _ in range(3)]
    for part, row in ((1, 2), (2, 0)):
        (parts[part].logits if column == "logits" else parts[part].hidden[-1])[row, 1] = value
    with pytest.raises(NotFinite) as caught:
        schema.record_batch([schema.encode(part) for part in parts])
    assert caught.value.rows.tolist() == [6, 8]
    assert caught.value.overflow == (value == 70_000.0)


def test_the_fingerprint_of_a_folder_is_its_weights_and_config(tmp_path):
    def make(name, weights=b"weights", config="{}", **others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text(config)
        for other, text in others.items():
            (tmp_path / name / other).write_text(text)
        return weights_fingerprint(str(tmp_path / name), None)

    same = make("one")
    assert make("moved", readme="other files do not matter") == same
    assert make("weights", weights=b"Weights") != same
    assert make("config", config='{"a": 1}') != same
    assert weights_fingerprint("org/name", "abc") == "org/name@abc"
