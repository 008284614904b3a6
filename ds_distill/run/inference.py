"""Run a run's models over a whole split, on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_distill.data.batches import Collator, Examples
from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.engine.engine import Engine
from ds_distill.engine.placement import numel_of, sharded_loading
from ds_distill.engine.precision import in_fp32, is_half
from ds_distill.engine.predict import predict_all
from ds_distill.models.bundle import Bundle
from ds_distill.models.file_teacher import FileTeacher
from ds_distill.models.reference import ModelReference, label_maps_of
from ds_distill.run.not_finite import check_finite
from ds_distill.run.run import Run
from ds_distill.tasks.kind import Asked
from ds_distill.types import Signals


def predict_split(
    run: Run,
    references: list[ModelReference],
    split: str,
    layers: Sequence[int],
) -> tuple[Examples, dict[str, Signals]]:
    """Signals of teachers for a whole split, in the dtype of the recipe's DeepSpeed config: logits
    float32 [N, C], of partial teachers [N, K], and the states of `layers`. Raises UserError where
    logits are not finite."""
    examples = run.data.examples(split)
    collate = inference_collator(run, examples, split, references)
    names = [reference.name for reference in references]
    bar = run.log.bar(f"{', '.join(names)} on {split}", len(examples))
    with inference_engine(run, references) as engine:
        signals = predict_all(engine, collate, examples, names, PADDED_BATCH, bar, layers=layers)
    for name, outputs in signals.items():
        check_finite(run, name, split, examples, torch.isfinite(outputs.logits).all(dim=1))
    return examples, signals


def predictions_of(
    run: Run,
    references: list[ModelReference],
    split: str,
    batch_size: int,
    *,
    finite: bool = True,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Predictions of the task's models in fp32 on a whole split, as its kind makes them, and how
    many parameters each model has. Raises UserError where outputs are not finite, and `finite` says
    that they must be."""
    examples = run.data.examples(split)
    collate = inference_collator(run, examples, split, references, fp32=True)
    own = {one.name: run.data.tables(split, [one])[one.name] for one in references}
    packed = packed_models(run, references, fp32=True)
    words = run.kind.hidden_words(run.data, examples, own, references, packed)
    names = [reference.name for reference in references]
    bar = run.log.bar(f"{', '.join(names)} on {split}", len(examples))
    with inference_engine(run, references, fp32=True) as engine:
        asked = Asked(collate, examples, names, batch_size, bar, words)
        predictions = run.kind.predict(engine, asked)
        parameters = {
            name: 0
            if isinstance(model, FileTeacher)
            else sum(numel_of(parameter) for parameter in model.parameters())
            for name, model in engine.bundle.teachers.items()
        }
    for name, of_model in predictions.items() if finite else ():
        check_finite(run, name, split, examples, run.kind.finite(of_model))
    return predictions, parameters


def inference_collator(
    run: Run,
    examples: Examples,
    split: str,
    references: list[ModelReference],
    *,
    fp32: bool = False,
) -> Collator:
    """Batches for `inference_engine`. Every rank must call this."""
    packed = packed_models(run, references, fp32=fp32)
    return run.collator(examples, run.data.tables(split, references), references, packed=packed)


def packed_models(run: Run, references: list[ModelReference], *, fp32: bool = False) -> list[str]:
    """Names of those that run without padding in `inference_engine`."""
    half = is_half(run.deepspeed()) and not fp32
    return [
        reference.name for reference in references if run.packed(reference, half=half) is not None
    ]


@contextmanager
def inference_engine(
    run: Run, references: list[ModelReference], *, fp32: bool = False
) -> Iterator[Engine]:
    """One engine with all models, sharded under ZeRO stage 3; see `predict_split`. In the recipe's
    dtype they are teachers, and say nothing of rows that pad their vocabulary; fp32 is for
    evaluations, of all that a model says."""
    config = in_fp32(run.deepspeed()) if fp32 else run.deepspeed()
    half = is_half(config)

    def load(reference: ModelReference) -> PreTrainedModel:
        return run.model(reference, packed=run.packed(reference, half=half) is not None)

    # A new head is set by the labels, and of a weight that is sharded a rank has a part.
    whole = {each.name: load(each) for each in references if each.new_head}
    with sharded_loading(config):
        sharded = {each.name: load(each) for each in references if not each.new_head}
    models = {each.name: {**whole, **sharded}[each.name] for each in references}
    bundle = Bundle(
        None,
        models,
        label_maps=label_maps_of(references),
        tokens=None if fp32 else run.data.taught_tokens(references),
    )
    with closing(Engine(bundle, config, run.world)) as engine:
        yield engine
