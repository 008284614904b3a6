"""The plan of a recipe: what it counts, says and refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.test_planning import (
    BERT,
    MASKED,
    NUMBERED,
    TINY,
    _no_data,  # noqa: F401
    planned,
)

from ds_distill.errors import UserError
from ds_distill.planning.models import planned_model, shipped_configs
from ds_distill.planning.plan import Choice, Placement


def test_fp16_is_planned_as_bf16_is_but_not_at_stage_0(tmp_path: Path) -> None:
    half, brain = (
        planned(tmp_path, f"deepspeed=zero3_{name}").jobs[0] for name in ("fp16", "bf16")
    )
    assert {other.choice.stage for other in half.others} == {1, 2, 3}
    assert half.chosen == brain.chosen
    assert not planned(tmp_path, "deepspeed=zero3_fp16", gpu="t4").notes
    assert "fp16 or fp32" in planned(tmp_path, gpu="t4").notes[0]


def test_checkpointing_takes_less_memory_and_more_time(tmp_path: Path) -> None:
    [job] = planned(tmp_path, "task.max_length=256", "training.batch_size=512").jobs
    own = job.chosen
    assert not own.choice.checkpointing
    wanted = replace(own.choice, teachers="cached", checkpointing=True)
    [less] = [other for other in job.others if other.choice == wanted]
    more = job.placement("cached", own.choice)
    assert more is not None
    assert less.activations < 0.8 * more.activations
    assert less.step.student > more.step.student
    again = planned(tmp_path, "training.activation_checkpointing=true").jobs[0]
    assert again.chosen.choice.checkpointing


def test_a_cache_costs_about_a_pass_of_the_teachers(tmp_path: Path) -> None:
    [pays] = planned(tmp_path, "training.batch_size=256", "deepspeed=zero1_bf16").break_even
    assert pays.live_of_cached > 1.2
    assert pays.passes == pytest.approx(1.0, abs=0.1)  # micro-batches are as large as the cache's
    assert pays.in_recipe == 2
    # Small micro-batches of live teachers are slow: it costs less than one of these passes.
    [pays] = planned(tmp_path, "training.batch_size=4", "deepspeed=zero1_bf16").break_even
    assert pays.passes < 0.5


def test_a_cache_is_of_its_task(tmp_path: Path) -> None:
    """With two tasks the other's cache was counted: here one of batches of 1."""
    task = {"data": {"path": "data"}, "labels": ["a", "b", "c"], "max_length": 32}
    other = {"cache": {"name": "other", "task": "two", "splits": "train", "batch_size": 1}}
    own = {"cache": {"name": "own", "task": "one", "splits": "train"}}
    distil = {"distil": {"task": "one", "losses": {"kl": {}}}}

    def passes(*phases: dict[str, Any]) -> float:
        parts = {"task": None, "tasks": {"one": task, "two": task}, "phases": [*phases, distil]}
        [pays] = planned(tmp_path, "deepspeed=zero1_bf16", **parts).break_even
        return pays.passes

    assert passes(own, other) == passes(own) == passes(other)


def test_a_cache_of_mask_variants_costs_a_pass_each(tmp_path: Path) -> None:
    task = MASKED
    parts = {
        "phases": [{"distil": {"losses": {"kl": {}}}}],
        "teachers": {"one": {"model": str(shipped_configs()[BERT])}},
        "deepspeed": "zero1_bf16",
    }

    def passes(variants: int) -> float:
        masked = {**task, "masking": {"variants": variants}}
        plan = planned(tmp_path, "training.batch_size=256", task=masked, **parts)
        return plan.break_even[0].passes

    assert passes(6) == pytest.approx(6 * passes(1))


def test_a_masked_lms_logits_are_in_the_plan(tmp_path: Path) -> None:
    task = NUMBERED
    phases = [{"distil": {"losses": {"kl": {}}}}]
    teachers = {"one": {"model": str(shipped_configs()[BERT])}}
    parts = {"task": task, "phases": phases, "teachers": teachers}
    [job] = planned(tmp_path, "training.batch_size=256", **parts).jobs
    rows = round(0.15 * 64 * 64)
    live, cached = (job.placement(kind, job.chosen.choice) for kind in ("live", "cached"))
    assert live is not None and cached is not None
    # Two models' logits in fp32 and the derivative in bf16; a decoder's gradient in fp32.
    assert live.head == rows * 30522 * (8 + 2) + 4 * 30522 * 128
    assert cached.head > rows * 30522 * 4


def test_what_terms_read_of_every_token_is_in_the_plan(tmp_path: Path) -> None:
    """Beside a teacher: its states and the inputs of its attention, until the loss."""
    task = MASKED
    teachers = {"one": {"model": str(shipped_configs()[BERT])}}

    def of(losses: dict[str, Any]) -> Placement:
        parts = {"task": task, "phases": [{"distil": {"losses": losses}}], "teachers": teachers}
        [job] = planned(tmp_path, "training.batch_size=256", **parts).jobs
        found = job.placement("live", Choice(0, "live", False))
        assert found is not None
        return found

    losses: dict[str, Any] = {"kl": {}, "hidden_mse": {"rows": "tokens"}}
    alone, examples = of(losses), 256 // 4
    more = {"attention_kl": {"layers": {1: 2}}, "relation_kl": {"layers": {1: 2, 2: 4}}}
    beside = of({**losses, **more})
    # Of layers 2 and 4 queries, keys and values, in bf16.
    assert beside.activations - alone.activations == 6 * examples * 64 * 256 * 2
    masked, every = of({"kl": {}}), of({"kl": {"rows": "tokens"}})
    assert masked.head == alone.head and masked.activations < alone.activations
    assert every.head > 4 * masked.head


def test_weights_that_rest_are_groups_of_their_own(tmp_path: Path) -> None:
    """Of three ranks' shares each is padded by itself."""
    losses = {"hidden_mse": {"until": 0.5}, "kl": {"from": 0.5}}
    phases = [{"distil": {"teachers": "live", "losses": losses, "keep": "last"}}]
    [job] = planned(tmp_path, "deepspeed=zero1_fp32", phases=phases, gpus=3).jobs
    model = planned_model("tiny", str(shipped_configs()[TINY]), classes=3).build()
    numels: Counter[tuple[bool, str]] = Counter({(True, "projections"): 2 * 128 * 256})
    for name, weight in model.named_parameters():
        part = "head" if name.startswith(("bert.pooler", "classifier")) else "encoder"
        numels[weight.ndim > 1, part] += weight.numel()
    assert len(numels) == 5
    assert job.chosen.states.optimizer == 12 * sum(-(-one // 6) * 2 for one in numels.values())


def test_albert_cannot_checkpoint(tmp_path: Path) -> None:
    albert = {"model": str(shipped_configs()["albert/albert-base-v2"])}
    [job] = planned(tmp_path, student=albert).jobs
    assert not any(other.choice.checkpointing for other in job.others)
    with pytest.raises(UserError, match=r"phases\.distil\.activation_checkpointing=true"):
        planned(tmp_path, "training.activation_checkpointing=true", student=albert)


def test_a_shipped_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plan = planned(tmp_path, "student.model=google-bert/bert-large-cased")
    assert any("come with ds_distill" in note and "bert-large-cased" in note for note in plan.notes)
    assert len(plan.notes) == 1
