"""All stages, precisions and kinds of batches, on one, two and four ranks."""

import pytest
from distributed.stages import (
    ALL,
    BASES,
    BF16,
    FP32,
    LOW,
    SCENARIOS,
    assert_equals_a_plain_loop,
    assert_fp16_as_fp32,
    assert_same_losses,
    assert_teachers_stay_as_they_are,
    launch,
)
from distributed.test_stages import CHOSEN
from reference import make_teacher

LAUNCHES = {
    1: [*CHOSEN, *(name for name in LOW if name not in CHOSEN)],
    2: [*BASES, "zero3_bf16", *(name for name in ALL if name not in CHOSEN)],
    # One micro-batch for each of them.
    4: [
        *("zero1_fp32", "zero3_fp32", "uneven_zero3", "switch_zero3", "partial_zero3"),
        *("masked_lm_zero3", "packed uneven", "ahead_zero3", "ahead_masked_lm"),
    ],
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory, warm):
    return {
        ranks: launch(tmp_path_factory.mktemp("stages"), ranks, scenarios, warm)
        for ranks, scenarios in LAUNCHES.items()
    }


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_give_equal_losses_in_bf16(launches, stage):
    two = launches[2]
    assert_same_losses(two.losses(f"zero{stage}_bf16"), two.losses("zero0_bf16"), BF16)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3)])
def test_fp16_gives_the_losses_of_fp32(launches, ranks, stage):
    assert_fp16_as_fp32(launches[ranks], stage)


def test_stages_are_equal_with_a_partial_teacher(launches):
    ours, base = (launches[2].losses(f"partial_zero{stage}") for stage in (3, 0))
    assert_same_losses(ours, base, FP32)


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_equal_one(launches, stage):
    """In bf16; in fp32 both equal a plain loop."""
    name = f"zero{stage}_bf16"
    assert launches[2].results[name]["accumulation"] == 2
    assert launches[1].results[name]["accumulation"] == 4
    assert_same_losses(launches[2].losses(name), launches[1].losses(name), BF16)


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [(ranks, name) for ranks, of in LAUNCHES.items() for name in of if name in SCENARIOS],
)
def test_equals_a_plain_loop(launches, ranks, scenario):
    assert_equals_a_plain_loop(launches[ranks], scenario)


def test_one_rank_holds_its_teachers_whole(launches):
    for name in ("first", "second"):
        numel = sum(p.numel() for p in make_teacher("classification", name).parameters())
        held = launches[1].results["zero3_fp32"]["held"][0][name]
        assert held == pytest.approx(4 * numel, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 4])
def test_teachers_stay_as_they_are(launches, ranks):
    assert_teachers_stay_as_they_are(launches[ranks])
