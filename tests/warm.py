"""Commands of `ds-distill` in forks of one process that has the libraries loaded: starting Python
and loading them takes longer than what most commands under test do.

For commands that end by themselves. In a fork /proc/PID/environ is its parent's, and Python does
not start: tests of kills, launches, start-up and the environment start processes of their own.
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
from pathlib import Path

import counted


class Warm:
    """The process; it is started by the first command."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._server: subprocess.Popen[bytes] | None = None

    def run(
        self, arguments: list[str], cwd: str | os.PathLike[str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run of `python -m ds_distill`, or of a script of Python that comes first,
        with captured output."""
        if self._server is None:
            with counted.aside("warm"):
                self._server = subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    env=self._environment,
                )
                assert self._server.stdout
                self._server.stdout.readline()  # it has loaded the libraries
        assert self._server.stdin and self._server.stdout
        with tempfile.TemporaryDirectory() as folder:
            shown = [str(Path(folder) / name) for name in ("out", "err")]
            request = {"arguments": arguments, "cwd": str(cwd or os.getcwd()), "shown": shown}
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            child = int(self._server.stdout.readline())
            done, _, _ = select.select([self._server.stdout], [], [], timeout)
            if not done:
                os.killpg(child, signal.SIGKILL)
            code, seconds = self._server.stdout.readline().split()
            counted.seconds_of_forks += float(seconds)
            out, err = (Path(name).read_text(encoding="utf-8") for name in shown)
        if not done:
            raise subprocess.TimeoutExpired(arguments, timeout, out, err)
        return subprocess.CompletedProcess(arguments, int(code), out, err)

    def close(self) -> None:
        """It ends with its input; a fork of this process that is left keeps that open."""
        if self._server is None:
            return
        assert self._server.stdin
        self._server.stdin.close()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def serve() -> None:
    """Read requests; answer each with the process id of its fork, and with its exit code and the
    seconds of a processor that it took."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line sets it before torch
    import deepspeed  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    import ds_distill.cli
    import ds_distill.run.execute  # noqa: F401

    answers, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    os.dup2(2, 1)  # what libraries print is no answer
    print("ready", file=answers, flush=True)
    for line in iter(requests.readline, ""):
        child = os.fork()
        if child == 0:
            answers.close()
            return command(**json.loads(line))
        print(child, file=answers, flush=True)
        _, status, used = os.wait4(child, 0)
        seconds = used.ru_utime + used.ru_stime
        print(os.waitstatus_to_exitcode(status), seconds, file=answers, flush=True)


def command(arguments: list[str], cwd: str, shown: list[str]) -> None:
    os.setsid()
    os.chdir(cwd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in enumerate(shown, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    if arguments[0].endswith(".py"):
        script = os.path.abspath(arguments[0])
        sys.path[0], sys.argv = os.path.dirname(script), arguments
        runpy.run_path(script, run_name="__main__")
        return
    sys.path[0] = cwd
    sys.argv[1:] = arguments
    runpy.run_module("ds_distill", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
