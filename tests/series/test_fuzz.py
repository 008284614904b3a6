"""Hundreds of changed files; tests/fuzz/series.py runs thousands."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from series import series, targets


def test_thousands(tmp_path):
    done = series(targets(tmp_path), 5000, seed=0, folder=tmp_path)
    assert not done["faults"], "\n".join(done["faults"].values())
