"""Before anything starts: whether every host can take part, and otherwise what to do."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_distill.errors import UserError
from ds_distill.launch.probe import MARK, Answer, Question
from ds_distill.launch.ssh import FAILED
from ds_distill.run.folder import PROBE

ANSWER_SECONDS = 100.0
"""How long a host may take in all. It imports torch, which is slow on a cold network disk."""

Probe = tuple[list[str], list[str], int | None]
"""Hosts, the command that asks them, and their node rank (None: srun asks them all)."""


def examine(probes: list[Probe], question: Question) -> list[Answer]:
    """Ask all hosts at the same time: their answers, in the order of their ranks.

    Raises UserError with one line for each reason why the run cannot start.
    """
    started = []
    for hosts, command, rank in probes:
        # The question's end, which also comes when this process is killed, ends the probe.
        end, ours = os.pipe()
        process = subprocess.Popen(
            command,
            stdin=end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.close(end)
        started.append((hosts, process, os.fdopen(ours, "w")))
        with suppress(BrokenPipeError):  # its exit code says why
            print(json.dumps({**asdict(question), "node_rank": rank}), file=started[-1][2])
            started[-1][2].flush()  # at once: the hosts wait for each other
    deadline = time.monotonic() + ANSWER_SECONDS
    answers: dict[int, Answer] = {}
    mistakes: list[str] = []
    for hosts, process, asked in started:
        output, errors, code = _collect(process, deadline)
        with suppress(BrokenPipeError):
            asked.close()
        lines = [line for line in output.splitlines() if line.startswith(MARK)]
        for line in lines:
            answer = Answer(**json.loads(line.removeprefix(MARK)))
            answers[answer.node_rank] = answer
        if len(lines) < len(hosts):
            where = ", ".join(hosts)
            mistakes.append(f"{where}: {_no_answer(hosts, process.args, errors, code)}")
    names = list(question.hosts)
    mistakes += _mistakes(question, names, answers)
    mistakes += _doubles(question, names, answers)
    if mistakes:
        raise UserError("launch: nothing was started.\n  " + "\n  ".join(mistakes))
    return [answers[rank] for rank in range(len(names))]


def _collect(process: subprocess.Popen[str], deadline: float) -> tuple[str, str, int | None]:
    """Output, errors and exit code; None for one that was too slow, and is killed."""
    try:
        output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        return output, errors, None
    return output, errors, process.returncode


def _no_answer(hosts: list[str], command: Any, errors: str, code: int | None) -> str:
    """The reason why a host did not answer, and what to do."""
    last = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {code}"
    if code is None:
        return f"no answer in {ANSWER_SECONDS:g} s. Is its disk or its network stuck?"
    if code == FAILED and command[0] == "ssh":
        port = command[command.index("-p") : command.index("--")] if "-p" in command else []
        by_hand = " ".join(["ssh", *port, *hosts, "true"])
        return (
            f"ssh failed: {last}. It must work without a question: `{by_hand}`; the hostfile, "
            "--ssh-port and ~/.ssh/config say how."
        )
    if "No module named" in last:
        return (
            f"{last}. Install the project there as here: the same Python environment at the "
            "same path."
        )
    if code in (126, 127):
        return f"{last}. The Python environment of this host must be at the same path there."
    return f"the check failed: {last}"


def _mistakes(question: Question, names: list[str], answers: dict[int, Answer]) -> Iterator[str]:
    first = answers.get(0)
    for rank, answer in sorted(answers.items()):
        name, slots = names[rank], question.hosts[names[rank]]
        if question.nonce in answer.missing:
            yield (
                f"{name}: a file just written in the run's folder {Path(question.nonce).parent} "
                "is not there. Give a --folder on a file system that all hosts share."
            )
        for path in answer.missing:
            if path != question.nonce:
                yield f"{name}: {path} is not there. All hosts need it at the same path."
        if answer.link is not None:
            yield f"{name}: {answer.link}. {_about_link(rank)}"
        if first is None:
            continue
        for package, wanted in first.versions.items():
            if (here := answer.versions[package]) != wanted:
                what = "the code of ds_distill" if package == "ds_distill" else package
                yield (
                    f"{name}: {what} is {here}, but {wanted} on {names[0]}. Install the same "
                    "on all hosts."
                )
        if answer.gpus is None or first.gpus is None:
            continue
        if bool(answer.gpus) != bool(first.gpus):
            yield (
                f"{name}: {answer.gpus} GPUs, and {first.gpus} on {names[0]}. Use hosts with "
                "GPUs, or hosts without."
            )
        elif answer.gpus and max(slots) >= answer.gpus:
            yield (
                f"{name}: slot {max(slots)} is to be used, but there are {answer.gpus} GPUs. "
                "Correct slots= in the hostfile."
            )
    if first is not None:
        for rank in first.absent:
            if rank in answers and answers[rank].link is None:
                yield (
                    f"{names[rank]}: it did not reach {names[0]} at port "
                    f"{question.master_port}. {_about_link(rank)}"
                )


def _doubles(question: Question, names: list[str], answers: dict[int, Answer]) -> Iterator[str]:
    """Two names of one machine, or of one GPU: ranks of both would run on it."""
    machines: dict[str, str] = {}
    gpus: dict[str, str] = {}
    for rank, answer in sorted(answers.items()):
        name = names[rank]
        other = machines.setdefault(answer.machine, name)
        if other != name:
            yield (
                f"{name}: is the same machine as {other}. Give each machine one name, with the "
                "number of all its GPUs."
            )
            continue
        for slot in question.hosts[name]:
            if slot < len(answer.gpu_ids):
                here = f"GPU {slot} of {name}"
                there = gpus.setdefault(answer.gpu_ids[slot], here)
                if there != here:
                    yield f"{name}: {here} is {there}, too. Give each GPU to one host."


def _about_link(rank: int) -> str:
    if rank == 0:
        return "Give a free one with --master-port."
    return (
        "--master-addr names an address of the first host that all others reach; a firewall "
        "must let them through, or --master-port names a port that it opens."
    )


@contextmanager
def shared_file(folder: Path) -> Iterator[str]:
    """A new file in the run's folder, for other hosts to look for; afterwards all is as before."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = folder / f"{PROBE}{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise UserError(
            f"--folder {folder}: cannot be written: {error.strerror}. Name another folder."
        ) from error
    try:
        yield str(file)
    finally:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # someone else has put something there
            for path in made:
                path.rmdir()


def paths_in(settings: Any) -> Iterator[str]:
    """What a recipe's text names that is a file or a folder on this host."""
    if isinstance(settings, dict):
        for value in settings.values():
            yield from paths_in(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from paths_in(value)
    elif isinstance(settings, str) and 0 < len(settings) < 4096:
        with suppress(OSError, ValueError):
            if Path(settings).exists():
                yield settings
