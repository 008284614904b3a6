"""What Ctrl-C and SIGTERM do to a command: it ends at once, and says how to go on.

Nothing is unwound: whatever a run writes is whole or not there at every moment, as after SIGKILL.
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
"""Variable in the environment of ranks whose standard input `ds-distill launch` holds open: it
ends when the launch does, however that ended."""


@contextmanager
def last_words(
    words: Callable[[], str], end: Callable[[bool], None] | None = None
) -> Iterator[None]:
    """Within, a signal ends this process with one line on standard error and exit code 128 + its
    number. A rank ends without a word: who started it has it.

    words: what follows `stopped by Ctrl-C.`
    end: ends what this process started; given True when a second signal came while it did.
    """
    if is_rank() or threading.current_thread() is not threading.main_thread():
        yield
        return
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        again, stopping = stopping, True
        if end is not None:
            end(again)
        then = ""
        with suppress(OSError):
            then = f" {words()}"
        say(f"stopped by {SIGNALS[signal.Signals(number)]}.{then}".rstrip())
        os._exit(128 + number)

    # A signal that whoever started this process has it ignore (nohup, `&` in a script) stays so.
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """A line on standard error, past what other threads are writing; a progress bar that stands
    on a terminal goes, and the cursor that it hid comes back."""
    clear = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{clear}ds-distill: {text}\n".encode())


def same_command(*more: str) -> str:
    """This process's own command, as a user types it, with options that it may have already."""
    given = sys.argv[1:]
    return shlex.join(["ds-distill", *given, *(word for word in more if word not in given)])


def is_rank() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ


def end_as_rank() -> None:
    """Have a rank end at once when it is told to, also while it waits for others in a library's
    code, and when the `ds-distill launch` that it belongs to is gone."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if LAUNCHED in os.environ:
        threading.Thread(target=_end_with_launch, daemon=True).start()


def _end_with_launch() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)
