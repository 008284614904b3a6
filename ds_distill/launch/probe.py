"""`python -m ds_distill.launch.probe`: what one host finds, before a run starts on it.

Reads a question from the standard input, one line of JSON, and prints the answer as another.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path

from ds_distill.process.identity import machine
from ds_distill.process.machine import machine_memory, named_gpus

MARK = "ds-distill probe: "
"""Begins the answer's line: a shell's start-up files can print others."""

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "numpy", "pyarrow", "safetensors")


@dataclass(frozen=True)
class Question:
    hosts: dict[str, list[int]]
    node_rank: int | None
    """None: Slurm knows."""
    master_addr: str
    master_port: int
    directory: str
    nonce: str
    """A file that was just written in the run's folder."""
    paths: list[str]
    """What the recipe reads."""
    seconds: float = 30.0
    """How long to wait for the other hosts at the port."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables of the ranks beside those of the host, as in an agent's order."""


@dataclass
class Answer:
    node_rank: int
    versions: dict[str, str | None] = field(default_factory=dict)
    """Of Python, of PACKAGES, and a digest of this project's code."""
    machine: str = ""
    """See `process.identity.machine`."""
    memory: int = 0
    """Bytes of the host."""
    gpus: int | None = None
    """None: not counted, because something else is wrong."""
    gpu_ids: list[str] = field(default_factory=list)
    """What tells each from all others, in the order of their numbers."""
    busy: list[str] = field(default_factory=list)
    """Processes that use a GPU: `GPU 0: PID 12, 3456 MiB`."""
    missing: list[str] = field(default_factory=list)
    """Of the directory, the nonce and the paths."""
    link: str | None = None
    """Why this host and the first one cannot talk."""
    absent: list[int] = field(default_factory=list)
    """Of the first host: numbers of those that did not come to its port."""


def answer(question: Question) -> Answer:
    # First: what the ranks will see is counted, as with CUDA_VISIBLE_DEVICES.
    os.environ.update(question.environment)
    rank = question.node_rank
    found = Answer(int(os.environ["SLURM_PROCID"]) if rank is None else rank)
    if os.path.isdir(question.directory):
        os.chdir(question.directory)
        wanted = [question.nonce, *question.paths]
        found.missing = [path for path in wanted if not os.path.exists(path)]
    else:
        found.missing = [question.directory]
    if found.node_rank == 0:
        _listen(question, found)
    else:
        _visit(question, found)
    found.versions, found.machine, found.memory = versions(), machine(), machine_memory()
    if not (found.missing or found.link or found.absent):
        found.gpus = count_gpus()
        found.gpu_ids = [_gpu_id(number) for number in range(found.gpus)]
        found.busy = busy_gpus()
    return found


def count_gpus() -> int:
    """The GPUs of this machine that ranks with this process's variables run on; 0 for CPU ranks."""
    if named_gpus() == []:
        return 0
    import torch  # slow: a probe comes here after the meeting, and where the run can start

    return torch.cuda.device_count()


def most_gpus() -> int | None:
    """How many `count_gpus` can find at most, at once and without torch; None where nothing tells
    that."""
    if (named := named_gpus()) == []:
        return 0
    if (listed := _nvidia_smi("--list-gpus")) is None:
        return None
    gpus = sum(line.startswith("GPU ") for line in listed)  # parts of one have lines of their own
    return gpus if named is None else min(gpus, len(named))


def _gpu_id(number: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(number).uuid)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        found[name] = None
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return {**found, "ds_distill": digest.hexdigest()[:12]}


def busy_gpus() -> list[str]:
    """Other processes on the GPUs of this host, as nvidia-smi reports them."""
    query = "--query-compute-apps=gpu_uuid,pid,used_memory"
    return _nvidia_smi(query, "--format=csv,noheader") or []


def _nvidia_smi(*arguments: str) -> list[str] | None:
    """The lines that it prints; None where it is not there or fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def _listen(question: Question, found: Answer) -> None:
    """Wait at the port of the ranks for a word of each other host."""
    awaited = set(range(1, len(question.hosts)))
    deadline = time.monotonic() + question.seconds
    try:
        # As torch's store does: at all addresses.
        server = socket.create_server(("", question.master_port), backlog=len(question.hosts))
    except OSError as error:
        found.link = f"port {question.master_port} cannot be used: {error.strerror}"
        return
    with server:
        while awaited and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(OSError, ValueError):
                visitor, _ = server.accept()
                with visitor:
                    visitor.settimeout(2)
                    awaited.discard(_read_word(visitor, question.nonce))
    found.absent = sorted(awaited)


def _read_word(visitor: socket.socket, nonce: str) -> int:
    """The number of a visiting host. Raises ValueError for a stranger."""
    text = visitor.makefile("r", encoding="utf-8").readline(4096)
    number, _, word = text.strip().partition(" ")
    if word != os.path.basename(nonce):
        raise ValueError("another program")
    visitor.sendall(b"\n")
    return int(number)


def _visit(question: Question, found: Answer) -> None:
    """Say a word to the first host, which may start later."""
    where = f"{question.master_addr}:{question.master_port}"
    word = f"{found.node_rank} {os.path.basename(question.nonce)}\n".encode()
    deadline = time.monotonic() + question.seconds
    while True:
        try:
            listed = socket.getaddrinfo(question.master_addr, None, type=socket.SOCK_STREAM)
            address = str(listed[0][4][0])
            if ip_address(address).is_loopback:
                found.link = f"{question.master_addr} is {address} here, which is this host itself"
                return
            with socket.create_connection((address, question.master_port), 5) as connection:
                connection.sendall(word)
                if connection.recv(1):
                    return
                reason = "something else answers there"
        except socket.gaierror as error:
            found.link = f"the name {question.master_addr} is not known here ({error.strerror})"
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            found.link = f"no connection to {where} in {question.seconds:g} s: {reason}"
            return
        time.sleep(0.3)


def main() -> None:
    question = Question(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_question, daemon=True).start()
    print(MARK + json.dumps(asdict(answer(question))), flush=True)


def _end_with_question() -> None:
    """Nobody waits for the answer any more."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
