"""Ctrl-C and SIGTERM: a training saves a checkpoint, anything else ends at once; the process prints
how to continue.

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
from typing import Any

from ds_distill.process.identity import is_rank
from ds_distill.process.lease import release_all
from ds_distill.process.terminal import message as shown

STOPPED = 75
"""Exit code after SIGTERM, where work was saved: a launcher may start the run again. It is not that
of a start that has saved nothing, which would be started again and again."""

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextmanager
def exit_on_signal(
    message: Callable[[], str],
    end: Callable[[bool], bool] | None = None,
    has_saved: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Inside this block a signal ends the process with one line on standard error and exit code
    128 + its number; in a training the first one is a request (see `saves_when_asked`). A rank ends
    silently: the process that started it prints the line.

    message: the text after `stopped by Ctrl-C.`
    end: ends the processes that this one started; called with True on a second signal. Returns
        whether they have saved a checkpoint: the exit code after SIGTERM is STOPPED then.
    has_saved: whether work was saved in another way since the start; STOPPED then, too.
    """
    if is_rank() or threading.current_thread() is not threading.main_thread():
        yield
        return
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        is_second, stopping = stopping, True
        if not is_second and end is None and _request_stop(number):
            once_more = "; once more ends at once" if number == signal.SIGINT else ""
            name = SIGNALS[signal.Signals(number)]
            print_error(f"{name}: ends after this step, with a checkpoint{once_more}")
            return
        saved = end is not None and end(is_second)
        text = ""
        with suppress(OSError):
            text = f" {message()}"
        with suppress(OSError):  # files may go meanwhile
            saved = saved or (has_saved is not None and has_saved())
        print_error(f"stopped by {SIGNALS[signal.Signals(number)]}.{text}".rstrip())
        release_all()
        os._exit(STOPPED if saved and number == signal.SIGTERM else 128 + number)

    # A signal that the parent process set to be ignored (nohup, `&` in a script) stays ignored.
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    _handlers.append(stop)
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        _handlers.remove(stop)
        for number, handler in before.items():
            signal.signal(number, handler)


def print_error(text: str) -> None:
    """Print a line on standard error without waiting for other threads. On a terminal it first
    clears a progress bar and shows the cursor again."""
    clear = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{clear}ds-distill: {shown(text)}\n".encode())


def end_locked_out(why: str) -> None:
    """End this process: its run's folder belongs to another one now."""
    print_error(f"{why}, and this run ends: two must not write there.")
    os._exit(1)


def same_command(*more: str) -> str:
    """This process's command as a user types it, with those options of `more` that it lacks."""
    given = sys.argv[1:]
    names = {word.partition("=")[0] for word in given}
    return shlex.join(["ds-distill", *given, *(option for option in more if option not in names)])


class Stopped(Exception):
    """A training has ended on a signal, and its work is saved."""

    def __init__(self, saved: str) -> None:
        """saved: what is."""
        self.signal = signal.Signals(_requested or signal.SIGTERM)  # SIGTERM: of another rank
        super().__init__(f"stopped by {SIGNALS[self.signal]}, with {saved}")

    @property
    def exit_code(self) -> int:
        """Of a run, which can go on."""
        return STOPPED if self.signal == signal.SIGTERM else 128 + self.signal


_requested: int | None = None
"""The signal that asked a training to stop."""
_savers = 0
"""Trainings that run: they see a request."""


@contextmanager
def saves_when_asked() -> Iterator[None]:
    """Inside this block the first Ctrl-C or SIGTERM is a request, which the code there must look
    for, as long as the command line has its handlers set."""
    global _savers
    _savers += 1
    try:
        yield
    finally:
        _savers -= 1


def stop_requested() -> bool:
    """Whether a signal came to this process while it could save."""
    return _requested is not None


def _request_stop(number: int) -> bool:
    """Ask the training that runs to stop; False where none does."""
    global _requested
    if _savers:
        _requested = number
    return _savers > 0


def end_as_rank() -> None:
    """Make a rank end at once on a signal, also inside a library's code that waits for other ranks.
    In a training SIGTERM is a request."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if signal.getsignal(signal.SIGTERM) is _woken:
        return  # a program that calls the command line again
    # A thread learns of it even where the main one waits in a library and runs no handler.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _woken)
    threading.Thread(target=_heed_sigterm, args=[reader], daemon=True).start()


def _woken(number: int, frame: FrameType | None) -> None:
    """Nothing: the system has written to the wakeup file already."""


_handlers: list[Any] = [_woken]
"""What answers signals in this process."""


def _forget_handlers() -> None:
    """In a forked process, such as a worker of a pool, signals do what they do without handlers.
    Else SIGTERM to it would print the run's line and release its lock, or be written to the file
    that it shares with a rank, and end the rank."""
    if signal.getsignal(signal.SIGTERM) is _woken:
        signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) in _handlers:
            signal.signal(number, signal.SIG_DFL)
    _unblock()


_blocked = threading.local()


def _block() -> None:
    """Signals wait until the forked process has forgotten the handlers."""
    _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.before)


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget_handlers)


def _heed_sigterm(reader: int) -> None:
    while number := os.read(reader, 1):
        if number[0] == signal.SIGTERM and not _request_stop(signal.SIGTERM):
            release_all()
            os._exit(128 + signal.SIGTERM)
