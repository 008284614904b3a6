"""The lease of a folder: between real processes, some of which are killed or frozen."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import filelock
import pytest

from ds_distill.errors import UserError
from ds_distill.files import write_text
from ds_distill.process import lease
from ds_distill.process.activity import activity
from ds_distill.process.lease import check_free, leased, release_all
from ds_distill.recipe import load_recipe
from ds_distill.run.execute import _prepared
from ds_distill.run.folder import RunFolder

SHORT = 0.6

HOLD = f"""
import os, sys
from pathlib import Path
from ds_distill.files import write_text
from ds_distill.process import lease
lease.LEASE_SECONDS = {SHORT}

def lost(why):
    print("lost:", why, flush=True)
    os._exit(1)

folder = Path(sys.argv[1])
with lease.leased(folder, lost):
    print("taken", flush=True)
    for line in sys.stdin:
        write_text(folder / "written", line)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", SHORT)


@pytest.fixture
def hold(tmp_path):
    """Start a process that has a folder, and writes there each line that it is given."""
    started = []

    def start(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "taken\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def not_lost(why):
    pytest.fail(why)


def test_the_second_is_refused_and_goes_on_after_the_first(hold, tmp_path):
    folder = tmp_path / "run"
    first = hold(folder)
    who = rf"in use by process {first.pid} on host \S+\. .* --resume=auto waits .* remove \S+/lock"
    with pytest.raises(UserError, match=who):
        check_free(folder)
    with pytest.raises(UserError, match=who), leased(folder, not_lost):
        pass
    first.communicate("", timeout=30)
    assert not folder.exists(), "nothing was written there"
    folder.mkdir()
    with leased(folder, not_lost):
        with pytest.raises(UserError, match=f"process {os.getpid()} on"), leased(folder, not_lost):
            pass
        check_free(folder)  # this process has it
    assert list(folder.iterdir()) == []


def test_after_a_kill_the_folder_is_free_at_once(hold, tmp_path):
    """Also before anybody has waited for it."""
    first = hold(tmp_path)
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    check_free(tmp_path)
    hold(tmp_path).kill()
    with leased(tmp_path, not_lost, waits=True):
        write_text(tmp_path / "written", "")
    assert [path.name for path in tmp_path.iterdir()] == ["written"]


@pytest.mark.parametrize("writes", [True, False])
def test_a_frozen_one_loses_its_folder_and_writes_no_more(writes, hold, tmp_path):
    first = hold(tmp_path)
    first.send_signal(signal.SIGSTOP)
    if writes:
        first.stdin.write("of one that has lost\n")
        first.stdin.flush()
    before = activity().marks
    with leased(tmp_path, not_lost, waits=True):
        assert activity().marks > before, "no watchdog takes it for hung"
        first.send_signal(signal.SIGCONT)
        assert first.stdout.readline() == f"lost: another process has taken {tmp_path}\n"
        assert first.wait() == 1
        write_text(tmp_path / "own", "")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_one_that_waits_is_refused_in_the_end_where_the_other_lives(hold, tmp_path):
    first = hold(tmp_path)
    used = pytest.raises(UserError, match=f"in use by process {first.pid}")
    with used, leased(tmp_path, not_lost, waits=True):
        pass
    first.communicate("it has it still", timeout=30)
    assert (tmp_path / "written").read_text() == "it has it still"


def test_a_wait_is_told(hold, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ds_distill.process.activity.TELL_SECONDS", 0.0)
    first = hold(tmp_path)
    threading.Timer(0.3, first.kill).start()
    with leased(tmp_path, not_lost, waits=True):
        pass
    told = f"waiting for process {first.pid} on host {os.uname().nodename}, which has {tmp_path}"
    assert told in capsys.readouterr().out


FOREIGN = f"filelock/2\npid=1\nhost=node-7\nmode=lease\ntoken=a\nduration={SHORT}\n"


@pytest.mark.parametrize("content", [FOREIGN, FOREIGN.replace("0.6", "30.0"), "", '{"since": 1}'])
def test_one_of_elsewhere_or_of_nobody_is_waited_for(content, tmp_path, monkeypatch):
    """Also of a file system, as NFS, that does not exchange two names."""
    monkeypatch.setattr(lease, "MARGIN_SECONDS", 0.2)
    monkeypatch.setattr(filelock._soft, "exchange_names", lambda *names: False)
    (tmp_path / lease.NAME).write_text(content)
    with pytest.raises(UserError, match="in use by"):
        check_free(tmp_path)
    began = time.monotonic()
    with leased(tmp_path, not_lost, waits=True):
        assert time.monotonic() - began > SHORT


def test_one_that_is_removed_by_hand_is_lost(tmp_path):
    said = []
    with leased(tmp_path, said.append):
        (tmp_path / lease.NAME).unlink()
        write_text(tmp_path / "written", "")
        assert set(said) == {f"the lock of {tmp_path} was removed"}


def test_the_end_of_a_process_frees_its_folders(tmp_path):
    with leased(tmp_path, not_lost):
        release_all()
        assert not (tmp_path / lease.NAME).exists()


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_run_that_goes_on_by_itself_waits_and_a_persons_start_does_not(
    resume, tmp_path, toy_recipe
):
    folder, recipe = RunFolder(tmp_path), load_recipe(toy_recipe)
    folder.create(recipe, {"ranks": 1})
    (tmp_path / lease.NAME).write_text(FOREIGN)
    world = SimpleNamespace(is_main=True, size=1, device="cpu", barrier=lambda: None)
    refused = pytest.raises(UserError, match="in use by process 1 on host node-7")
    end = nullcontext() if resume == "auto" else refused
    with end, _prepared(recipe, folder, world, {}, resume):
        assert (tmp_path / lease.NAME).read_text() != FOREIGN
