"""Files and folders are whole or not there, and a full disk is recognised by what libraries say."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ds_distill.cli.loading import text_output, write_json_output
from ds_distill.errors import UserError
from ds_distill.files import (
    is_disk_full,
    new_file,
    new_folder,
    publish_folder,
    read_json,
    refuse_links_out,
    write_text,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_takes_its_name_when_it_is_whole(tmp_path):
    target = tmp_path / "model"
    with new_folder(target) as aside:
        (aside / "deep").mkdir()
        (aside / "deep" / "a").write_text("1")
        assert not target.exists()
    assert (target / "deep" / "a").read_text() == "1"
    with new_folder(target) as aside:  # replaces, does not mix
        (aside / "b").write_text("2")
    assert names(target) == ["b"]
    with pytest.raises(RuntimeError), new_folder(target) as aside:
        (aside / "c").write_text("3")
        raise RuntimeError
    assert names(target) == ["b"]
    assert names(tmp_path) == ["model"]


WRITER = """
import sys
from pathlib import Path
from ds_distill.files import new_folder, write_json
place = Path(sys.argv[1])
print("ready", flush=True)
for number in range(10**9):
    write_json(place / "a.json", {"number": number, "filler": ["x" * 100] * 100})
    with new_folder(place / "folder") as aside:
        for part in range(5):
            write_json(aside / f"{part}.json", {"number": number, "filler": "x" * 1000})
"""


@pytest.mark.parametrize("milliseconds", [3, 29])
def test_a_killed_writer_leaves_whole_files(milliseconds, tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "ready\n"
    while not (tmp_path / "folder").exists():
        time.sleep(0.001)
    time.sleep(milliseconds / 1000)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert len(read_json(tmp_path / "a.json")["filler"]) == 100
    folder = tmp_path / "folder"
    if not folder.is_dir():  # killed between two renames
        folder = tmp_path / ".folder.old"
    numbers = [read_json(folder / f"{part}.json")["number"] for part in range(5)]
    assert len(set(numbers)) == 1


@pytest.fixture
def full_disk():
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("this system has no /dev/full")
    return path


def test_full_disks_are_recognised_by_each_librarys_message(full_disk):
    """Real errors, from a device that is always full."""
    for write in (
        lambda: full_disk.write_text("a" * 100_000),
        lambda: torch.save(torch.zeros(100_000), full_disk),
        lambda: np.zeros(100_000).tofile(full_disk),
    ):
        with pytest.raises(Exception) as failure:
            write()
        assert is_disk_full(failure.value), failure.value


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("CUDA out of memory"), False),
        (None, False),
    ],
)
def test_other_errors_are_distinguished(error, full):
    assert is_disk_full(error) is full
    if error is not None:
        wrapped = RuntimeError("the save failed")
        wrapped.__cause__ = error
        assert is_disk_full(wrapped) is full


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_get_the_rights_of_new_files(tmp_path, umask):
    """safetensors writes for the owner alone, and a copy keeps what its source had; what a killed
    process left does not count."""
    path = tmp_path / "routing.safetensors"
    (tmp_path / ".routing.safetensors.tmp").touch(0o600)
    before = os.umask(umask)
    try:
        with new_folder(tmp_path / "model") as aside:
            for name, mode in (("model.safetensors", 0o600), ("copied", 0o444)):
                (aside / name).write_text("")
                (aside / name).chmod(mode)
        with new_file(path) as temporary:
            save_file({"a": np.zeros(2)}, temporary)
    finally:
        os.umask(before)
    assert names(tmp_path / "model") == ["copied", "model.safetensors"]
    assert names(tmp_path) == ["model", path.name]
    for file in (path, *(tmp_path / "model").iterdir()):
        assert file.stat().st_mode & 0o777 == 0o666 & ~umask


def make_node(kind, path):
    """A node like those of /dev, in a folder of the test's own."""
    if kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # of the null device
            path.open("wb").close()
        except PermissionError:
            pytest.skip("only root makes devices, and not everywhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (path.parent / "elsewhere").write_text("kept")
        path.symlink_to("elsewhere")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["device", "pipe", "link", "folder"])
def test_only_a_regular_file_is_replaced_by_a_rename(kind, tmp_path):
    make_node(kind, tmp_path / "there")
    kind = kind if kind in ("link", "folder") else "device or a pipe"
    before = os.lstat(tmp_path / "there").st_mode
    with pytest.raises(UserError, match=f"is a {kind}, and only a file is replaced"):
        write_text(tmp_path / "there", "new")
    assert os.lstat(tmp_path / "there").st_mode == before
    if kind != "folder":
        (tmp_path / "aside").mkdir()
        with pytest.raises(UserError, match=f"is a {kind}, and only a folder is replaced"):
            publish_folder(tmp_path / "aside", tmp_path / "there")
        assert os.lstat(tmp_path / "there").st_mode == before


def test_json_is_written_to_a_device_a_pipe_and_the_own_output(tmp_path, capsys):
    """A command's --json. What stands in the own output already stays, also where it is a file."""
    for kind in ("device", "pipe", "file"):
        (tmp_path / kind).mkdir()
    make_node("device", tmp_path / "device" / "there")
    write_json_output(tmp_path / "device" / "there", {"a": 1})
    assert stat.S_ISCHR(os.lstat(tmp_path / "device" / "there").st_mode)
    make_node("pipe", tmp_path / "pipe" / "there")
    reader = os.open(tmp_path / "pipe" / "there", os.O_RDONLY | os.O_NONBLOCK)
    write_json_output(tmp_path / "pipe" / "there", {"a": 1})
    assert os.read(reader, 99) == b'{\n  "a": 1\n}\n'
    os.close(reader)
    print("a table")
    write_json_output(Path("/dev/stdout"), {"a": 1})
    assert capsys.readouterr().out == 'a table\n{\n  "a": 1\n}\n'
    program = "from ds_distill.cli.loading import write_json_output\nfrom pathlib import Path\n"
    program += "print('a table')\nwrite_json_output(Path('/dev/stdout'), 1)"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "a table\n1\n"


def test_an_output_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    for output in (tmp_path, tmp_path / "file" / "within"):
        with pytest.raises(UserError, match=str(output)), text_output(output):
            pass


def test_links_out_of_a_folder_are_refused_and_within_it_are_not(tmp_path):
    folder, victim = tmp_path / "disk" / "run", tmp_path / "victim"
    for each in (folder / "deep", victim):
        each.mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (folder / "latest").symlink_to("deep")
    (folder / "claim").symlink_to("3")  # as a cache's: nothing of that name is there
    (folder / "loop").symlink_to("loop")
    refuse_links_out(folder)
    refuse_links_out(tmp_path / "runs" / "run")  # a folder may be reached by a link
    refuse_links_out(tmp_path / "not there")
    for target in (victim, victim / "not there", "../../../victim", "/"):
        (folder / "deep" / "out").symlink_to(target)
        with pytest.raises(UserError, match=r"deep/out: is a link to .*outside of"):
            refuse_links_out(tmp_path / "runs" / "run")
        (folder / "deep" / "out").unlink()
    os.mkfifo(folder / "deep" / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl: is a device or a pipe"):
        refuse_links_out(folder)
