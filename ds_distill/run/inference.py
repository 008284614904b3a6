"""Run a run's models over a whole split, on all ranks together."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_distill.data.batches import Collator, Units
from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.engine.engine import Engine
from ds_distill.engine.placement import numel_of, sharded_loading
from ds_distill.engine.precision import dtype_name, in_fp32, is_half
from ds_distill.engine.predict import predict_all
from ds_distill.errors import UserError
from ds_distill.files import write_text
from ds_distill.models.bundle import Bundle
from ds_distill.models.file_teacher import FileTeacher
from ds_distill.models.reference import ModelReference, label_maps_of
from ds_distill.reads import TOKENS
from ds_distill.run.run import Run
from ds_distill.tasks.kind import PredictInputs
from ds_distill.types import Batch, Signals


def predict_split(
    run: Run, references: list[ModelReference], split: str, layers: Sequence[int]
) -> tuple[Units, dict[str, Signals]]:
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
    run: Run, references: list[ModelReference], split: str, batch_size: int, *, finite: bool = True
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
        inputs = PredictInputs(collate, examples, names, batch_size, bar, words)
        predictions = run.kind.predict(engine, inputs)
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
    examples: Units,
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


SHOWN = 3
"""Number of examples in a message."""

DAMAGED = (
    "Its weights are damaged or its training diverged: name another model, or train it again with "
    "a lower learning_rate."
)


class NotFiniteSignals(Exception):
    """What a model says of some examples is NaN or infinite."""

    def __init__(self, model: str, keys: torch.Tensor, among: str, fix: str = DAMAGED) -> None:
        """
        keys: int64 [n, 2], the keys of these examples.
        among: how many examples the model ran on, in words, e.g. "64 examples of a batch".
        fix: what the user can do.
        """
        super().__init__(f"{model}: outputs for {len(keys)} of {among}")
        self.model, self.keys, self.among, self.fix = model, keys, among, fix


def refusal(run: Run, splits: Sequence[str], found: NotFiniteSignals) -> UserError:
    """The error for the user, with location and text of the examples, which are in one of
    `splits`."""
    known = found.model in run.recipe.teachers
    who = f"teachers.{found.model}" if known else f"model {found.model!r}"
    shown = "; ".join(_shown(run, splits, found.keys[:SHOWN]))
    fix = found.fix
    if dtype_name(run.deepspeed()) == "float16":
        fix = "In fp16 numbers over 65,504 are infinite: try bf16 or fp32 (deepspeed). Or: " + fix
    return UserError(
        f"{who}: its outputs for {len(found.keys)} of {found.among} are not finite (NaN or "
        f"infinite), e.g. for {shown}. {fix}"
    )


def check_finite(run: Run, model: str, split: str, examples: Units, finite: torch.Tensor) -> None:
    """Raises UserError where a model's outputs for a split are not finite.

    finite: bool [R], by row.
    """
    if not finite.all():
        among = f"{len(examples)} examples of split {split}"
        keys = examples.keys[examples.of_rows[~finite].unique()]
        raise refusal(run, [split], NotFiniteSignals(model, keys, among))


def find_in_batches(engine: Engine, batches: Iterable[Batch]) -> NotFiniteSignals | None:
    """Find the first teacher of the engine whose outputs for a batch are not finite, as they are
    where one of its layers is not. Every rank must call this with equally many batches; all get
    the same result."""
    for batch in batches:
        counted = batch.row_sets.get(TOKENS, batch.row_sets["all"])
        for teacher in engine.bundle.teachers:
            outputs = engine.predict(batch, [teacher])[teacher].logits
            bad = ~outputs.isfinite().all(dim=-1).to(counted.device)
            keys = engine.world.gather_keys(batch.keys[counted[bad[counted]]])
            if len(keys):
                examples = engine.world.gather_keys(batch.keys[counted])
                return NotFiniteSignals(teacher, keys, f"{len(examples)} examples of a batch")
    return None


def damaged_weights(run: Run, reference: ModelReference) -> UserError | None:
    """The error for a model whose weights are not finite when they are loaded, or None."""
    for name, weight in run.model(reference, new_head=True).named_parameters():
        if not torch.isfinite(weight).all():
            named = {name: f"teachers.{name}.model=" for name in run.recipe.teachers}
            key = {"student": "student.model=", **named}.get(reference.name, "")
            return UserError(
                f"{key}{reference.model}: weight {name} is not finite (NaN or infinite) "
                "before any training. The file is damaged, or the training that made it diverged: "
                "name another model."
            )
    return None


def rows_of(run: Run, split: str, keys: torch.Tensor) -> list[dict[str, Any] | None]:
    """Examples of a split as its data have them; None for those that are in another one.

    keys: int64 [n, 2].
    """
    table = run.data.table(split)
    every = enumerate(map(tuple, Units.of(table).keys.tolist()))
    numbers = {key: number for number, key in reversed([*every])}
    found = (numbers.get(tuple(key)) for key in keys.tolist())
    return [None if number is None else table[number] for number in found]


def save_examples(run: Run, split: str, keys: torch.Tensor, file: Path) -> None:
    """Write examples of a split, one JSON object a line: where they stand, text and label. Main
    process; the others return at once.

    keys: int64 [n, 2].
    """
    if not run.world.is_main:
        return
    locations = run.data.locations(split, keys)
    lines = []
    for key, row in zip(map(tuple, keys.tolist()), rows_of(run, split, keys), strict=True):
        assert row is not None, "they are of the split"
        about = {name: row[name] for name in ("text", "text_b", "words", "label") if name in row}
        lines.append(json.dumps({"at": locations.get(key), **about}, ensure_ascii=False) + "\n")
    write_text(file, "".join(lines))


def _shown(run: Run, splits: Sequence[str], keys: torch.Tensor) -> Iterator[str]:
    """Examples for a message: file and line where the source has them, and the first words."""
    for split in splits:
        locations = run.data.locations(split, keys)
        for key, row in zip(map(tuple, keys.tolist()), rows_of(run, split, keys), strict=True):
            if row is not None:
                text = " ".join(row["words"]) if "words" in row else row["text"]
                start = textwrap.shorten(text, 60, placeholder=" ...")
                yield f"{locations.get(key, f'split {split}')} {start!r}"
