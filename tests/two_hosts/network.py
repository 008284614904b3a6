"""Two hosts and a login host on one machine: namespaces of network, of process ids, of names and
of mounts, with an sshd in each. The cable of `node-b` loses, delays and drops what a test says.

They share the disk, the clock and the kernel, which hosts do not: what depends on these is not
tested by them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import pytest
from two_hosts.relay import Way

TOOLS = ("ip", "ssh", "sshd", "ssh-keygen", "mount", "unshare", "nsenter")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NAMES = ("login", "node-a", "node-b")

ENTER = """exec nsenter --target "$0" --net --pid --uts --mount -- env --chdir="$PWD" -- "$@" """
"""A shell's command that runs another one where a process is, in the same folder."""


@dataclass(frozen=True)
class TwoHosts:
    """`login` runs `ds-distill launch`; `node-a` and `node-b` run sshd."""

    folder: Path
    prefix: str
    network: str
    holders: dict[str, int] = field(default_factory=dict)
    """By host: a process there."""
    cable: list[subprocess.Popen[str]] = field(default_factory=list)
    """That of `node-b`."""

    def at(self, name: str, *command: str | Path) -> list[str]:
        """The command that runs another one on a host; as its child there, see `inner`."""
        return ["sh", "-c", ENTER, str(self.holders[name]), *map(str, command)]

    def cable_of_b(self, there: Way = Way(), back: Way = Way()) -> None:
        """How the cable of `node-b` carries what comes to it, and what it sends; as new without
        arguments."""
        [relay] = self.cable
        assert relay.stdin is not None and relay.stdout is not None
        print(json.dumps([asdict(back), asdict(there)]), file=relay.stdin, flush=True)
        assert relay.stdout.readline() == "done\n"

    def address(self, name: str) -> str:
        return f"{self.network}.{NAMES.index(name) + 1}"

    def etc_hosts(self, name: str) -> str:
        """A host's own /etc/hosts."""
        return f"/etc/netns/{self.prefix}{name}/hosts"

    def environment(self, given: dict[str, str]) -> dict[str, str]:
        """For `ds-distill launch`: its ssh has the test's keys and configuration."""
        return {**given, "PATH": f"{self.folder / 'bin'}:{PATH}"}

    @contextmanager
    def sshd(self, name: str, port: int, environment: dict[str, str]) -> Iterator[None]:
        """An sshd whose sessions have these variables. Its folder `private` is not shared."""
        settings = self.folder / f"sshd-{name}-{port}"
        quoted = " ".join(f'"{key}={value}"' for key, value in environment.items())
        settings.write_text(
            f"Port {port}\nHostKey {self.folder / 'host-key'}\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder / 'key.pub'}\nStrictModes no\n"
            f"PermitRootLogin prohibit-password\nSetEnv {quoted}\n"
        )
        script = 'mount -t tmpfs none "$0" && exec "$1" -D -e -f "$2"'
        sshd = shutil.which("sshd", path=PATH)
        assert sshd is not None
        with (self.folder / f"{settings.name}.log").open("w") as log:
            process = subprocess.Popen(
                self.at(
                    name,
                    *("unshare", "--mount", "sh", "-c", script),
                    *(self.folder / "private", sshd, settings),
                ),
                stdout=log,
                stderr=log,
            )
        try:
            deadline = time.monotonic() + 20
            while b"listening" not in (self.folder / f"{settings.name}.log").read_bytes():
                assert process.poll() is None and time.monotonic() < deadline, log.name
                time.sleep(0.05)
            yield
        finally:
            inner(process).terminate()
            process.wait()


def inner(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> psutil.Process:
    """The process on a host that a command of `TwoHosts.at` has started: signals are for it."""
    deadline = time.monotonic() + 20
    while not (children := psutil.Process(process.pid).children()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return children[0]


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make them; afterwards all is as before. Skips where it may not be done."""
    for tool in TOOLS:
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"no {tool} here (Debian: apt-get install iproute2 openssh-server)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces and sshd need root")
    number = os.getpid() % 65536
    hosts = TwoHosts(folder, f"ds{number}-", f"10.{100 + number // 256 % 100}.{number % 256}")
    made = subprocess.run(
        ["ip", "netns", "add", f"{hosts.prefix}login"], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"network namespaces may not be made here: {made.stderr.strip()}")
    try:
        with ExitStack() as running:
            _connect(hosts, running)
            _write_ssh_files(hosts)
            yield hosts
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", hosts.prefix + name], capture_output=True)
            shutil.rmtree(f"/etc/netns/{hosts.prefix}{name}", ignore_errors=True)


def _connect(hosts: TwoHosts, running: ExitStack) -> None:
    """A bridge in `login`; an interface eth0 on each host."""
    login = hosts.prefix + "login"
    run("ip", "-n", login, "link", "add", "eth0", "type", "bridge")
    for name in NAMES[1:]:
        run("ip", "netns", "add", hosts.prefix + name)
    peer = ["peer", "name", "eth0", "netns", hosts.prefix + "node-a"]
    run("ip", "-n", login, "link", "add", "node-a", "type", "veth", *peer)
    hosts.cable.append(running.enter_context(_relay(login, "node-b", f"{hosts.prefix}node-b")))
    for name in NAMES[1:]:
        run("ip", "-n", login, "link", "set", name, "master", "eth0", "up")
    for name in NAMES:
        host = hosts.prefix + name
        run("ip", "-n", host, "addr", "add", f"{hosts.address(name)}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            run("ip", "-n", host, "link", "set", interface, "up")
        etc = Path("/etc/netns") / host  # `ip netns exec` lays it over /etc
        etc.mkdir(parents=True)
        lines = [f"{hosts.address(other)} {other}" for other in NAMES]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        hosts.holders[name] = running.enter_context(_holder(host, name))


@contextmanager
def _relay(login: str, name: str, host: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name("relay.py")), login, name, host, "eth0"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip(f"no TAP interface here: {process.stderr.read().strip()[-200:]}")
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _holder(namespace: str, name: str) -> Iterator[int]:
    """A process that is the first one of a host: with it all others there end."""
    script = 'hostname "$0" && echo && while :; do sleep 1; done'  # it reaps, as init does
    unshare = ["unshare", "--pid", "--uts", "--mount", "--fork", "--mount-proc"]
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *unshare, "sh", "-c", script, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "\n":
            pytest.skip(f"no namespaces of process ids here: {process.stderr.read().strip()}")
        first = inner(process)
        yield first.pid
        first.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()


def _write_ssh_files(hosts: TwoHosts) -> None:
    for key in ("host-key", "key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(hosts.folder / key))
    (hosts.folder / "private").mkdir()
    (hosts.folder / "bin").mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it
    settings = hosts.folder / "ssh-config"
    settings.write_text(
        f"IdentityFile {hosts.folder / 'key'}\nStrictHostKeyChecking no\n"
        "UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    ssh = hosts.folder / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {settings} "$@"\n')
    ssh.chmod(0o755)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"


PYTHON = [sys.executable, "-P", "-m", "ds_distill"]
