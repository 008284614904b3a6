"""A micro-batch whose loss is not finite is left out of a step, and the rest trains on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import make_batch, make_engine

from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.recipe.terms import losses_of
from ds_distill.types import Batch, Signals

CONFIGS = [f"zero{stage}_{dtype}" for stage in range(4) for dtype in ("fp32", "bf16")]


def batch_of(logits: float) -> Batch:
    """A batch with a cached teacher's logits: one row of them is `logits`."""
    batch = make_batch()
    teacher = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    teacher[1, 2] = logits
    rows = {**batch.row_sets, "all": torch.arange(4)}
    return replace(batch, row_sets=rows, signals={"bert": Signals(teacher)})


def no_rows(batch: Batch) -> Batch:
    none = torch.arange(0)
    return replace(batch, row_sets={name: none for name in batch.row_sets})


def engine_of(world: World, config: str) -> Engine:
    terms = build_terms(losses_of({"kl": {"temperature": 2.0}, "cross_entropy": {}}), TermInputs(8))
    return make_engine(world, config, terms, dropout=0.0, micro_steps=2)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_rest_of_the_step_trains_as_if_that_part_had_no_rows(config, world):
    good, bad = batch_of(1.0), batch_of(float("nan"))
    called: list[tuple[int, list[str]]] = []

    def leave_out(number: int, losses: list[str]) -> Batch:
        called.append((number, losses))
        return no_rows(good)

    engine = engine_of(world, config)
    losses = [engine.train_step([good, good], leave_out)]
    assert called == []
    losses += [engine.train_step([bad, good], leave_out), engine.train_step([good, bad], leave_out)]
    assert called == [(0, ["kl"]), (1, ["kl"])]
    losses += [engine.train_step([good, good], leave_out)]
    weights = engine.student_weights()
    engine.close()
    assert all(torch.isfinite(weight).all() for weight in weights.values())

    # The same with batches of no rows: means are over the rows that are there.
    other = engine_of(world, config)
    for expected, batches in zip(
        losses,
        ([good, good], [no_rows(good), good], [good, no_rows(good)], [good, good]),
        strict=True,
    ):
        assert torch.equal(other.train_step(batches)["loss"], expected["loss"])
    for name, weight in other.student_weights().items():
        assert torch.equal(weight, weights[name]), name
    other.close()


def test_without_it_a_step_spoils_the_student(world):
    engine = engine_of(world, "zero0_fp32")
    engine.train_step([batch_of(1.0), batch_of(float("nan"))])
    assert not all(torch.isfinite(weight).all() for weight in engine.student_weights().values())
    engine.close()
