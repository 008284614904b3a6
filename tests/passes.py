"""Small models as a plan sees them, and the same with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, BertConfig, DebertaV2Config, DistilBertConfig, PreTrainedConfig

from ds_distill.models.encoder import read_signals
from ds_distill.models.load import CLASSIFIER, MASKED_LM
from ds_distill.planning import models
from ds_distill.planning.models import Pass, PlannedModel
from ds_distill.planning.trace import Cost
from ds_distill.views import PaddedView

SIZE = {"vocab_size": 500, "hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 6}
CONFIGS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SIZE, intermediate_size=384),
    "distilbert": DistilBertConfig(vocab_size=500, dim=96, n_heads=3, n_layers=6, hidden_dim=384),
    "deberta": DebertaV2Config(
        **SIZE,
        intermediate_size=384,
        pooler_hidden_size=96,
        relative_attention=True,
        position_buckets=32,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
    ),
}


def model_of(name: str, classes: int | None = 3) -> PlannedModel:
    head = MASKED_LM if classes is None else CLASSIFIER
    return PlannedModel(name, name, CONFIGS[name], False, head, classes)


def planned(folder: object, classes: int) -> PlannedModel:
    """A classifier of the configuration in a folder."""
    return PlannedModel("", "", AutoConfig.from_pretrained(folder), False, CLASSIFIER, classes)


def of(examples: int, length: int, trains: bool, rows: int | None = None, **more: Any) -> Pass:
    share = rows and rows / (examples * length)
    plain = Pass(examples, length, share, torch.float32, False, fused=False, trains=trains)
    return replace(plain, **more)


def untraced(patch: pytest.MonkeyPatch) -> None:
    """Plans take a tenth of their time: a pass costs the same for each example and layer."""

    def cost(model: PlannedModel, layers: int, of: Pass) -> Cost:
        return Cost(Counter({(10**9, 10**6): of.examples * layers}), 10**6 * of.examples * layers)

    patch.setattr(models, "_traced", cost)


def run(model: Any, view: PaddedView, trains: bool) -> None:
    model.train(trains)
    with torch.set_grad_enabled(trains):
        logits = read_signals(model, view).logits
        if trains:
            logits.float().log_softmax(-1).sum().backward()


def allocated_peak(of: Callable[[], Any]) -> int:
    """Most bytes alive that a call allocated, as torch's profiler sees its allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        of()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def real(planned: PlannedModel, one: Pass) -> tuple[Any, PaddedView]:
    """The model with weights, whose gradients are dropped, and a batch with padding."""
    config = planned.config
    config.num_labels = planned.classes or 2
    kind = type(planned.build())
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    ids = torch.randint(5, 400, (one.examples, one.length))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    positions = None if one.row_share is None else torch.arange(one.rows)
    return model, PaddedView(ids, mask, positions=positions)
