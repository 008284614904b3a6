"""What `distillation_step` compares: its models, its batches, and our own two paths.

Weights and words are random, and the student has no dropout: every path starts from the same
weights and sees the same batches, so their first losses can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from large_teachers import CLASSES, configurations
from safetensors.torch import load_file, save_file
from topk_codec import TopKCodec
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DistilBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from ds_distill.cache.codecs import Encoded, StoredLogits
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.precision import model_dtype
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import load_config
from ds_distill.models.load import CLASSIFIER, MASKED_LM, load_model
from ds_distill.models.packing import packed_attention, packed_backend
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training
from ds_distill.routing import Router
from ds_distill.types import Batch, Signals
from ds_distill.views import PackedView, PaddedView, View

TEMPERATURE = 2.0
DISTINCT = 4
"""Different batches; steps take them in turn."""
ENTRIES = 64
"""Of each distribution in the cache."""
COUNTED = 0.15
"""Share of a masked-LM's tokens that are rows."""
_FIRST_WORD = 5
"""Ids below it are special tokens of some vocabulary, RoBERTa's padding among them."""
_MORE_TOKENS = {"roberta-large": 3, "deberta-v3-large": 1}
"""That a teacher's own tokenizer makes of the same text."""
_SMALL: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
"""The shape of MiniLM."""
_TINY: dict[str, Any] = {
    "vocab_size": 100,  # little of a random teacher's flat distributions is beyond the top 64
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.1,  # so narrow a model says next to nothing with the usual 0.02
}


@dataclass(frozen=True)
class Setting:
    """What all paths have in common."""

    task: Literal["classification", "masked-lm"]
    size: Literal["large", "small", "tiny"]
    """small: a BERT and a RoBERTa of MiniLM's shape, and a student of three of its layers."""
    batch: int
    """Examples of a step."""
    length: int
    """Tokens of the student's view of an example; no padding."""
    steps: int
    """That are measured, after the warm-up."""
    config: str
    """DeepSpeed config of the student's engine, by name."""

    @property
    def deepspeed(self) -> dict[str, Any]:
        return deepspeed_config(self.config, Training(batch_size=self.batch), 1)

    @property
    def dtype(self) -> torch.dtype:
        return model_dtype(self.deepspeed)

    @property
    def teachers(self) -> dict[str, PreTrainedConfig]:
        made = configurations()
        if self.task == "masked-lm":
            made = {"bert-large": made["bert-large"]}
        if self.size == "small":
            made.pop("deberta-v3-large", None)
        for config in made.values() if self.size != "large" else ():
            config.update(_TINY if self.size == "tiny" else _SMALL)
            if hasattr(config, "pooler_hidden_size"):
                config.update({"pooler_hidden_size": config.hidden_size})
        return made

    @property
    def student(self) -> PreTrainedConfig:
        none: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
        config = DistilBertConfig(num_labels=CLASSES, seq_classif_dropout=0.0, **none)
        if self.size == "tiny":
            config.update(_TINY)
            config.update({"hidden_dim": 64})
        if self.size == "small":
            config.update({**_SMALL, "hidden_dim": 1536, "num_hidden_layers": 3})
        return config


@dataclass(frozen=True)
class Steps:
    """What a path's steps were."""

    seconds: list[float]
    """Of each step: batch to the device, teachers, student, backward, optimizer."""
    first_loss: float
    """T^2 * KL(target || student), mean over the rows of the first batch."""


Runner = Callable[[list[Batch]], Steps]
"""A path, ready: takes one optimizer step on each batch, in order."""


def optimizer_settings(setting: Setting) -> OptimizerSettings:
    """AdamW as a recipe's default has it; the rate falls slowly, so that every step trains."""
    training = Training()
    return OptimizerSettings(training.learning_rate, training.weight_decay, 10 * setting.steps, 1)


def run_steps(step: Callable[[Batch], torch.Tensor], device: torch.device) -> Runner:
    """A path that is called step by step. step: a batch on the CPU -> the loss."""

    def run(batches: list[Batch]) -> Steps:
        seconds, losses = [], []
        for batch in batches:
            started = now(device)
            losses.append(step(batch).detach())
            seconds.append(now(device) - started)
        return Steps(seconds, float(losses[0]))

    return run


