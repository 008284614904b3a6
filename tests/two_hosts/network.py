"""Two hosts and a login host on one machine: network namespaces with an sshd in each.

They share the disk, the process ids and the machine's name, which hosts do not: what depends on
these is not tested by them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOLS = ("ip", "ssh", "sshd", "ssh-keygen", "mount")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NAMES = ("login", "node-a", "node-b")


@dataclass(frozen=True)
class TwoHosts:
    """`login` runs `ds-distill launch`; `node-a` and `node-b` run sshd."""

    folder: Path
    prefix: str
    network: str

    def at(self, name: str, *command: str | Path) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", self.prefix + name, *map(str, command)]

    def address(self, name: str) -> str:
        return f"{self.network}.{NAMES.index(name) + 1}"

    def link(self, name: str, state: str) -> None:
        run("ip", "netns", "exec", self.prefix + name, "ip", "link", "set", "eth0", state)

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
        script = 'mount -t tmpfs none "$1" && exec "$2" -D -e -f "$3"'
        sshd = shutil.which("sshd", path=PATH)
        assert sshd is not None
        with (self.folder / f"{settings.name}.log").open("w") as log:
            process = subprocess.Popen(
                self.at(name, "sh", "-c", script, "sh", self.folder / "private", sshd, settings),
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
            process.terminate()
            process.wait()


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
        _connect(hosts)
        _write_ssh_files(hosts)
        yield hosts
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", hosts.prefix + name], capture_output=True)
            shutil.rmtree(f"/etc/netns/{hosts.prefix}{name}", ignore_errors=True)


def _connect(hosts: TwoHosts) -> None:
    """A bridge in `login`; an interface eth0 on each host."""
    login = hosts.prefix + "login"
    run("ip", "-n", login, "link", "add", "eth0", "type", "bridge")
    for name in NAMES[1:]:
        run("ip", "netns", "add", hosts.prefix + name)
        peer = ["peer", "name", "eth0", "netns", hosts.prefix + name]
        run("ip", "-n", login, "link", "add", name, "type", "veth", *peer)
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
