"""What to change where memory ran out."""

from types import SimpleNamespace
from typing import Any

import pytest

from ds_distill.recipe.phases import Cache
from ds_distill.run.memory import memory_refusal


@pytest.mark.parametrize(("set_to", "advised"), [(None, 32), (10, 5), (1, 1)])
def test_a_cache_is_built_with_half_of_its_batches(set_to, advised):
    run: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=1, device="cpu"),
        task=SimpleNamespace(location="task", max_length=128),
    )
    phase = Cache(splits=["train"], batch_size=set_to)
    refused = str(memory_refusal(MemoryError(), phase, "cache", run))
    assert f"Set phases.cache.batch_size={advised}; or set a shorter" in refused
