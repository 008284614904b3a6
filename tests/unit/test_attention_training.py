"""An engine that trains on attention and on every token: over a switch and a resume, in bf16, and
with activations that are computed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_of, terms_of
from families import built
from transformers import AutoModelForMaskedLM

from ds_distill.data.masking import _with_every_token
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs
from ds_distill.models.bundle import Bundle
from ds_distill.reads import TOKENS
from ds_distill.types import Batch
from ds_distill.views import PaddedView

ALL: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "kl": {"rows": "tokens", "temperature": 2.0},
    "cosine": {"rows": "tokens", "layers": {1: 2, 2: 4}},
    "hidden_mse": {"rows": "tokens", "layers": {0: 0, 2: 4}},
    "attention_kl": {"layers": {1: 2, 2: 4}},
    "relation_kl": {"layers": {2: 3}},
    "attention_mse": {"of": "maps", "layers": {1: 1}},
}
SWITCHED: dict[str, dict[str, Any]] = {
    "cross_entropy": {"from": 0.5},
    "attention_kl": {"layers": {1: 2, 2: 4}, "until": 0.3},
    "relation_kl": {"from": 0.3, "until": 0.7},
    "hidden_mse": {"rows": "tokens", "layers": {1: 2}, "until": 0.6},
}
STEPS = 10
LENGTHS = [9, 4, 12, 7]


def engine_with(
    world: World, losses: dict[str, Any], config: str, *, checkpointing: bool = False
) -> Engine:
    student, teacher = (
        built("bert", AutoModelForMaskedLM, seed=seed, num_hidden_layers=layers, hidden_size=16)
        for seed, layers in enumerate((2, 4))
    )
    torch.manual_seed(2)
    terms = terms_of(losses, TermInputs(16, {"t": 16}, 2, {"t": 4}))
    bundle = Bundle(student, {"t": teacher}, terms)
    return engine_of(world, bundle, config, decay=0.1, checkpointing=checkpointing)


def batch(step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 30, mask.shape, generator=draw)
    real = mask.flatten().nonzero()[:, 0]
    chosen = real[torch.randperm(len(real), generator=draw)[:6]].sort().values
    view = PaddedView(ids * mask, mask.long(), positions=chosen)
    view, labels, masked = _with_every_token(view, ids.flatten()[chosen])
    sets = {"all": masked, TOKENS: torch.arange(len(labels))}
    made = Batch.from_views({"student": view, "t": view}, labels, row_sets=sets)
    return replace(made, progress=step / STEPS)


def train(engine: Engine, steps: range) -> list[dict[str, float]]:
    """The parts of the loss of each step, with dropout of its own."""
    found = []
    for step in steps:
        torch.manual_seed(100 + step)
        parts = engine.train_step([batch(step)])
        found.append({name: float(part) for name, part in parts.items()})
    return found


@pytest.mark.parametrize(
    ("config", "at"), [("zero0_fp32", 4), ("zero1_bf16", 4), ("zero3_fp32", 8)]
)
def test_a_resume_after_attention_has_switched_is_bit_identical(
    world: World, config: str, at: int, tmp_path: Path
) -> None:
    engine = engine_with(world, SWITCHED, config)
    before = train(engine, range(at))
    engine.save(tmp_path)
    rest = train(engine, range(at, STEPS))
    weights = engine.student_weights()
    engine.close()
    active = [set(parts) - {"loss"} for parts in before + rest]
    assert active[0] == {"attention_kl", "hidden_mse"} and active[-1] == {"cross_entropy"}
    assert active[4] == {"relation_kl", "hidden_mse"}
    resumed = engine_with(world, SWITCHED, config)
    resumed.load(tmp_path)
    assert train(resumed, range(at, STEPS)) == rest
    assert all(torch.equal(weights[name], now) for name, now in resumed.student_weights().items())
    resumed.close()


@pytest.mark.parametrize("config", ["zero0_fp32", "zero1_bf16", "zero3_fp32"])
def test_activations_computed_again_change_no_loss(world: World, config: str) -> None:
    """A layer of the student is called twice in each step then; else only by the first pass, which
    looks whether it needs the layers, and at stage 3."""
    found, times = [], []
    for checkpointing in (False, True):
        engine = engine_with(world, ALL, config, checkpointing=checkpointing)
        calls: list[bool] = []
        engine.bundle.student.bert.encoder.layer[1].attention.register_forward_hook(
            lambda *_, calls=calls: calls.append(torch.is_grad_enabled())
        )
        found.append(train(engine, range(4)))
        times.append(len(calls))
        engine.close()
    plain, again = found
    for one, other in zip(plain, again, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    assert plain[-1]["loss"] < plain[0]["loss"] and times == [4 if "zero3" in config else 1, 8]


def test_bf16_gives_the_losses_of_fp32(world: World) -> None:
    found = {}
    for config in ("zero1_fp32", "zero1_bf16"):
        engine = engine_with(world, ALL, config)
        found[config] = train(engine, range(4))
        engine.close()
    for exact, half in zip(*found.values(), strict=True):
        assert exact.keys() == half.keys() == {"loss", *ALL}
        assert half == pytest.approx(exact, rel=0.05, abs=2e-3)
