"""Seconds of a training's parts."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_distill.process import timers as module
from ds_distill.process.timers import REST, Timers, timed, timed_each, timing

CPU = torch.device("cpu")


def test_a_part_is_without_the_parts_inside_it():
    timers = Timers(CPU)
    with timing(timers):
        with timed("outer"):
            time.sleep(0.02)
            with timed("inner"):
                time.sleep(0.04)
            time.sleep(0.01)
        time.sleep(0.03)
    seconds = timers.read()
    assert list(seconds) == ["outer", "inner", REST]
    for part, slept in (("outer", 0.03), ("inner", 0.04), (REST, 0.03)):
        assert slept <= seconds[part] < slept + 0.03, part  # never less: only that is sure


@given(st.recursive(st.just([]), lambda inside: st.lists(inside, max_size=3), max_leaves=12))
def test_parts_add_up_to_all_the_time(tree):
    """However they are nested, with the clock replaced by a count of its readings."""
    ticks = iter(range(10_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "perf_counter", lambda: next(ticks))
        timers = Timers(CPU)

        def walk(nodes, depth):
            for node in nodes:
                with timed(f"at depth {depth}"):
                    walk(node, depth + 1)

        with timing(timers):
            walk(tree, 0)
        seconds = timers.read()
        assert sum(seconds.values()) == next(ticks) - 1
        assert sum(timers.read().values()) == 2  # and begins anew


def test_many_marks_are_added_up_on_the_way(monkeypatch):
    monkeypatch.setattr(module, "_MOST_MARKS", 5)
    timers = Timers(CPU)
    with timing(timers):
        for _ in range(20):
            with timed("part"):
                time.sleep(0.001)
            assert len(timers._marks) <= 5
    assert timers.read()["part"] >= 0.02


def test_an_error_ends_its_part():
    timers = Timers(CPU)
    with timing(timers):
        with pytest.raises(ValueError, match="x"), timed("fails"):
            raise ValueError("x")
        with timed("later"):
            pass
    timers.read()
    with timing(timers):
        time.sleep(0.001)
    assert list(timers.read()) == [REST]


def test_items_are_made_in_their_part_and_used_outside_it():
    def slow():
        for number in range(3):
            time.sleep(0.02)
            yield number

    timers, found = Timers(CPU), []
    with timing(timers):
        for number in timed_each("data", slow()):
            found.append(number)
            time.sleep(0.01)
    seconds = timers.read()
    assert found == [0, 1, 2]
    assert seconds["data"] >= 0.06 and seconds[REST] >= 0.03


def test_without_timers_nothing_is_timed():
    with timed("part"):
        pass
    assert list(timed_each("data", [1, 2])) == [1, 2]