def now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ------------------------------------------------------------------ models and batches


def prepare(setting: Setting, folder: Path, world: World) -> dict[str, Any]:
    """Write the checkpoints that every path starts from, and the words of the cached one."""
    kind = AutoModelForSequenceClassification
    if setting.task == "masked-lm":
        kind = AutoModelForMaskedLM
    torch.manual_seed(0)
    with torch.device(world.device):  # on a CPU a billion random numbers take half a minute
        made = {"student": kind.from_config(setting.student)}
        for name, config in setting.teachers.items():
            made[name] = kind.from_config(config, dtype=setting.dtype)
    for name, model in made.items():
        model.save_pretrained(folder / name)
    parameters = {name: model.num_parameters() for name, model in made.items()}
    del made, model
    with sharded_loading(setting.deepspeed):
        teachers = load_teachers(setting, folder, world)
    engine = Engine(Bundle(None, teachers), deepspeed_config(setting.config, None, 1), world)
    schema = {}
    for number in range(DISTINCT):
        for name, outputs in engine.predict(make_batch(setting, number), teachers).items():
            schema[f"{number}.{name}"] = _as_kept(setting, outputs.logits).cpu()
    save_file(schema, folder / "words.safetensors")
    return {
        "device": str(world.device),
        "threads": torch.get_num_threads(),
        "parameters": parameters,
    }


def packs(setting: Setting, name: str, world: World) -> bool:
    """Whether a run of ours would ask a teacher without padding."""
    if world.device.type != "cuda" or setting.dtype is not torch.bfloat16:
        return False
    return packed_backend(setting.teachers[name], world.device, half=True) is not None


def model_of(
    setting: Setting, folder: Path, name: str, world: World, *, ours: bool = False
) -> PreTrainedModel:
    """In fp32. ours: with the attention that a run takes on a GPU, which also reads packed views;
    else, and on a CPU, with that of a plain loop."""
    attention = "eager" if world.device.type == "cpu" else None
    if ours and world.device.type != "cpu":
        attention = packed_attention(load_config(str(folder / name)))
    options: dict[str, Any] = {"new_head": False, "attention": attention}
    if setting.task == "masked-lm":
        return load_model(MASKED_LM, str(folder / name), **options)
    labels = [f"LABEL_{number}" for number in range(CLASSES)]
    return load_model(CLASSIFIER, str(folder / name), labels, **options)


def load_teachers(setting: Setting, folder: Path, world: World) -> dict[str, PreTrainedModel]:
    return {name: model_of(setting, folder, name, world) for name in setting.teachers}


def make_batch(setting: Setting, number: int) -> Batch:
    """Random words. Each teacher's view has its own ids and lengths, as real tokenizers give;
    BERT's tokenizer is the student's too."""
    generator = torch.Generator().manual_seed(number)
    positions = _positions(setting, generator) if setting.task == "masked-lm" else None
    views: dict[str, Any] = {}
    for name, config in setting.teachers.items():
        shape = (setting.batch, setting.length + _MORE_TOKENS.get(name, 0))
        ids = torch.randint(_FIRST_WORD, config.vocab_size, shape, generator=generator)
        views[name] = PaddedView(ids, torch.ones_like(ids), positions=positions, is_full=True)
    views["student"] = views["bert-large"]
    counted = setting.batch if positions is None else len(positions)
    return Batch(
        keys=torch.randint(0, 2**60, (counted, 2), generator=generator),
        views=views,
        labels=torch.full((counted,), -100),
        row_sets={"all": torch.arange(counted)},
    )


def live_batch(setting: Setting, number: int, world: World) -> Batch:
    """With the views that the teachers of `live` take."""
    batch = make_batch(setting, number)
    views: dict[str, View] = dict(batch.views)
    for name in setting.teachers:
        view = batch.views[name]
        if packs(setting, name, world) and isinstance(view, PaddedView):
            views[name] = PackedView.of(view)
    return replace(batch, views=views)


