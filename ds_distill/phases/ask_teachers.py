"""What models say about whole splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ds_distill.data.batches import Collator, Examples
from ds_distill.engine.engine import Engine
from ds_distill.engine.placement import sharded_loading
from ds_distill.evaluation.metrics import TokenScores
from ds_distill.models.bundle import Bundle
from ds_distill.phases.asking import ask_all, score_tokens
from ds_distill.phases.run import ModelPlace, Run
from ds_distill.types import Signals


def ask_models(
    run: Run,
    places: list[ModelPlace],
    split: str,
    batch_size: int,
    *,
    layers: Sequence[int] = (),
) -> tuple[Examples, dict[str, Signals]]:
    """What classifiers say about a whole split: logits float32 [N, C] and the states of
    `layers`."""
    examples = run.examples(split)
    collate = asking_collator(run, examples, split, places)
    names = [place.name for place in places]
    bar = run.log.bar(f"{', '.join(names)} on {split}", len(examples))
    with asking_engine(run, places) as engine:
        answers = ask_all(engine, collate, names, batch_size, run.world, bar, layers=layers)
    return examples, answers


def score_models(
    run: Run, places: list[ModelPlace], split: str, batch_size: int
) -> dict[str, TokenScores]:
    """How masked-LMs do on a whole split, with the same masks for all."""
    examples = run.examples(split)
    collate = asking_collator(run, examples, split, places)
    names = [place.name for place in places]
    bar = run.log.bar(f"{', '.join(names)} on {split}", len(examples))
    with asking_engine(run, places) as engine:
        return score_tokens(engine, collate, names, batch_size, run.world, bar)


def asking_collator(run: Run, examples: Examples, split: str, places: list[ModelPlace]) -> Collator:
    """Batches for `asking_engine`. Every rank must call this."""
    packed = [place.name for place in places if run.packed(place) is not None]
    return run.collator(examples, run.tables(split, places), packed=packed)


@contextmanager
def asking_engine(run: Run, places: list[ModelPlace]) -> Iterator[Engine]:
    """All models in one engine, sharded under ZeRO stage 3."""
    config = run.deepspeed()
    with sharded_loading(config):
        models = {
            place.name: run.model(place, packed=run.packed(place) is not None) for place in places
        }
    engine = Engine(Bundle(None, models), config, run.world)
    yield engine
    engine.close()
