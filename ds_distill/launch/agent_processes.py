"""The agents of a run as `ds-distill launch` sees them: local processes, ssh or srun."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ds_distill.launch.agent import STOP, STOP_AT_ONCE, AgentOrder
from ds_distill.launch.process_group import shell_code
from ds_distill.launch.ssh import FAILED

MARGIN_SECONDS = 10.0
"""For what an agent does beside waiting for its ranks, and for the way to it and back."""


@dataclass(frozen=True)
class Start:
    """A process that starts an agent, or srun's, that starts one on each node."""

    location: str
    """What a message calls it."""
    command: list[str]
    order: AgentOrder


@dataclass(frozen=True)
class Ended:
    location: str
    code: int
    """128 + N after signal N."""


class Agent:
    """One started process. Its order stays open as its standard input."""

    def __init__(self, start: Start) -> None:
        # In a session of its own: no signal from the terminal reaches it.
        self.location = start.location
        self._process = subprocess.Popen(
            start.command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self.handle = os.pidfd_open(self._process.pid)
        self._tell(start.order.to_line())

    def is_running(self) -> bool:
        return self._process.poll() is None

    def code(self) -> int | None:
        """The exit code, 128 + N after signal N; None for one that has not ended."""
        code = self._process.poll()  # no `wait`: a signal's handler calls this, too
        return None if code is None else shell_code(code)

    def has_ended_there(self) -> bool:
        """Whether it has ended with all that it has started, as it says itself."""
        code = self._process.poll()
        return code is not None and code >= 0 and code != FAILED

    def live(self) -> None:
        """Give a sign of life."""
        self._tell(b"\n")

    def stop(self, at_once: bool) -> None:
        self._tell(STOP_AT_ONCE if at_once else STOP)

    def await_end(self, seconds: float) -> None:
        """Wait until nothing of it runs, on this host; what takes longer is killed."""
        assert self._process.stdin is not None
        ends = select.poll()
        # POLLERR: no process reads its orders any more, neither the agent nor a group's guard.
        ends.register(self._process.stdin, 0)
        if not ends.poll(seconds * 1000):
            self._process.kill()
        gone = select.poll()
        gone.register(self.handle, select.POLLIN)
        gone.poll(1000)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; its exit code says why
            self._process.stdin.write(line)


class Agents:
    """All agents of a run. The first that fails ends the others."""

    def __init__(self, starts: list[Start], grace: float) -> None:
        self._starts = starts
        self._patience = grace + MARGIN_SECONDS
        self._agents: list[Agent] = []

    def run(self, sign_of_life: float | None, on_failure: Callable[[Ended], None]) -> list[Ended]:
        """Start them and wait until all have ended: in the order of their ends.

        sign_of_life: seconds between two; None where the input's end is certain to arrive.
        on_failure: called with the first that fails, before the others are ended.
        """
        for start in self._starts:
            self._agents.append(Agent(start))
        ended: list[Ended] = []
        running = list(self._agents)
        while running:
            _first_end(running, sign_of_life)
            for agent in running:
                agent.live()
            done = [agent for agent in running if not agent.is_running()]
            running = [agent for agent in running if agent not in done]
            ended += [Ended(agent.location, agent.code() or 0) for agent in done]
            failed = next((one for one in ended if one.code), None)
            if failed is not None:
                if running:
                    on_failure(failed)
                self.stop()
        return ended

    def main_has_ended(self) -> bool:
        """Whether the first host's ranks have ended for certain."""
        return bool(self._agents) and self._agents[0].has_ended_there()

    def stop(self, at_once: bool = False) -> list[int | None]:
        """End all agents and what they have started: their exit codes."""
        for agent in self._agents:
            agent.stop(at_once)
        deadline = time.monotonic() + (MARGIN_SECONDS if at_once else self._patience)
        for agent in self._agents:
            agent.await_end(max(0.0, deadline - time.monotonic()))
        return [agent.code() for agent in self._agents]


def _first_end(agents: list[Agent], seconds: float | None) -> None:
    """Wait until one of them has ended, or so long."""
    ends = select.poll()
    for agent in agents:
        ends.register(agent.handle, select.POLLIN)
    ends.poll(seconds and seconds * 1000)
