"""Ctrl-C and SIGTERM: the process ends at once and prints how to continue.

No cleanup is needed: at every moment each file of a run is complete or absent, as after SIGKILL.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

LAUNCHED = "DS_DISTILL_LAUNCHED"
"""Environment variable of ranks whose standard input `ds-distill launch` holds open: it closes when
the launch ends, for any reason."""


@contextmanager
def exit_on_signal(
    message: Callable[[], str], end: Callable[[bool], None] | None = None
) -> Iterator[None]:
    """Inside this block a signal ends the process with one line on standard error and exit code
    128 + its number. A rank ends silently: the process that started it prints the line.

    message: the text after `stopped by Ctrl-C.`
    end: ends the processes that this one started; called with True on a second signal.
    """
    if is_rank() or threading.current_thread() is not threading.main_thread():
        yield
        return
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        is_second, stopping = stopping, True
        if end is not None:
            end(is_second)
        text = ""
        with suppress(OSError):
            text = f" {message()}"
        print_error(f"stopped by {SIGNALS[signal.Signals(number)]}.{text}".rstrip())
        os._exit(128 + number)

    # A signal that the parent process set to be ignored (nohup, `&` in a script) stays ignored.
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_error(text: str) -> None:
    """Print a line on standard error without waiting for other threads. On a terminal it first
    clears a progress bar and shows the cursor again."""
    clear = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{clear}ds-distill: {text}\n".encode())


def same_command(*more: str) -> str:
    """This process's command as a user types it, with those of `more` that it lacks."""
    given = sys.argv[1:]
    return shlex.join(["ds-distill", *given, *(option for option in more if option not in given)])


def is_rank() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ


def end_as_rank() -> None:
    """Make a rank end at once on a signal, also inside a library's code that waits for other ranks,
    and when its `ds-distill launch` has ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if LAUNCHED in os.environ:
        threading.Thread(target=_end_with_launch, daemon=True).start()


def _end_with_launch() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)
