"""Models whose outputs are not finite: find them, and report the examples."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from ds_distill.data.batches import Examples
from ds_distill.engine.engine import Engine
from ds_distill.engine.precision import dtype_name
from ds_distill.errors import UserError
from ds_distill.files import write_text
from ds_distill.models.reference import ModelReference
from ds_distill.reads import TOKENS
from ds_distill.run.run import Run
from ds_distill.types import Batch

SHOWN = 3
"""Number of examples in a message."""

DAMAGED = (
    "Its weights are damaged or its training diverged: name another model, or train it again with "
    "a lower learning_rate."
)


class NotFiniteSignals(Exception):
    """What a model says of some examples is NaN or infinite."""

    def __init__(
        self, model: str, keys: torch.Tensor, among: str, fix: str = DAMAGED, what: str = "outputs"
    ) -> None:
        """
        keys: int64 [n, 2], the keys of these examples.
        among: how many examples the model ran on, in words, e.g. "64 examples of a batch".
        fix: what the user can do.
        what: of the model, in words, e.g. "states of layer 2".
        """
        super().__init__(f"{model}: {what} for {len(keys)} of {among}")
        self.model, self.keys, self.among, self.fix = model, keys, among, fix
        self.what = what


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
        f"{who}: its {found.what} for {len(found.keys)} of {found.among} are not finite (NaN or "
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
    """Find the first teacher of the engine of which something that the loss reads of a batch is not
    finite: states or attention, in the order of their layers, or logits. Every rank must call this
    with equally many batches; all get the same result."""
    for batch in batches:
        for teacher in engine.bundle.teachers:
            counted = batch.row_sets.get(TOKENS, batch.row_sets["all"])
            for what, bad in _not_finite(engine, batch, teacher):
                rows = counted[bad.to(counted.device)[counted]]
                keys = engine.world.gather_keys(batch.keys[rows])
                if len(keys):
                    examples = engine.world.gather_keys(batch.keys[counted])
                    among = f"{len(examples)} examples of a batch"
                    return NotFiniteSignals(teacher, keys, among, what=what)
    return None


def _not_finite(engine: Engine, batch: Batch, teacher: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What is read of a teacher, in words, and the rows where it is not finite, bool [n]."""
    signals = engine.layers_of_teachers(batch)[teacher]
    example = batch.views[teacher].example_indices
    found = []
    for layer, states in signals.hidden.items():
        found.append((layer, "states", ~states.isfinite().all(dim=-1)))
    for layer, attention in signals.attention.items():
        parts = [attention.queries, attention.keys, attention.values]
        finite = torch.stack([p.isfinite().all(dim=-1).all(dim=1) for p in parts if p is not None])
        bad = (~finite.all(dim=0) & attention.mask).any(dim=1)
        found.append((layer, "attention", bad[example.to(bad.device)]))
    for layer, kind, rows in sorted(found, key=lambda one: (one[0] == -1, one[:2])):
        yield f"{kind} of {'the last layer' if layer == -1 else f'layer {layer}'}", rows
    yield "outputs", ~engine.predict(batch, [teacher])[teacher].logits.isfinite().all(dim=-1)


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


def save_examples(run: Run, split: str, keys: torch.Tensor, file: Path) -> None:
    """Write examples of a split, one JSON object a line: where they stand, text and label. Main
    process; the others return at once.

    keys: int64 [n, 2].
    """
    if not run.world.is_main:
        return
    texts = run.data.table(split)
    stored = {tuple(key): index for index, key in enumerate(Examples.of(texts).keys.tolist())}
    locations = run.data.locations(split, keys)
    lines = []
    for key in map(tuple, keys.tolist()):
        row = texts[stored[key]]
        about = {name: row[name] for name in ("text", "text_b", "words", "label") if name in row}
        lines.append(json.dumps({"at": locations.get(key), **about}, ensure_ascii=False) + "\n")
    write_text(file, "".join(lines))


def _shown(run: Run, splits: Sequence[str], keys: torch.Tensor) -> Iterator[str]:
    """Examples for a message: file and line where the source has them, and the first words."""
    for split in splits:
        texts = run.data.table(split)
        locations = run.data.locations(split, keys)
        stored = Examples.of(texts).keys
        for key in keys:
            for index in (stored == key).all(dim=1).nonzero()[:1, 0].tolist():
                row = texts[index]
                text = " ".join(row["words"]) if "words" in row else row["text"]
                start = textwrap.shorten(text, 60, placeholder=" ...")
                yield f"{locations.get(tuple(key.tolist()), f'split {split}')} {start!r}"
