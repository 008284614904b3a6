"""Processes of `ds-distill`, and of scripts, as forks of one that has the libraries loaded:
starting Python and loading them takes longer than what most do under test.

In a fork /proc/PID/environ is its parent's, and Python does not start: tests of launches, of
start-up and of what is found by its environment start processes of their own.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import counted
import psutil

PLANT = "DS_DISTILL_TEST_PLANT"
"""Environment variable of what plants.py does in a rank."""
_PR_SET_CHILD_SUBREAPER = 36


class Fork:
    """One of them: what subprocess.Popen has for one whose output is captured."""

    def __init__(self, pid: int, folder: Path, arguments: list[str]) -> None:
        self.pid, self.args = pid, arguments
        self.returncode: int | None = None
        self._folder = folder

    def poll(self) -> int | None:
        ended = self._folder / "ended"
        if self.returncode is None and ended.exists():
            code, seconds = ended.read_text().split()
            counted.seconds_of_forks += float(seconds)
            self.returncode = int(code)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0, *self._shown())
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._shown()

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def left(self) -> list[psutil.Process]:
        """It and what it has started, of which some has not ended: those of its session."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                own = os.getsid(process.pid) == self.pid
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _shown(self) -> tuple[str, str]:
        out, err = ((self._folder / name).read_text("utf-8") for name in ("out", "err"))
        return out, err


class Warm:
    """The process that is forked; the first fork starts it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._server: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory()

    def start(
        self,
        arguments: list[str],
        cwd: str | os.PathLike[str] | None = None,
        environment: dict[str, str] | None = None,
        together: bool = False,
    ) -> Fork:
        """arguments: of `python -m ds_distill`, or a script of Python and its own. environment:
        none is that of all. together: errors stand in the output."""
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        for name in ("out", "err"):
            (folder / name).touch()
        request = {
            "arguments": arguments,
            "cwd": str(cwd or os.getcwd()),
            "environment": environment or self.environment,
            "shown": [str(folder / name) for name in ("out", "out" if together else "err")],
        }
        server = self._started()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(request).encode() + b"\n")
        return Fork(int(server.stdout.readline()), folder, arguments)

    def run(
        self,
        arguments: list[str],
        cwd: str | os.PathLike[str] | None = None,
        environment: dict[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run, with captured output."""
        fork = self.start(arguments, cwd, environment)
        try:
            out, err = fork.communicate(timeout)
        finally:
            fork.kill()
        assert fork.returncode is not None
        return subprocess.CompletedProcess(arguments, fork.returncode, out, err)

    def close(self) -> None:
        """No fork may be left, nor what one has started."""
        if self._server is not None:
            assert self._server.stdin
            self._server.stdin.close()
            before = sum(os.times()[2:4])
            assert self._server.wait(60) == 0, "forks were left: see above"
            # Each fork's are known, and loading the libraries is no test's.
            counted.seconds_of_forks -= sum(os.times()[2:4]) - before
        self._folder.cleanup()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            with counted.aside("warm"):
                self._server = subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    env=self.environment,
                )
                assert self._server.stdout
                self._server.stdout.readline()  # it has loaded the libraries
        return self._server


def serve() -> Callable[[], None]:
    """Answer each request with the process id of its fork, which writes its exit code and seconds
    of a processor to a file when it ends. Returns, in a fork, what it does."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line sets it before torch
    import ctypes

    import deepspeed  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    import ds_distill.cli
    import ds_distill.run.execute  # noqa: F401

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    answers, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(2, 1)  # what libraries print is no answer
    print("ready", file=answers, flush=True)
    forks: dict[int, Path] = {}
    waits: dict[int, int] = {}  # a file of each -> its process
    while True:
        ready, _, _ = select.select([requests, *waits], [], [])
        for file in ready:
            if file is not requests:
                os.close(file)
                told(forks, waits.pop(file))
        if requests in ready:
            line = requests.readline()
            if not line:
                return lambda: sys.exit(left())
            request = json.loads(line)
            child = os.fork()
            if child == 0:
                answers.close()
                return lambda: command(**request)
            forks[child] = Path(request["shown"][0]).parent
            waits[os.pidfd_open(child)] = child
            print(child, file=answers, flush=True)


def told(forks: dict[int, Path], child: int) -> None:
    """A fork has ended."""
    _, status, used = os.wait4(child, 0)
    folder = forks.pop(child)
    seconds = used.ru_utime + used.ru_stime
    (folder / "end").write_text(f"{os.waitstatus_to_exitcode(status)} {seconds}")
    (folder / "end").rename(folder / "ended")


def left() -> int:
    """Kills what has not ended, and says it: 1 if there was any."""
    below = psutil.Process().children(recursive=True)
    running = [one for one in below if one.status() != psutil.STATUS_ZOMBIE]
    for process in running:
        print("left:", *process.cmdline()[:8], process.pid, file=sys.stderr)
        process.kill()
    return int(bool(running))


def command(arguments: list[str], cwd: str, environment: dict[str, str], shown: list[str]) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in enumerate(shown, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    # Heeded also where whoever started the tests has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if PLANT in environment:
        import plants  # noqa: F401
    script = os.path.abspath(arguments[0]) if arguments[0].endswith(".py") else None
    sys.path[0] = os.path.dirname(script) if script else cwd
    more = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in more if path not in ("", *sys.path)]
    if script:
        sys.argv = arguments
        runpy.run_path(script, run_name="__main__")
    else:
        sys.argv[1:] = arguments
        runpy.run_module("ds_distill", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()()
