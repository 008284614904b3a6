"""A command that ends, with everything that it has started, when the process that owns it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import NoReturn


class Group:
    """A running command, the leader of whose process group is a guard.

    The guard is forked from this process, and the command is its child. Whichever of the two dies,
    the other one ends the group: SIGTERM to every process in it, SIGKILL to those that are there
    after the grace. The group's number is the guard's process id, which is known before the
    command starts, so that there is no moment at which a process has no owner.
    """

    def __init__(self, command: list[str], environment: dict[str, str], grace: float) -> None:
        """command: its standard input is a pipe that ends when this process and the guard have.
        grace: seconds between SIGTERM and SIGKILL.
        """
        self.grace = grace
        command_input, self._pipe = os.pipe()
        owner, self._alive = os.pipe()
        leads, started = os.pipe()
        sys.stdout.flush()
        self._guard = os.fork()
        if self._guard == 0:
            os.close(self._alive)
            _guard(command, environment, grace, command_input, self._pipe, owner, started)
        for end in (command_input, owner, started):
            os.close(end)
        os.read(leads, 1)  # from here on the group can be signalled
        os.close(leads)
        self.handle = os.pidfd_open(self._guard)
        """A file descriptor, readable once the command has ended."""

    def end(self, at_once: bool = False, hurry: int | None = None) -> int:
        """End what still runs.

        at_once: without SIGTERM and grace. hurry: a file descriptor; input there ends the grace.
        Returns the command's exit code, 128 + N where signal N ended it.
        """
        _end(self._guard, self._pipe, 0 if at_once else self.grace, hurry)
        _, status = os.waitpid(self._guard, 0)
        for end in (self.handle, self._pipe, self._alive):
            os.close(end)
        return shell_code(os.waitstatus_to_exitcode(status))


def shell_code(code: int) -> int:
    """An exit code as shells have it: 128 + N after signal N. Of a child's -N, and of 256 - N, with
    which DeepSpeed's launcher ends when signal N ended a rank."""
    if code < 0:
        return 128 - code
    return 128 + 256 - code if code >= 192 else code


def _guard(
    command: list[str],
    environment: dict[str, str],
    grace: float,
    command_input: int,
    pipe: int,
    owner: int,
    started: int,
) -> NoReturn:
    """The guard's whole life. It ends with the command's exit code."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Handled, not ignored: the command would inherit that.
            signal.signal(number, lambda *_: None)
        os.write(started, b"\n")
        child = subprocess.Popen(command, env=environment, stdin=command_input)
        os.close(command_input)
        ends = select.poll()
        ends.register(os.pidfd_open(child.pid), select.POLLIN)
        ends.register(owner, select.POLLIN)
        if owner in dict(ends.poll()):
            _end(os.getpid(), pipe, grace)
        code = shell_code(child.wait())
    except OSError as error:
        os.write(2, f"ds-distill: {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(code)


def _end(group: int, pipe: int, grace: float, hurry: int | None = None) -> None:
    """End a process group. It is over when no process reads from the pipe any more."""
    over = select.poll()
    over.register(pipe, 0)  # POLLERR alone is reported
    if grace and not over.poll(0):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        if hurry is not None:
            over.register(hurry, select.POLLIN)
        over.poll(grace * 1000)
    # Also where none reads: a process can have closed its input.
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
