"""Hundreds of changed files; tests/fuzz/series.py runs thousands."""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from series import outcome, series, targets

from ds_distill.errors import UserError


def test_what_is_read_is_read_or_refused(tmp_path):
    found = targets(tmp_path)
    for name, target in found.items():
        as_it_is = shutil.copytree(target.folder, tmp_path / f"{name} as it is")
        target.use(as_it_is)  # nothing is refused
        assert len({target.case(seed, tmp_path / f"{name}{seed}") for seed in range(3)}) == 3
    done = series(found, 320, seed=1_000_000, folder=tmp_path)
    assert not done["faults"], "\n".join(done["faults"].values())
    assert all(counts.get("refused", 0) > 5 for counts in done["counts"].values())
    assert done["counts"]["data in JSON"]["read"] > 3, "some changes do no harm"


def test_a_fault_is_seen(tmp_path):
    """What raises anything but UserError is a fault; so is what hangs."""
    target = targets(tmp_path)["models"]

    def raises(error):
        def use(place):
            raise error

        broken = type(target)(target.folder, target.files, use)
        return outcome(broken, 0, tmp_path / type(error).__name__)

    assert raises(UserError("no")) == "refused"
    assert "KeyError" in raises(KeyError("x"))
