"""The logs of a run: metrics.jsonl, wandb, TensorBoard, and the console with and without a
terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time


def test_a_terminal_shows_a_bar_with_the_time_left(toy_recipe, tmp_path, command_environment):
    command = [sys.executable, "-m", "ds_distill", "run", str(toy_recipe)]
    main, child = pty.openpty()
    process = subprocess.Popen(
        [*command, "training.epochs=4", "--folder", str(tmp_path / "run")],
        stdin=child,
        stdout=child,
        stderr=child,
        close_fds=True,
        env={**command_environment, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        cwd=tmp_path,
    )
    os.close(child)
    shown = read_all(main, process, seconds=300)
    assert process.wait() == 0, shown
    assert "━" in shown
    assert re.search(r"average .*\d+/52.*loss \d\.\d+.*0:00:\d\d.*left.*0:00:\d\d", plain(shown))
    # The bars go when their work is done; what stays is what a file would hold.
    assert "Report   " in plain(shown)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def read_all(terminal, process, seconds):
    shown = b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 0.2)
        if ready:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        elif process.poll() is not None:
            break
    else:
        process.kill()
    os.close(terminal)
    return shown.decode("utf-8", "replace")
