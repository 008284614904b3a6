"""One engine, ZeRO stages 0 to 3, fp32, bf16 and fp16: equal to each other, to one rank and to a
plain PyTorch loop; teachers are sharded, frozen, untouched and nowhere saved."""

import pytest
from distributed.stages import (
    BASES,
    BF16,
    FP32,
    SCENARIOS,
    assert_equals_a_plain_loop,
    assert_fp16_as_fp32,
    assert_same_losses,
    assert_teachers_stay_as_they_are,
    launch,
)
from reference import WIDTHS, make_student, make_teacher

CHOSEN = [*BASES, "zero3_bf16", "zero2_fp16", "sharded_student", "expertise", "uneven_zero2"]
CHOSEN += ["switch_zero0", "many_labels_zero1", "layers_zero3", "attention_sharded_student"]
CHOSEN += ["grown_zero1", "packed tokens", "ahead_zero3"]
"""For `make test`: each stage, precision, kind of batch, loss and policy once."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, warm):
    return launch(tmp_path_factory.mktemp("stages"), 2, CHOSEN, warm)


def test_stages_give_equal_losses_in_bf16(two_ranks):
    assert_same_losses(two_ranks.losses("zero3_bf16"), two_ranks.losses("zero0_bf16"), BF16)


def test_fp16_gives_the_losses_of_fp32(two_ranks):
    assert_fp16_as_fp32(two_ranks, 2)


def test_student_may_be_sharded_too(two_ranks):
    assert_same_losses(two_ranks.losses("sharded_student"), two_ranks.losses("zero3_fp32"), FP32)
    whole = sum(4 * p.numel() for p in make_student("classification").parameters())
    assert two_ranks.results["zero3_fp32"]["student_held"] == [whole, whole]
    for held in two_ranks.results["sharded_student"]["student_held"]:
        assert held == pytest.approx(whole / 2, rel=0.02)


@pytest.mark.parametrize("scenario", [name for name in CHOSEN if name in SCENARIOS])
def test_equals_a_plain_loop(two_ranks, scenario):
    assert_equals_a_plain_loop(two_ranks, scenario)


def test_teachers_are_sharded_under_stage_3_alone(two_ranks):
    for name in ("first", "second"):
        numel = sum(p.numel() for p in make_teacher("classification", name).parameters())
        for scenario, size in (("zero3_fp32", 4), ("zero3_bf16", 2)):
            for rank in two_ranks.results[scenario]["held"]:
                assert rank[name] == pytest.approx(numel * size / 2, rel=0.02), scenario
        for rank in two_ranks.results["zero2_fp32"]["held"]:
            assert rank[name] == numel * 4


def test_teachers_stay_as_they_are(two_ranks):
    assert_teachers_stay_as_they_are(two_ranks)


def test_no_teacher_in_optimizer_or_checkpoint(two_ranks):
    student = sum(p.numel() for p in make_student("classification").parameters())
    projections = WIDTHS["student"] * (WIDTHS["first"] + WIDTHS["second"])
    trained = student + projections
    for stage in range(4):
        result = two_ranks.results[f"zero{stage}_fp32"]
        # Moments of the trained weights (each rank holds all of them under stage 0), plus
        # padding to equal shards.
        copies = 2 if stage == 0 else 1
        assert copies * trained <= result["optimizer_numel"] < copies * trained + 2_000, stage
        names = result["checkpoint_keys"]
        assert names and not [name for name in names if "/teachers." in name], stage
        assert any(name.startswith("weight/student.") for name in names), stage
        teachers = sum(
            4 * p.numel()
            for name in ("first", "second")
            for p in make_teacher("classification", name).parameters()
        )
        # Weights and two moments of what is trained, with their names; far below with teachers.
        assert 0 < result["checkpoint_bytes"] - 3 * 4 * trained < 50_000 < teachers


def test_ranks_really_preferred_different_teachers(two_ranks):
    from reference import followed_teacher, step_batches

    batches = step_batches("classification", "opposed", 0)
    for number, batch in enumerate(batches):
        followed = followed_teacher(batch)
        assert len(followed) == 8 and bool((followed == number % 2).all())
