"""What to change where memory ran out."""

from types import SimpleNamespace

import pytest

from ds_distill.recipe.phases import Cache
from ds_distill.run.memory import memory_refusal


@pytest.mark.parametrize(("set_to", "now"), [(None, 64), (10, 10)])
def test_a_cache_is_built_with_smaller_batches(set_to, now):
    run = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=1, device="cpu"),
        task=SimpleNamespace(location="task", max_length=128),
    )
    phase = Cache(splits=["train"], batch_size=set_to)
    refused = str(memory_refusal(MemoryError(), phase, "cache", run))
    assert f"Set phases.cache.batch_size below {now}; or set a shorter" in refused
