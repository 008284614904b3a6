"""An engine that was closed holds no memory: a run trains and judges one model after the other."""

from __future__ import annotations

import gc
import weakref

import pytest
from engines import make_batch, make_engine

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.models.bundle import Bundle


@pytest.mark.parametrize(
    ("config", "checkpointing"),
    [
        (f"zero{n}_{dtype}", n % 2 == (dtype == "bf16"))
        for n in range(4)
        for dtype in ("fp32", "bf16")
    ],
)
def test_nothing_of_it_is_left(world: World, config: str, checkpointing: bool) -> None:
    """Weights, gradients and optimizer. At stage 3 a list and a cache of DeepSpeed's would keep the
    model, and what hangs on it, for ever."""
    engine = make_engine(world, config, checkpointing=checkpointing)
    for _ in range(3):
        engine.train_step([make_batch()])
    engine.predict(make_batch(), ["student"])
    assert engine.bundle.student is not None
    left = [weakref.ref(engine.bundle), *map(weakref.ref, engine.bundle.student.parameters())]
    left += [weakref.ref(engine._engine), weakref.ref(engine._engine.optimizer)]
    engine.close()
    del engine
    gc.collect()
    assert [one() for one in left if one() is not None] == []


def test_nothing_is_left_of_sharded_models_that_only_ran(world: World) -> None:
    trained = make_engine(world, "zero3_fp32")
    model = trained.bundle.student
    assert model is not None
    trained.close()
    engine = Engine(
        Bundle(None, {"student": model}), deepspeed_config("zero3_fp32", None, 1), world
    )
    for _ in range(3):
        engine.predict(make_batch(), ["student"])
    left = [weakref.ref(engine.bundle), weakref.ref(model)]
    engine.close()
    del engine, model, trained
    gc.collect()
    assert [one() for one in left if one() is not None] == []
