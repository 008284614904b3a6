"""The most memory of a phase, which a training in it measures anew."""

from mmap import mmap

import numpy as np
import pytest
import torch

from ds_distill.process import peak_memory
from ds_distill.process.peak_memory import PeakMemory, forget_resident_peak, resident_peak

MIB = 2**20


def held(mebibytes):
    np.ones(mebibytes * MIB, dtype=np.uint8).sum()  # given back at once


def test_a_training_does_not_hide_what_the_phase_held_before():
    peak = PeakMemory(torch.device("cpu"))
    peak.begin_phase()
    start = peak.of_phase()
    if start is None:
        pytest.skip("this system does not say what a process holds")
    held(400)
    before = peak.of_phase()
    assert before is not None and before > start + 300 * MIB
    peak.begin_training()
    held(100)
    of_training, of_phase = peak.of_training(), peak.of_phase()
    assert of_training is not None and of_training < before - 200 * MIB
    assert of_phase == before
    peak.begin_phase()
    assert (peak.of_phase() or 0) < before - 300 * MIB


def test_a_peak_is_of_the_time_since_it_was_forgotten():
    if resident_peak() is None:
        pytest.skip("this system does not say what a process holds")
    # Mapped, not allocated: an allocator may take it from what it has freed and keep it again.
    with mmap(-1, 64 * MIB) as mapped:
        mapped.write(b"1" * (64 * MIB))
        inside = resident_peak()
    forget_resident_peak()
    after = resident_peak()
    assert inside is not None and after is not None and inside - after > 48 * MIB


def test_where_a_system_does_not_say_nothing_is_said(monkeypatch):
    for name in ("_STATUS", "_CLEAR"):
        monkeypatch.setattr(peak_memory, name, peak_memory.Path("/nowhere"))
    peak = PeakMemory(torch.device("cpu"))
    peak.begin_phase()
    peak.begin_training()
    assert peak.of_phase() is None
