"""What `make test` shows of some stages and precisions, of the others."""

import pytest
from unit.test_checkpoints import check_goes_on, check_goes_on_at_another_stage
from unit.test_resting import GRID, PAIRED, check_plain_loop, check_rest


@pytest.mark.parametrize("config", ["zero0_bf16", "zero1_fp32", "zero2_bf16", "zero3_fp32"])
def test_another_process_goes_on_bit_by_bit(config, world, tmp_path):
    check_goes_on(config, world, tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [("zero1_fp32", "zero0_fp32"), ("zero2_fp32", "zero3_fp32"), ("zero3_bf16", "zero0_bf16")],
)
def test_a_training_goes_on_at_another_stage(one, other, world, tmp_path):
    check_goes_on_at_another_stage(one, other, world, tmp_path)


@pytest.mark.parametrize(
    ("stage", "precision", "dtype", "tolerance"), [one for one in GRID if one[:2] not in PAIRED]
)
def test_losses_are_those_of_a_plain_loop_where_weights_rest(
    world, stage, precision, dtype, tolerance
):
    check_plain_loop(world, stage, precision, dtype, tolerance)


@pytest.mark.parametrize("config", ["zero1_bf16", "zero2_bf16", "zero2_fp16", "zero3_fp16"])
def test_weights_rest_until_a_term_reads_them_and_after(world, config, tmp_path, monkeypatch):
    check_rest(world, config, tmp_path, monkeypatch)
