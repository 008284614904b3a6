"""Engines of the small models whose configurations lie in a folder, for the workers that look at
what one holds and sends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.precision import model_dtype
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.recipe.terms import losses_of
from ds_distill.routing import Router
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

CLASSES = 4


def batch_of(rows: int, teachers: Sequence[str], live: bool) -> Batch:
    """live: the teachers read it; else it brings what they say."""
    ids = torch.ones(rows, 8, dtype=torch.int64)
    view = PaddedView(ids, torch.ones_like(ids))
    names = ["student", *(teachers if live else ())]
    signals = {} if live else {name: Signals(torch.zeros(rows, CLASSES)) for name in teachers}
    labels = torch.zeros(rows, dtype=torch.int64)
    return Batch.from_views(dict.fromkeys(names, view), labels, signals=signals)


def engine_of(
    world: World, folder: Path, config: dict[str, Any], teachers: Sequence[str], **options: Any
) -> Engine:
    """teachers: the names of those that are live. options: the engine's."""
    own, other = (
        AutoConfig.from_pretrained(folder / name, num_labels=CLASSES)
        for name in ("student", "teacher")
    )
    make = AutoModelForSequenceClassification.from_config
    student = make(own, dtype=torch.float32)
    with sharded_loading(config):
        models = {name: make(other, dtype=model_dtype(config)) for name in teachers}
    terms = build_terms(losses_of({"kl": {}}), TermInputs(own.hidden_size))
    bundle = Bundle(student, models, terms, Router("average"))
    return Engine(bundle, config, world, OptimizerSettings(1e-4, 0.01, 10, 1), **options)
