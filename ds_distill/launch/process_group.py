"""Processes that end, with everything that they have started, when the one that owns them ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NoReturn


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    environment: dict[str, str] = field(repr=False)
    output: str | None = None
    """The file that what it prints is added to; None: where this process prints."""


class Group:
    """Running commands, in the process group of a guard.

    The guard is forked from this process, and the commands are its children. Whichever of the two
    dies, the other one ends the group: SIGTERM to every process in it, SIGKILL to those that are
    there after the grace. The group's number is the guard's process id, which is known before a
    command starts, so that there is no moment at which a process has no owner.
    """

    def __init__(self, commands: list[Command], grace: float) -> None:
        """commands: their standard input is a pipe that ends when this process and the guard have.
        grace: seconds between SIGTERM and SIGKILL.
        """
        self.grace = grace
        self._until: float | None = None  # of the grace, once it has begun
        commands_input, self._pipe = os.pipe()
        owner, self._alive = os.pipe()
        leads, started = os.pipe()
        sys.stdout.flush()
        self._guard = os.fork()
        if self._guard == 0:
            os.close(self._alive)
            _guard(commands, grace, commands_input, self._pipe, owner, started)
        for end in (commands_input, owner, started):
            os.close(end)
        os.read(leads, 1)  # from here on the group can be signalled
        os.close(leads)
        self.handle = os.pidfd_open(self._guard)
        """A file descriptor, readable once all commands have ended well, or one has not."""

    def ask(self) -> None:
        """Send SIGTERM to what still runs, once, and wait for nothing: the grace begins."""
        if self._until is None:
            self._until = time.monotonic() + self.grace
            _ask(self._guard, self._pipe)

    def end(self, at_once: bool = False, hurry: int | None = None) -> int:
        """End what still runs, when the grace is over at the latest. See `ask`.

        at_once: without SIGTERM and grace. hurry: a file descriptor; input there ends the grace.
        Returns the exit code of the first command that failed, 128 + N after signal N; 137 where
        SIGKILL was needed; 0 when all have ended well.
        """
        if not at_once:
            self.ask()
        left = 0.0 if at_once or self._until is None else self._until - time.monotonic()
        _end(self._guard, self._pipe, left, hurry)
        _, status = os.waitpid(self._guard, 0)
        for end in (self.handle, self._pipe, self._alive):
            os.close(end)
        return shell_code(os.waitstatus_to_exitcode(status))


def shell_code(code: int) -> int:
    """A child's exit code as shells have it: 128 + N after signal N."""
    return 128 - code if code < 0 else code


def _guard(
    commands: list[Command], grace: float, commands_input: int, pipe: int, owner: int, started: int
) -> NoReturn:
    """The guard's whole life. It ends with the exit code of the first command that fails."""
    code: int | None = 1
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Handled, not ignored: the commands would inherit that.
            signal.signal(number, lambda *_: None)
        os.write(started, b"\n")
        events = select.poll()
        events.register(owner, select.POLLIN)
        running = {}
        for one in commands:
            child = _start(one, commands_input)
            handle = os.pidfd_open(child.pid)
            running[handle] = child
            events.register(handle, select.POLLIN)
        code = _first_failure(running, events, owner)
        if code is None:
            os.close(commands_input)
            _ask(os.getpid(), pipe)
            _end(os.getpid(), pipe, grace)
        # Else that stays open: the owner waits until there is an exit code.
    except OSError as error:
        os.write(2, f"ds-distill: {commands[0].arguments[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(code or 0)


def _start(command: Command, commands_input: int) -> subprocess.Popen[bytes]:
    with ExitStack() as opened:
        output = None
        if command.output is not None:
            output = opened.enter_context(open(command.output, "ab"))
        return subprocess.Popen(
            command.arguments,
            env=command.environment,
            stdin=commands_input,
            stdout=output,
            stderr=output,
        )


def _first_failure(
    running: dict[int, subprocess.Popen[bytes]], events: select.poll, owner: int
) -> int | None:
    """The exit code of the first command that fails, 0 when none does, None when the owner dies."""
    while running:
        ready = [file for file, _ in events.poll()]
        if owner in ready:
            return None
        for file in ready:
            events.unregister(file)
            if code := shell_code(running.pop(file).wait()):
                return code
    return 0


def _over(pipe: int) -> select.poll:
    """It has an event when no process of the group reads from the pipe any more."""
    over = select.poll()
    over.register(pipe, 0)  # POLLERR alone is reported
    return over


def _ask(group: int, pipe: int) -> None:
    """SIGTERM to every process of a group that is not over."""
    if not _over(pipe).poll(0):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)


def _end(group: int, pipe: int, grace: float, hurry: int | None = None) -> None:
    """End a process group, which was asked to end, after the grace at the latest."""
    over = _over(pipe)
    if grace > 0:
        if hurry is not None:
            over.register(hurry, select.POLLIN)
        over.poll(grace * 1000)
    # Also where none reads: a process can have closed its input.
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
