"""A checkpoint goes on with other numbers of ranks and at other ZeRO stages, sharded teachers
beside the student."""

import itertools
import json
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "distributed" / "resume_worker.py"


@pytest.fixture(scope="module")
def losses(tmp_path_factory, warm):
    folder = tmp_path_factory.mktemp("resume")
    done = warm.run([str(WORKER), str(folder)], timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


def test_losses_of_the_rest_are_those_of_the_uninterrupted_training(losses):
    whole = losses["two"]
    assert losses["one"] == pytest.approx(whole, rel=1e-5)
    for name, rest in losses.items():
        assert rest[-3:] == pytest.approx(whole[3:], rel=1e-5), name
        assert len(rest) == (6 if name in ("one", "two") else 3)
    # Each step changes the loss by far more than that.
    assert min(abs(one - other) for one, other in itertools.pairwise(whole)) > 1e-3
