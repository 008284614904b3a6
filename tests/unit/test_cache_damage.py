"""Damage is found, and the error names the file."""

import random
import shutil

import numpy as np
import pytest
import torch
from cache_files import check_rows, contents, make_keys, manifest_of, write_cache, write_manifest

from ds_distill.cache.blocks import MappedShard
from ds_distill.cache.format import FORMAT, MANIFEST
from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.errors import UserError

SMALL = {
    "first": SignalSchema(dtype="float32", classes=2),
    "second": SignalSchema(dtype="float16", classes=2, hidden={-1: 3}),
}
LISTS = {"first": SignalSchema(dtype="float16", classes=2, mask_variants=2)}
KEYS = make_keys(7)


@pytest.fixture(params=[SMALL, LISTS], ids=["rows", "lists"])
def cache(request, tmp_path):
    path = tmp_path / "cache"
    write_cache(path, KEYS, request.param, block_rows=4, ranks=2)
    return path


def read_all(path):
    reader = CacheReader(path)
    rows = reader.indices(torch.from_numpy(KEYS))
    for teacher in reader.teachers:
        for variant in range(reader.mask_variants or 1):
            reader.read(teacher, rows, variant)


def refused(path, call):
    try:
        call(path)
    except UserError as error:
        return str(error)
    return None


def verify(path):
    CacheReader(path).verify()


@pytest.mark.parametrize(
    "cache",
    [pytest.param(LISTS, id="lists")],
    indirect=True,
)
def test_a_flip_of_any_byte_of_a_shard_is_found(cache):
    draw, tried = random.Random(0), 0
    for teacher, held in manifest_of(cache)["teachers"].items():
        for shard in held["shards"]:
            file = cache / teacher / shard["file"]
            content = file.read_bytes()
            [(_, _, begin, length, _)] = shard["blocks"]
            for at in range(draw.randrange(4), len(content), 4):
                flipped = bytearray(content)
                flipped[at] ^= 1 << draw.randrange(8)
                file.write_bytes(flipped)
                for call in (verify, read_all):
                    message = refused(cache, call)
                    if message is None:  # nobody reads what is around the blocks
                        assert call is read_all and not begin <= at < begin + length
                    else:
                        assert f"{teacher}/{shard['file']}" in message
                        assert str(cache) in message
                tried += 1
            file.write_bytes(content)
    assert tried > 250
    verify(cache)


def test_a_flip_of_any_byte_of_index_or_manifest_is_found(cache):
    draw = random.Random(0)
    for file in (cache / MANIFEST, *cache.glob("index-*.arrow")):
        content = file.read_bytes()
        for at in range(0, len(content), 2):
            flipped = bytearray(content)
            flipped[at] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            message = refused(cache, CacheReader)
            assert message is not None, (file, at)
            assert file.name in message or f"reads format {FORMAT}" in message
        file.write_bytes(content)
    verify(cache)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", "x\n"])
@pytest.mark.parametrize("path", [("teachers",), ("index", "file"), ("shard", "file")])
def test_a_name_that_leads_out_of_the_folder_is_refused(path, name, cache):
    """With the checksum that fits: a manifest may be a stranger's."""
    manifest = manifest_of(cache)
    if path == ("teachers",):
        manifest["teachers"][name] = manifest["teachers"].pop("first")
    elif path == ("index", "file"):
        manifest["index"]["file"] = name
    else:
        manifest["teachers"]["first"]["shards"][0]["file"] = name
    write_manifest(cache, manifest)
    with pytest.raises(UserError, match=r"manifest\.json is"):
        CacheReader(cache)


@pytest.mark.parametrize("harm", ["cut", "cut to a block", "empty", "missing", "longer", "folder"])
def test_a_file_that_is_not_whole_is_refused(harm, cache):
    for name, content in contents(cache).items():
        file = cache / name
        if harm == "cut":
            file.write_bytes(content[:-2])  # the manifest ends with a line break
        elif harm == "cut to a block":
            file.write_bytes(content[: len(content) // 8 * 4])
        elif harm == "empty":
            file.write_bytes(b"")
        elif harm == "longer":
            file.write_bytes(content + b"\0")
        else:
            file.unlink()
            if harm == "folder":
                file.mkdir()
        for call in (verify, read_all):
            message = refused(cache, call)
            assert message is not None and file.name in message, (harm, name, message)
        if harm == "folder":
            file.rmdir()
        file.write_bytes(content)
    verify(cache)


def test_another_teachers_shard_in_its_place_is_refused(tmp_path):
    """Its frame and its sizes fit, its numbers are another teacher's."""
    schemas = {name: SignalSchema(dtype="float16", classes=3) for name in ("first", "second")}
    write_cache(tmp_path / "cache", KEYS, schemas)
    [file] = (tmp_path / "cache" / "first").iterdir()
    [other] = (tmp_path / "cache" / "second").iterdir()
    assert len(file.read_bytes()) == len(other.read_bytes())
    shutil.copyfile(other, file)
    for call in (verify, read_all):
        message = refused(tmp_path / "cache", call)
        assert message is not None and f"first/{file.name}" in message


def test_a_shard_that_changes_after_it_was_opened_is_refused(cache):
    for change in (lambda file: file.unlink(), lambda file: file.write_bytes(b"short")):
        shutil.copytree(cache, copy := cache.with_name("copy"))
        reader = CacheReader(copy)
        rows = reader.indices(torch.from_numpy(KEYS))  # opens the teacher's blocks, maps none
        for file in (copy / "first").iterdir():
            change(file)
        with pytest.raises(UserError, match="first/shard-"):
            reader.read("first", rows)
        shutil.rmtree(copy)


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1, "2"])
def test_another_format_is_refused_with_both_numbers(version, cache):
    write_manifest(cache, {**manifest_of(cache), "format": version})
    with pytest.raises(UserError, match=rf"format {version}; .* reads format {FORMAT}"):
        CacheReader(cache)


@pytest.mark.parametrize("text", ["", "[]", "{}", "\ud800", "[" * 10**5, "1" * 10**5])
def test_a_manifest_that_is_none_is_refused(text, cache):
    (cache / MANIFEST).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=MANIFEST):
        CacheReader(cache)


def test_a_reader_goes_on_while_rows_are_added(cache):
    schemas = {
        name: SignalSchema.model_validate(held["signals"])
        for name, held in manifest_of(cache)["teachers"].items()
    }
    reader = CacheReader(cache)
    rows = reader.indices(torch.from_numpy(KEYS))
    more = np.concatenate([KEYS, make_keys(9, "more ")])
    write_cache(cache, more, schemas)
    for teacher in reader.teachers:
        reader.read(teacher, rows)
    reader.verify()
    assert not reader.holds(torch.from_numpy(more))[len(KEYS) :].any()
    check_rows(cache, more, schemas)


def test_nothing_beyond_a_file_can_be_read(tmp_path):
    """Whatever a manifest and a block say: the last item ends with the file."""
    (tmp_path / "shard").write_bytes(bytes(range(10)))
    shard = MappedShard(tmp_path / "shard")
    assert shard.items(4)[np.array([6, 0])].tobytes() == bytes([6, 7, 8, 9, 0, 1, 2, 3])
    for offset in (7, 10, 2**40):
        with pytest.raises(IndexError):
            shard.items(4)[np.array([offset])]
    assert len(shard.items(11)) == 0
