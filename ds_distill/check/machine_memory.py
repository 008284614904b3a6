"""Models that a machine's memory cannot hold. `ds-distill plan` knows more, and takes longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig

from ds_distill.engine.config import find_config
from ds_distill.engine.precision import is_half
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import Step, steps
from ds_distill.recipe.phases import Distil
from ds_distill.recipe.phases.base import TrainingPhase

TRAINED = 16
"""Bytes per parameter that is trained: fp32 weight and gradient and Adam's two moments; in bf16
weight and gradient of 2 bytes each, and an fp32 copy."""

PROCESS = 370_000_000
"""Bytes that no other process shares, of a rank that has imported the libraries and joined a group,
and nothing more: measured with torch 2.13.0+cpu, DeepSpeed 0.19.8, Python 3.11."""

GB = 1e9


def fewest_parameters(config: PreTrainedConfig) -> int:
    """Parameters of an encoder's embeddings and layers. Less than there are: biases, heads and what
    only some architectures have are left out."""
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", 0)
    # ALBERT's layers share their weights.
    layers = 1 if config.model_type == "albert" else config.num_hidden_layers
    embedded = getattr(config, "embedding_size", None) or width
    # MobileBERT's are narrower inside, with maps to there and back, and several inner parts.
    inside = getattr(config, "true_hidden_size", width)
    maps = 3 * width * inside if inside < width else 0
    parts = getattr(config, "num_feedforward_networks", 1)
    return int(
        config.vocab_size * embedded + layers * (4 * inside**2 + 2 * inside * inner * parts + maps)
    )


def memory_mistakes(
    recipe: Recipe,
    configs: Mapping[str, PreTrainedConfig],
    memory: int,
    machine: str = "this machine",
    *,
    ranks_here: int = 1,
    ranks: int = 1,
) -> Iterator[str]:
    """One for each phase that needs more than `memory` bytes on one CPU host even where nothing but
    processes, weights, gradients and Adam's moments is counted.

    configs: by location in the recipe, `student` (see `student_config`) and `teachers.NAME`.
    machine: whose memory it is. ranks_here: those on it, of all `ranks`.
    """
    numbers = {
        location.removeprefix("teachers."): fewest_parameters(config)
        for location, config in configs.items()
    }
    _, config = find_config(recipe.deepspeed, for_device=False)
    each = 2 if is_half(config) or recipe.deepspeed.endswith("_auto") else 4
    stage = config.get("zero_optimization", {}).get("stage", 0)
    for step in steps(recipe):
        phase = step.phase
        whole, sharded = _least(step, numbers, each, stage)
        least = ranks_here * (PROCESS + whole + sharded / ranks)
        if least > memory:
            what = "its models alone take"
            advice = "Take a machine with more memory, or smaller models"
            if ranks_here > 1:
                what = f"{ranks_here} ranks and its models take at least"
                advice = f"Start fewer ranks, t{advice[1:]}"
            if isinstance(phase, Distil) and phase.teachers == "live" and step.teachers:
                advice += f", or set phases.{step.name}.teachers=cached"
            yield (
                f"phases.{step.name}: {what} {least / GB:.1f} GB, and {machine} has "
                f"{memory / GB:.1f} GB of memory. {advice}. `ds-distill plan` shows what fits."
            )


def _least(step: Step, numbers: Mapping[str, int], each: int, stage: int) -> tuple[int, int]:
    """Bytes of the models that a phase has at once, only those of known size: on each rank, and of
    all ranks together. What a ZeRO stage may spread over the ranks counts as spread."""
    phase = step.phase
    teachers = [numbers.get(step.model(name).origin, 0) for name in step.teachers]
    if isinstance(phase, TrainingPhase):
        trained = max(
            sum(numbers.get(step.model(phase.start_of(o)).origin, 0) for o in together)
            for together in phase.trainings or [[]]
        )
        live = isinstance(phase, Distil) and phase.teachers == "live"
        weights = each * (trained + (sum(teachers) if live else 0))
        states = (TRAINED - each) * trained
    else:
        weights, states = each * max(teachers, default=0), 0  # one after the other
    if stage == 3:
        return 0, weights + states
    return (weights + states, 0) if stage == 0 else (weights, states)
