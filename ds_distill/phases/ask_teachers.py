"""What models say about whole splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ds_distill.data.batches import Collator, Examples
from ds_distill.engine.config import in_fp32, is_bf16
from ds_distill.engine.engine import Engine
from ds_distill.engine.placement import sharded_loading
from ds_distill.evaluation.metrics import TokenScores
from ds_distill.models.bundle import Bundle
from ds_distill.phases.asking import ask_all, score_tokens
from ds_distill.phases.not_finite import check_finite
from ds_distill.phases.run import ModelPlace, Run, columns_of
from ds_distill.types import Signals


def ask_models(
    run: Run,
    places: list[ModelPlace],
    split: str,
    batch_size: int,
    *,
    layers: Sequence[int] = (),
    fp32: bool = False,
) -> tuple[Examples, dict[str, Signals]]:
    """What classifiers say about a whole split: logits float32 [N, C] and the states of
    `layers`. Raises UserError where logits are not finite.

    fp32: they compute in it; else as teachers do, in what the recipe's DeepSpeed config says.
    """
    examples = run.examples(split)
    collate = asking_collator(run, examples, split, places, fp32=fp32)
    names = [place.name for place in places]
    bar = run.log.bar(f"{', '.join(names)} on {split}", len(examples))
    with asking_engine(run, places, fp32=fp32) as engine:
        answers = ask_all(engine, collate, names, batch_size, run.world, bar, layers=layers)
    for name, said in answers.items():
        check_finite(run, name, split, examples, torch.isfinite(said.logits).all(dim=1))
    return examples, answers


def score_models(
    run: Run, places: list[ModelPlace], split: str, batch_size: int
) -> dict[str, TokenScores]:
    """How masked-LMs, in fp32, do on a whole split, with the same masks for all. Raises UserError
    where a loss is not finite."""
    examples = run.examples(split)
    collate = asking_collator(run, examples, split, places, fp32=True)
    names = [place.name for place in places]
    bar = run.log.bar(f"{', '.join(names)} on {split}", len(examples))
    with asking_engine(run, places, fp32=True) as engine:
        scores = score_tokens(engine, collate, names, batch_size, run.world, bar)
    for name, of_model in scores.items():
        finite = torch.from_numpy(np.isfinite(of_model.loss))
        check_finite(run, name, split, examples, finite)
    return scores


def asking_collator(
    run: Run, examples: Examples, split: str, places: list[ModelPlace], *, fp32: bool = False
) -> Collator:
    """Batches for `asking_engine`. Every rank must call this."""
    bf16 = is_bf16(run.deepspeed()) and not fp32
    packed = [place.name for place in places if run.packed(place, bf16=bf16) is not None]
    return run.collator(examples, run.tables(split, places), packed=packed)


@contextmanager
def asking_engine(run: Run, places: list[ModelPlace], *, fp32: bool = False) -> Iterator[Engine]:
    """All models in one engine, sharded under ZeRO stage 3; see `ask_models`."""
    config = in_fp32(run.deepspeed()) if fp32 else run.deepspeed()
    bf16 = is_bf16(config)
    with sharded_loading(config):
        models = {
            place.name: run.model(place, packed=run.packed(place, bf16=bf16) is not None)
            for place in places
        }
    engine = Engine(Bundle(None, models, columns=columns_of(places)), config, run.world)
    yield engine
    engine.close()
