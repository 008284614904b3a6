"""A teacher that knows nothing leaves the set: cached and live distillation do without it, on one
process and on two, and the evaluation shows it."""

import pytest
from ci.test_qualified import one, recipe  # noqa: F401
from runs import losses


def test_two_ranks_go_on_without_its_weights(one, recipe, ds_distill):
    """After the last cache is built they are NaN, and a bundle runs all teachers that it has."""
    folder = recipe.parent / "two"
    ds_distill("cache", "build", recipe, "--folder", folder)
    weights = recipe.parent / "ignorant" / "model.safetensors"
    whole = weights.read_bytes()
    try:
        header = 8 + int.from_bytes(whole[:8], "little")
        weights.write_bytes(whole[:header] + b"\xff" * (len(whole) - header))
        on_two = ["launch", recipe, "--num-gpus", "2", "--folder", folder]
        ds_distill(*on_two, "--resume", "--until", "live")
    finally:
        weights.write_bytes(whole)
    for student in ("expertise", "chosen", "live"):
        assert losses(folder, student)[:5] == pytest.approx(losses(one, student)[:5], rel=1e-3)
