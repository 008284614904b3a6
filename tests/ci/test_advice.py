"""Which placement of teachers a plan's first line says to take."""

from __future__ import annotations

import pytest

from ds_distill.planning.advice import advice
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.planner import Planner
from ds_distill.recipe import load_recipe


def test_no_cache_is_advised_where_none_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of every token, and a student that knows more words than its teacher."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = Planner(load_recipe("vekd"), GPUS["h100"], 8).plan()
    assert found.break_even == []
    ways = [{one.choice.teachers for one in job.others} for job in found.jobs]
    assert ways == [{"live"}, {"live"}]
    lines = [*advice(found)]
    assert len(lines) == 2 and not any("cache" in line for line in lines)
    grown, given = (job.chosen.states.total for job in found.jobs)
    rows = (60000 - 30522) * 768
    assert grown - given > 2 * rows
