"""Models whose outputs are not finite: find them, and report the examples."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import datasets
import torch

from ds_distill.data.batches import Examples
from ds_distill.engine.engine import Engine
from ds_distill.engine.precision import dtype_name
from ds_distill.errors import UserError
from ds_distill.files import write_text
from ds_distill.run.context import ModelReference, Run
from ds_distill.types import Batch

SHOWN = 3
"""Number of examples in a message."""

DAMAGED = (
    "Its weights are damaged or its training diverged: name another model, or train it again with "
    "a lower learning_rate."
)


class NotFiniteSignals(Exception):
    """A model's outputs for some examples are NaN or infinite."""

    def __init__(self, model: str, keys: torch.Tensor, among: str, fix: str = DAMAGED) -> None:
        """
        keys: int64 [n, 2], the keys of these examples.
        among: how many examples the model ran on, in words, e.g. "64 examples of a batch".
        fix: what the user can do.
        """
        super().__init__(f"{model}: {len(keys)} of {among}")
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


def check_finite(
    run: Run, model: str, split: str, examples: Examples, finite: torch.Tensor
) -> None:
    """Raises UserError where a model's outputs for a split are not finite.

    finite: bool [R], by row.
    """
    if not finite.all():
        among = f"{len(examples)} examples of split {split}"
        keys = examples.keys[examples.of_rows[~finite].unique()]
        raise refusal(run, [split], NotFiniteSignals(model, keys, among))


def find_in_batches(engine: Engine, batches: Iterable[Batch]) -> NotFiniteSignals | None:
    """Find the first teacher of the engine whose logits for a batch are not finite. Every rank
    must call this with equally many batches; all get the same result."""
    for batch in batches:
        for teacher in engine.bundle.teachers:
            logits = engine.predict(batch, [teacher])[teacher].logits
            counted = batch.row_sets["all"]
            bad = ~torch.isfinite(logits).all(dim=-1).to(counted.device)
            keys = engine.world.gather_keys(batch.keys[counted[bad[counted]]])
            if len(keys):
                examples = engine.world.gather_keys(batch.keys[counted])
                return NotFiniteSignals(teacher, keys, f"{len(examples)} examples of a batch")
    return None


def damaged_weights(run: Run, reference: ModelReference) -> UserError | None:
    """The error for a model whose weights are not finite when they are loaded, or None."""
    for name, weight in run.model(reference, new_head=True).named_parameters():
        if not torch.isfinite(weight).all():
            key = "student" if reference.name == "student" else f"teachers.{reference.name}"
            return UserError(
                f"{key}.model={reference.model}: weight {name} is not finite (NaN or infinite) "
                "before any training. The file is damaged, or the training that made it diverged: "
                "name another model."
            )
    return None


def save_examples(run: Run, split: str, keys: torch.Tensor, file: Path) -> None:
    """Write examples of a split, one JSON object a line: where they stand, text and label. Main
    process; the others return at once.

    keys: int64 [n, 2].
    """
    if not run.world.is_main:
        return
    texts = datasets.load_from_disk(run.data_folder / split / "examples")
    stored = {tuple(key): index for index, key in enumerate(Examples.of(texts).keys.tolist())}
    locations = run.locations(split, keys)
    lines = []
    for key in map(tuple, keys.tolist()):
        row = texts[stored[key]]
        about = {name: row[name] for name in ("text", "text_b", "words", "label") if name in row}
        lines.append(json.dumps({"at": locations.get(key), **about}, ensure_ascii=False) + "\n")
    write_text(file, "".join(lines))


def _shown(run: Run, splits: Sequence[str], keys: torch.Tensor) -> Iterator[str]:
    """Examples for a message: file and line where the source has them, and the first words."""
    for split in splits:
        texts = datasets.load_from_disk(run.data_folder / split / "examples")
        locations = run.locations(split, keys)
        stored = Examples.of(texts).keys
        for key in keys:
            for index in (stored == key).all(dim=1).nonzero()[:1, 0].tolist():
                row = texts[index]
                text = " ".join(row["words"]) if "words" in row else row["text"]
                start = textwrap.shorten(text, 60, placeholder=" ...")
                yield f"{locations.get(tuple(key.tolist()), f'split {split}')} {start!r}"
