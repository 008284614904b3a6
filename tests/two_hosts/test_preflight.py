"""What is wrong with a host is reported before anything starts, with what to do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from processes import left_of, marked
from two_hosts.network import TwoHosts, inner

from ds_distill.launch.preflight import paths_in
from ds_distill.launch.probe import Answer, Question, _listen

EXAMINE = """
import json, sys
from pathlib import Path
from ds_distill.errors import UserError
from ds_distill.launch.preflight import examine, shared_file
from ds_distill.launch.probe import Question
from ds_distill.launch.ssh import ssh_command

names, folder, port, settings = json.load(sys.stdin)
with shared_file(Path(folder)) as nonce:
    slots = {name: [0] for name in names}
    question = Question(hosts=slots, node_rank=None, nonce=nonce, **settings)
    probes = [
        ([name], ssh_command(name, "ds_distill.launch.probe", port), rank)
        for rank, name in enumerate(names)
    ]
    try:
        answers = examine(probes, question)
        print(json.dumps([vars(answer) for answer in answers]))
    except UserError as error:
        sys.exit(str(error))
"""
"""What `ds-distill launch` does before it starts something, without what it does before that."""


class Desk:
    """A folder on the login host, from which hosts are examined."""

    def __init__(self, hosts: TwoHosts, folder: Path, environment: dict[str, str]) -> None:
        self.hosts, self.folder = hosts, folder
        self.environment = {**hosts.environment(environment), **marked()}

    def examine(
        self, *names: str, port: int | None = None, folder: str = "run", **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        standard = {
            "master_addr": names[0],
            "master_port": 23001,
            "directory": str(self.folder),
            "paths": [],
            "seconds": 12.0,
        }
        return subprocess.run(
            self.hosts.at("login", sys.executable, "-c", EXAMINE),
            input=json.dumps([names, str(self.folder / folder), port, {**standard, **settings}]),
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def left(self) -> list[psutil.Process]:
        return left_of(self.environment)

    def runs_a_probe(self) -> bool:
        for process in self.left():
            with suppress(psutil.Error):  # ended meanwhile
                if process.cmdline()[-1:] == ["ds_distill.launch.probe"]:
                    return True
        return False

    def mistakes(self, *names: str, **settings: Any) -> str:
        """The one paragraph about hosts that cannot take part; nothing is left of the question."""
        begun = time.monotonic()
        done = self.examine(*names, **settings)
        assert done.returncode == 1 and time.monotonic() - begun < 115, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert not (self.folder / "run").exists()
        assert self.left() == []
        return done.stderr.partition("nothing was started.")[2]


@pytest.fixture
def desk(hosts, command_environment, tmp_path) -> Desk:
    return Desk(hosts, tmp_path, command_environment)


@pytest.fixture
def session(command_environment) -> dict[str, str]:
    """Variables of a session on a host."""
    named = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")
    return {name: command_environment[name] for name in named if name in command_environment}


def test_sound_hosts(hosts, desk, session):
    """They meet, and answer in the order of their ranks. Twice at a time, as two runs would."""
    names = [("node-a", "node-b"), ("node-b", "node-a")]
    with (
        hosts.sshd("node-a", 22, session),
        hosts.sshd("node-b", 22, session),
        ThreadPoolExecutor(2) as pool,
    ):
        done = list(pool.map(lambda pair: desk.examine(*pair, seconds=60.0), names))
    for one in done:
        assert one.returncode == 0, one.stderr
        answers = json.loads(one.stdout)
        assert [answer["node_rank"] for answer in answers] == [0, 1]
        assert [answer["gpus"] for answer in answers] == [0, 0]
        assert all(answer["versions"]["torch"] for answer in answers)


def test_hosts_that_cannot_be_reached(hosts, desk, session):
    """A name that nobody knows, and a port that refuses: reported within seconds, beside each
    other; the host that answers is not to blame."""
    with hosts.sshd("node-a", 22, session):
        seen = desk.mistakes("node-a", "node-c")
        assert "node-c: ssh failed" in seen and "Could not resolve hostname" in seen
        assert "`ssh node-c true`" in seen and "node-a:" not in seen
        seen = desk.mistakes("node-a", "node-b", port=2299)
        assert seen.count("Connection refused") == 2 and "`ssh -p 2299 node-b true`" in seen


def test_two_names_of_one_machine(hosts, desk, session):
    other = hosts.address("node-a")
    with hosts.sshd("node-a", 22, session):
        [line] = desk.mistakes("node-a", other).strip().splitlines()
    assert line.startswith(f"{other}: is the same machine as node-a.")


def test_hosts_whose_question_ends(hosts, desk, session):
    """As when `ds-distill launch` is killed while it asks: nothing goes on, here or there."""
    mark = {name: desk.environment[name] for name in marked()}
    with hosts.sshd("node-a", 22, {**session, **mark}):
        process = subprocess.Popen(
            hosts.at("login", sys.executable, "-c", EXAMINE),
            stdin=subprocess.PIPE,
            env=desk.environment,
            text=True,
        )
        settings = {"master_addr": "node-a", "master_port": 23001, "directory": "/", "paths": []}
        assert process.stdin is not None
        process.stdin.write(json.dumps([["node-a", "node-b"], str(desk.folder), None, settings]))
        process.stdin.close()
        deadline = time.monotonic() + 60
        while not desk.runs_a_probe():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)
        inner(process).kill()
        process.wait()
        deadline = time.monotonic() + 15  # much less than the first host waits for the other
        while desk.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert desk.left() == []


def test_a_host_without_the_project(hosts, desk, session, tmp_path):
    (tmp_path / "absent" / "ds_distill").mkdir(parents=True)
    (tmp_path / "absent" / "ds_distill" / "__init__.py").touch()
    absent = {**session, "PYTHONPATH": str(tmp_path / "absent")}
    with hosts.sshd("node-a", 22, session), hosts.sshd("node-b", 22, absent):
        seen = desk.mistakes("node-a", "node-b")
    assert "node-b: " in seen and "o module named 'ds_distill.launch'" in seen
    assert "Install the project there as here" in seen


def test_what_hosts_do_not_share(hosts, desk, session, tmp_path):
    """The run's folder, data, the address of the first host, its port."""
    private = str(hosts.folder / "private" / "run")
    holder = "import socket; s = socket.create_server(('', 23456)); print(1, flush=True); input()"
    with hosts.sshd("node-a", 22, session), hosts.sshd("node-b", 22, session):
        nowhere = hosts.address("login")
        (hosts.folder / "private" / "data").mkdir()
        data = str(hosts.folder / "private" / "data")
        seen = desk.mistakes("node-a", "node-b", folder=private, master_addr=nowhere, paths=[data])
        for name in ("node-a", "node-b"):
            assert f"{name}: a file just written in the run's folder {private} is not there" in seen
            assert f"{name}: {data} is not there. All hosts need it" in seen
        assert f"node-b: no connection to {nowhere}:23001 in 12 s" in seen
        assert "--master-addr names an address of the first host" in seen
        seen = desk.mistakes("node-a", "node-b", master_addr="localhost")
        assert "node-b: localhost is 127.0.0.1 here, which is this host itself" in seen
        process = subprocess.Popen(
            hosts.at("node-a", sys.executable, "-c", holder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None and process.stdout.readline()
            seen = desk.mistakes("node-a", "node-b", master_port=23456)
        finally:
            process.communicate(b"\n")
    assert "node-a: port 23456 cannot be used: Address already in use" in seen
    assert "Give a free one with --master-port" in seen


def test_a_stranger_at_the_port_is_not_taken_for_a_host(tmp_path):
    """Whatever talks to the first host's port meanwhile."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    nonce = str(tmp_path / "nonce")
    question = Question({"a": [0], "b": [0]}, 0, "a", port, ".", nonce, [], seconds=3)
    found = Answer(0)
    listener = Thread(target=_listen, args=[question, found])
    listener.start()
    for word in (b"1 wrong\n", b"GET / HTTP/1.0\n\n", b"\xff\n"):
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                    stranger.sendall(word)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    listener.join()
    assert found.absent == [1] and found.link is None


def test_the_paths_that_a_recipe_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tweets").mkdir()
    settings = {"data": {"path": "tweets"}, "models": [str(tmp_path), "no/such"], "epochs": 3}
    assert list(paths_in(settings)) == ["tweets", str(tmp_path)]
