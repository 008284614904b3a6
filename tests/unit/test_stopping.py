"""Signals to processes that a run has forked are not signals to the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, os, signal, sys, time
from ds_distill.process.signals import end_as_rank, exit_on_signal

if "RANK" in os.environ:
    end_as_rank()
with exit_on_signal(lambda: "the run's line"):
    for _ in range(20):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]  # leaving the block sends SIGTERM to both
    time.sleep(0.5)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
"""


@pytest.mark.parametrize("rank", [{}, {"RANK": "0"}], ids=["a lone process", "a rank"])
def test_ending_a_pool_does_not_end_the_run(rank):
    inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**inherited, **rank},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "goes on\n", done
    assert done.returncode == 128 + signal.SIGTERM
    line = "ds-distill: stopped by SIGTERM. the run's line\n"
    assert done.stderr == ("" if rank else line)  # of a rank it is the launcher's
