"""Live teachers run once a step over all of its micro-batches, and say what they would have
said of each; what they read is prefetched, whatever else runs in between."""

import torch
from unit.test_teachers_once import engine_of, losses_of_three_steps


def test_activations_may_be_computed_again(world):
    plain = losses_of_three_steps(engine_of(world))
    again = losses_of_three_steps(engine_of(world, checkpointing=True))
    for step, expected in enumerate(plain):
        for name, value in expected.items():
            torch.testing.assert_close(again[step][name], value, rtol=1e-6, atol=1e-6)