def _positions(setting: Setting, generator: torch.Generator) -> torch.Tensor:
    """The same number of each example's positions, flattened."""
    number = max(1, round(COUNTED * setting.length))
    draw = torch.rand(setting.batch, setting.length, generator=generator)
    starts = torch.arange(setting.batch)[:, None] * setting.length
    return (draw.topk(number).indices + starts).flatten().sort().values


def cached_batch(setting: Setting, number: int, folder: Path, repeats: int = 1) -> Batch:
    """With the teachers' words, in `repeats` copies: as many rows as a batch so much larger."""
    schema = load_file(folder / "words.safetensors")
    signals = {
        name: _from_kept(setting, schema[f"{number}.{name}"].repeat(repeats, 1))
        for name in setting.teachers
    }
    larger = replace(setting, batch=setting.batch * repeats)
    return replace(make_batch(larger, number), signals=signals)


def labelled_batch(setting: Setting, number: int) -> Batch:
    """With random labels, and without what a teacher would read."""
    batch = make_batch(setting, number)
    config = setting.teachers["bert-large"]
    kinds = CLASSES if setting.task == "classification" else config.vocab_size
    generator = torch.Generator().manual_seed(number)
    rows = batch.row_sets["all"]
    return replace(
        batch,
        views={"student": batch.views["student"]},
        labels=torch.randint(kinds, (len(rows),), generator=generator),
        row_sets={"all": rows, "labelled": rows},
    )


def _codec(setting: Setting) -> TopKCodec:
    return TopKCodec(setting.teachers["bert-large"].vocab_size, ENTRIES)


def _as_kept(setting: Setting, logits: torch.Tensor) -> torch.Tensor:
    """Class logits, or bytes of a codec with one width, so that rows can be repeated."""
    if setting.task == "classification":
        return logits
    return _codec(setting).encode(logits / TEMPERATURE).payload


def _from_kept(setting: Setting, kept: torch.Tensor) -> Signals:
    if setting.task == "classification":
        return Signals(kept)
    return Signals(StoredLogits(Encoded(kept), _codec(setting), TEMPERATURE))


# --------------------------------------------------------------------------- our paths


def live(setting: Setting, folder: Path, world: World, ahead: int = 1) -> Runner:
    """Teachers in the student's engine. ahead: steps whose texts they read at once."""
    student = model_of(setting, folder, "student", world, ours=True)
    with sharded_loading(setting.deepspeed):
        teachers = {
            name: model_of(setting, folder, name, world, ours=True) for name in setting.teachers
        }
    return _ours(setting, student, teachers, world, ahead=ahead)


def cached(setting: Setting, folder: Path, world: World) -> Runner:
    """No teachers: their words come with the batches."""
    return _ours(setting, model_of(setting, folder, "student", world, ours=True), {}, world)


def labels(setting: Setting, folder: Path, world: World) -> Runner:
    """A student of labels alone."""
    student = model_of(setting, folder, "student", world, ours=True)
    return _ours(setting, student, {}, world, {"cross_entropy": {}})


def _ours(
    setting: Setting,
    student: PreTrainedModel,
    teachers: dict[str, PreTrainedModel],
    world: World,
    settings: dict[str, Any] | None = None,
    ahead: int = 1,
) -> Runner:
    """settings: of the losses, in place of KL. A window's seconds are shared by its steps."""
    losses = losses_of(settings or {"kl": {"temperature": TEMPERATURE}})
    router = None
    if setting.task == "classification" and not settings:  # one teacher's words are the target
        router = Router("average", temperature=TEMPERATURE)
    terms = build_terms(losses, TermInputs(student.config.hidden_size))
    bundle = Bundle(student, teachers, terms, router)
    settings_of_adamw = optimizer_settings(setting)
    engine = Engine(bundle, setting.deepspeed, world, settings_of_adamw, together=ahead)

    def run(batches: list[Batch]) -> Steps:
        seconds, losses = [], []
        for start in range(0, len(batches), ahead):
            window = [[batch] for batch in batches[start : start + ahead]]
            started = now(world.device)
            for step in engine.read_ahead(window):
                losses.append(engine.train_step(step)["loss"].detach())
            seconds += [(now(world.device) - started) / len(window)] * len(window)
        return Steps(seconds, float(losses[0]))

    return run
