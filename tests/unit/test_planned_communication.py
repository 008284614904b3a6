"""What a step sends, and how long: by hand, and what must hold for any model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ds_distill.engine.config import micro_batches_together
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.memory import Zero, training_states
from ds_distill.planning.times import (
    Sent,
    communication_seconds,
    sent_by_teachers,
    sent_in_training,
)
from ds_distill.training import setup

GROUPS, FROZEN = [[60, 41], [7]], [9]
TEACHERS = {"one": [10, 5], "two": [100]}


def sent(stage, micro_steps=3, passes=1, **changes):
    zero = Zero(stage, 2, 4, **changes)
    return sent_in_training(GROUPS, FROZEN, TEACHERS, zero, micro_steps, passes)


def test_each_stage_by_hand():
    """108 weights of 4 bytes on two ranks; groups are padded to multiples of 4, weights of 2."""
    reduced = Sent("all_reduce", 432, 1)
    assert sent(0) == [reduced]
    assert sent(1) == [reduced, Sent("all_gather", 4 * (104 + 8), 2)]
    assert sent(2) == [Sent("all_reduce", 3 * 432, 3), sent(1)[1]]
    scattered = Sent("reduce_scatter", 3 * 4 * (60 + 42 + 8), 3)
    teachers = Sent("all_gather", 4 * (10 + 6 + 100), 1)
    own = 60 + 42 + 8 + 10
    assert sent(3) == [scattered, Sent("all_gather", 4 * own, 4), teachers]
    assert sent(3, passes=2)[2] == Sent("all_gather", 2 * 4 * 116, 2)
    apart = sent(3, student_resident=False)
    assert apart[1] == Sent("all_gather", 3 * 4 * own, 1)
    # What is used again too late is gathered for the backward pass, too.
    apart = sent(3, student_resident=False, max_reuse=40)
    assert apart[1].bytes == 3 * 4 * (own + own - 20)


def test_one_rank_sends_nothing():
    for stage in range(4):
        assert sent_in_training(GROUPS, FROZEN, TEACHERS, Zero(stage, 1, 2), 4, 4) == []
    assert sent_by_teachers(TEACHERS, Zero(2, 8, 2), 1) == []


def test_a_ring_by_hand():
    """1 GB on 64 H100: within each machine 70% of 450 GB/s, between machines of 8 cards
    of 50."""
    device = replace(GPUS["h100"], link_latency=0.0, network_latency=0.0, launch=0.0)
    gathered = [Sent("all_gather", 10**9, 1)]
    reduced = [Sent("all_reduce", 10**9, 1)]
    assert communication_seconds(gathered, 8, device) == pytest.approx(7 / 8 / 315)
    assert communication_seconds(gathered, 64, device) == pytest.approx(63 / 64 / 280)
    assert communication_seconds(reduced, 64, device) == pytest.approx(2 * 63 / 64 / 280)
    assert communication_seconds(gathered, 64, replace(device, cards=1)) == pytest.approx(
        63 / 64 / 35
    )
    late = replace(device, link_latency=1e-6, network_latency=1e-5)
    more = communication_seconds(gathered, 64, late) - communication_seconds(gathered, 64, device)
    assert more == pytest.approx(56e-6 + 7e-5)
    scattered = [Sent("reduce_scatter", 10**9, 1)]
    assert communication_seconds(scattered, 8, device) == pytest.approx(7 / 8 / 315)


def test_live_teachers_run_once_a_step_at_stage_3():
    assert micro_batches_together(1, 4, 8, 128) == 8
    assert micro_batches_together(1, 64, 8, 128) == 2  # of 16,384 tokens at most
    assert micro_batches_together(3, 4, 8, 128) == 8
    assert micro_batches_together(3, 256, 8, 128) == 2  # of 65,536 tokens at most
    assert micro_batches_together(3, 1024, 8, 128) == 1


@pytest.mark.parametrize(
    ("stage", "micro_batch", "micro_steps", "signals", "steps"),
    [
        (1, 4, 8, 0, 1),
        (1, 4, 8, 1, 4),  # 16,384 tokens
        (3, 4, 8, 1, 8),  # more would be an age for a stop
        (3, 4, 8, 2**23, 4),  # 256 MiB of what they say
        (3, 4, 8, 2**30, 1),
        (1, 64, 8, 1, 0.25),  # a part of a step
    ],
)
def test_how_many_steps_are_read_at_once(stage, micro_batch, micro_steps, signals, steps):
    found = micro_batches_together(stage, micro_batch, micro_steps, 128, signals, packs=True)
    assert found == steps * micro_steps
    padded = micro_batches_together(stage, micro_batch, micro_steps, 128, signals)
    assert padded == (found if stage == 3 else min(found, micro_steps))


def test_what_is_whole_at_a_time_is_bounded():
    """Three layers and the weight that passes that; a config's bound wins."""
    layers = [[1000, 10] for _ in range(24)]
    teachers = {"one": [20_000, *(numel for layer in layers for numel in layer)]}
    config = {"zero_optimization": {"stage": 3}}
    for largest, expected in ((20_000, 20_000 + 3 * 1010), (500, 1000 + 3 * 1010)):
        teachers["one"][0] = largest
        zero = Zero.of(config, 8, 2, resident=True, teacher_layer=1010)
        found = training_states([[8]], 0, teachers, zero)
        assert found.buffers == 2 * (8 + expected)  # of a bucket, as long as what is trained
    config["zero_optimization"]["stage3_max_live_parameters"] = 5000
    zero = Zero.of(config, 8, 2, resident=True, teacher_layer=1010)
    assert training_states([[8]], 0, teachers, zero).buffers == 2 * (8 + 6000)


@pytest.mark.parametrize(
    ("every_token", "share", "rows"),
    [(False, None, 4), (False, 0.15, 77), (True, 0.15, 512)],
)
def test_signals_are_of_examples_of_masked_tokens_or_of_all(every_token, share, rows, monkeypatch):
    """Of 4 examples of up to 128 tokens: how many micro-batches fit depends on it."""
    monkeypatch.setattr(setup, "batch_shape", lambda *_: (4, 8))
    monkeypatch.setattr(setup, "micro_batches_together", lambda *given: given[4])
    bundle = SimpleNamespace(
        every_token=every_token, teachers={}, signal_bytes=lambda rows, tokens: (rows, tokens)
    )
    task = SimpleNamespace(max_length=128, row_share=share)
    run = SimpleNamespace(
        recipe=SimpleNamespace(task_of=lambda _: task), world=SimpleNamespace(size=1)
    )
    collate = SimpleNamespace(packs_all=lambda _: False)
    job = SimpleNamespace(settings=None, bundle=bundle, collate=collate)
    assert setup._read_together(job, run, 0) == (rows, 512)
