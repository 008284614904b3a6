"""The tests on a machine that has none of the shared data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

UNIT = Path(__file__).parents[1] / "unit"


def test_vocabularies_of_each_kind_are_made_where_there_are_none(tmp_path: Path) -> None:
    """A test that asked for a published one failed there, and nowhere else."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = [UNIT / f"test_{name}.py" for name in ("batches", "masked_lm")]
    known = {**os.environ, "DS_DISTILL_SHARED_DATA": str(tmp_path / "nowhere")}
    done = subprocess.run([*command, *files], env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 50, done.stdout[-3000:]
