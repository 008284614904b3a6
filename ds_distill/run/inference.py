"""Predictions of models for every example of a split, on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ds_distill.data.batches import Collator, Examples
from ds_distill.data.plan import plan_once, split_batch
from ds_distill.data.prefetch import prefetch
from ds_distill.engine.engine import Engine
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.precision import in_fp32, is_bf16
from ds_distill.engine.world import World
from ds_distill.evaluation.predictions import TokenScores
from ds_distill.models.bundle import Bundle
from ds_distill.run.context import ModelReference, Run, columns_of
from ds_distill.run.events import Bar
from ds_distill.run.not_finite import check_finite
from ds_distill.types import Signals


def predict_split(
    run: Run,
    references: list[ModelReference],
    split: str,
    batch_size: int,
    *,
    layers: Sequence[int] = (),
    fp32: bool = False,
) -> tuple[Examples, dict[str, Signals]]:
    """Signals of classifiers for a whole split: logits float32 [N, C] and the states of `layers`.
    Raises UserError where logits are not finite.

    fp32: compute in fp32; else, like teachers, in the dtype of the recipe's DeepSpeed config.
    """
    examples = run.examples(split)
    collate = inference_collator(run, examples, split, references, fp32=fp32)
    names = [reference.name for reference in references]
    bar = run.log.bar(f"{', '.join(names)} on {split}", len(examples))
    with inference_engine(run, references, fp32=fp32) as engine:
        predictions = predict_all(engine, collate, names, batch_size, run.world, bar, layers=layers)
    for name, outputs in predictions.items():
        check_finite(run, name, split, examples, torch.isfinite(outputs.logits).all(dim=1))
    return examples, predictions


def score_models(
    run: Run, references: list[ModelReference], split: str, batch_size: int
) -> dict[str, TokenScores]:
    """Scores of masked-LMs in fp32 on a whole split, all with the same masks. Raises UserError
    where a loss is not finite."""
    examples = run.examples(split)
    collate = inference_collator(run, examples, split, references, fp32=True)
    names = [reference.name for reference in references]
    bar = run.log.bar(f"{', '.join(names)} on {split}", len(examples))
    with inference_engine(run, references, fp32=True) as engine:
        scores = score_tokens(engine, collate, names, batch_size, run.world, bar)
    for name, of_model in scores.items():
        finite = torch.from_numpy(np.isfinite(of_model.loss))
        check_finite(run, name, split, examples, finite)
    return scores


def inference_collator(
    run: Run,
    examples: Examples,
    split: str,
    references: list[ModelReference],
    *,
    fp32: bool = False,
) -> Collator:
    """Batches for `inference_engine`. Every rank must call this."""
    bf16 = is_bf16(run.deepspeed()) and not fp32
    packed = [
        reference.name for reference in references if run.packed(reference, bf16=bf16) is not None
    ]
    return run.collator(examples, run.tables(split, references), packed=packed)


@contextmanager
def inference_engine(
    run: Run, references: list[ModelReference], *, fp32: bool = False
) -> Iterator[Engine]:
    """One engine with all models, sharded under ZeRO stage 3; see `predict_split`."""
    config = in_fp32(run.deepspeed()) if fp32 else run.deepspeed()
    bf16 = is_bf16(config)
    with sharded_loading(config):
        models = {
            reference.name: run.model(
                reference, packed=run.packed(reference, bf16=bf16) is not None
            )
            for reference in references
        }
    engine = Engine(Bundle(None, models, columns=columns_of(references)), config, run.world)
    yield engine
    engine.close()


def predict_all(
    engine: Engine,
    collate: Collator,
    models: Sequence[str],
    batch_size: int,
    world: World,
    bar: AbstractContextManager[Bar] | None = None,
    *,
    layers: Sequence[int] = (),
) -> dict[str, Signals]:
    """Signals of models for all N examples, on the CPU of every rank: logits float32 [N, C] and the
    states of `layers`, float32 [N, H].

    batch_size: examples per rank and forward pass.
    """
    batches = plan_once(collate.lengths, batch_size * world.size)
    shares = [split_batch(batch, 1, world.size, world.rank)[0] for batch in batches]
    outputs: dict[str, dict[Any, torch.Tensor]] = {name: {} for name in models}
    with bar or nullcontext() as progress:
        for batch, mine, inputs in zip(batches, shares, prefetch(collate, shares), strict=True):
            for name, signals in engine.predict(inputs, models, layers).items():
                for what, values in [("logits", signals.logits), *signals.hidden.items()]:
                    if what not in outputs[name]:
                        shape = (len(collate.lengths), values.shape[1])
                        outputs[name][what] = torch.zeros(shape)
                    if len(mine):
                        outputs[name][what][torch.from_numpy(mine)] = values.float().cpu()
            if progress:
                progress.advance(len(batch))
    summed = {
        # Each example ran on one rank and is zero on the others.
        name: {what: world.sum(part.to(world.device)).cpu() for what, part in parts.items()}
        for name, parts in outputs.items()
    }
    return {name: Signals(parts.pop("logits"), parts) for name, parts in summed.items()}


def score_tokens(
    engine: Engine,
    collate: Collator,
    models: Sequence[str],
    batch_size: int,
    world: World,
    bar: AbstractContextManager[Bar] | None = None,
) -> dict[str, TokenScores]:
    """Scores of masked-LMs on each of N examples with its first mask variant, on every rank.

    Logits over a vocabulary are too large to collect: only sums per example leave a batch, and one
    model runs at a time.

    batch_size: examples per rank and forward pass.
    """
    count = len(collate.lengths)
    sums = {name: torch.zeros(3, count, dtype=torch.float64) for name in models}
    batches = plan_once(collate.lengths, batch_size * world.size)
    shares = [split_batch(batch, 1, world.size, world.rank)[0] for batch in batches]
    with bar or nullcontext() as progress:
        for batch, mine, inputs in zip(batches, shares, prefetch(collate, shares), strict=True):
            counted = inputs.row_sets["all"]
            for name in models:
                logits = engine.predict(inputs, [name])[name].logits
                labels = inputs.labels.to(logits.device)
                losses = F.cross_entropy(logits, labels, reduction="none")
                right = logits.argmax(dim=-1) == labels
                example = torch.from_numpy(mine)[inputs.views[name].example_indices[counted]]
                values = torch.stack([losses.double(), right.double(), torch.ones_like(losses)])
                sums[name].index_add_(1, example, values.cpu()[:, counted])
            if progress:
                progress.advance(len(batch))
    return {
        # Each example ran on one rank and is zero on the others.
        name: TokenScores(*world.sum(values.to(world.device)).cpu().numpy())
        for name, values in sums.items()
    }
