"""A small training engine in this process, and a batch for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.world import World
from ds_distill.losses import Term, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training
from ds_distill.types import Batch
from ds_distill.views import PaddedView

RATE, DECAY = 0.01, 0.5


def make_batch() -> Batch:
    ids = torch.arange(5, 25).view(4, 5)
    view = PaddedView(ids, torch.ones_like(ids), torch.zeros_like(ids))
    keys = torch.arange(8).view(4, 2)
    return Batch(keys, {"student": view}, torch.tensor([0, 1, 2, 1]), {"labelled": torch.arange(4)})


def make_student(dropout: float) -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
        hidden_dropout_prob=dropout,  # so that the state of the generator matters
        attention_probs_dropout_prob=dropout,
    )
    student = BertForSequenceClassification(shape)
    with torch.no_grad():
        for parameter in student.parameters():  # biases are 0 and norms 1 otherwise
            parameter.uniform_(0.5, 1.0)
    return student


def terms_of(
    losses: dict[str, dict[str, Any]], inputs: TermInputs | None = None
) -> dict[str, Term]:
    return build_terms(losses_of(losses), inputs or TermInputs(8))


def engine_of(
    world: World,
    bundle: Bundle,
    config: str,
    rate: float = RATE,
    decay: float = DECAY,
    micro_steps: int = 1,
    checkpointing: bool = False,
    **options: bool,
) -> Engine:
    """Of four examples a micro-batch, and ten steps, of which the first one's rate is 0."""
    training = Training(
        batch_size=4 * micro_steps, micro_batch_size=4, activation_checkpointing=checkpointing
    )
    return Engine(
        bundle,
        deepspeed_config(config, training, 1),
        world,
        OptimizerSettings(rate, decay, total_steps=10, warmup_steps=2),
        **options,
    )


def make_engine(
    world: World,
    config: str,
    terms: dict[str, Term] | None = None,
    dropout: float = 0.3,
    **options: Any,
) -> Engine:
    """Of a lone student; more options: those of `engine_of`."""
    bundle = Bundle(make_student(dropout), {}, terms or terms_of({"cross_entropy": {}}))
    return engine_of(world, bundle, config, **options)


def plain_adamw(weights: Iterable[torch.Tensor], decay: float, **options: Any) -> torch.optim.AdamW:
    """PyTorch's own, which decays matrices alone, as an engine's optimizer does."""
    given = [*weights]
    groups = [
        {"params": [weight for weight in given if weight.ndim > 1], "weight_decay": decay},
        {"params": [weight for weight in given if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **options)
