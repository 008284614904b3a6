"""What a model says is not finite: which model, and on which examples."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

import datasets
import torch

from ds_distill.data.batches import Examples
from ds_distill.engine.engine import Engine
from ds_distill.errors import UserError
from ds_distill.run.context import ModelReference, Run
from ds_distill.types import Batch

SHOWN = 3
"""Examples that a message names."""

DAMAGED = (
    "Its weights are damaged or its training diverged: name a sound model, or train it again with "
    "a lower learning_rate."
)


class NotFiniteSignals(Exception):
    """A model said of some examples what is not finite."""

    def __init__(self, model: str, keys: torch.Tensor, among: str, mend: str = DAMAGED) -> None:
        """
        keys: int64 [n, 2], of these examples; among: how many of which it was asked about.
        mend: what the user can do.
        """
        super().__init__(f"{model}: {len(keys)} of {among}")
        self.model, self.keys, self.among, self.mend = model, keys, among, mend


def refusal(run: Run, splits: Sequence[str], found: NotFiniteSignals) -> UserError:
    """The same as a user knows it: the examples, which stand in one of `splits`, by place and
    text."""
    known = found.model in run.recipe.teachers
    who = f"teachers.{found.model}" if known else f"model {found.model!r}"
    shown = "; ".join(_shown(run, splits, found.keys[:SHOWN]))
    return UserError(
        f"{who}: what it says of {len(found.keys)} of {found.among} is not finite (NaN or "
        f"infinite), e.g. of {shown}. {found.mend}"
    )


def check_finite(
    run: Run, model: str, split: str, examples: Examples, finite: torch.Tensor
) -> None:
    """finite: bool [N], whether what a model says of each of a split's examples is. Raises
    UserError where it is not."""
    if not finite.all():
        among = f"{len(finite)} examples of split {split}"
        raise refusal(run, [split], NotFiniteSignals(model, examples.keys[~finite], among))


def find_in_batches(engine: Engine, batches: Iterable[Batch]) -> NotFiniteSignals | None:
    """The first teacher of the engine that says what is not finite of a batch. Every rank must
    call this with as many batches; all get the same."""
    for batch in batches:
        for teacher in engine.bundle.teachers:
            logits = engine.predict(batch, [teacher])[teacher].logits
            counted = batch.row_sets["all"]
            bad = ~torch.isfinite(logits).all(dim=-1).to(counted.device) & counted
            keys = engine.world.gather_keys(batch.keys[bad])
            if len(keys):
                asked = engine.world.gather_keys(batch.keys[counted])
                return NotFiniteSignals(teacher, keys, f"{len(asked)} examples of a batch")
    return None


def damaged_weights(run: Run, reference: ModelReference) -> UserError | None:
    """The error for a model whose weights are not finite as they are loaded, or None."""
    for name, weight in run.model(reference, new_head=True).named_parameters():
        if not torch.isfinite(weight).all():
            key = "student" if reference.name == "student" else f"teachers.{reference.name}"
            return UserError(
                f"{key}.model={reference.model}: weight {name} is not finite (NaN or infinite) "
                "before any training. The file is damaged, or the training that made it diverged: "
                "name a sound model."
            )
    return None


def _shown(run: Run, splits: Sequence[str], keys: torch.Tensor) -> Iterator[str]:
    """Examples as a user knows them: file and line where the source can tell, and first words."""
    for split in splits:
        texts = datasets.load_from_disk(run.folder.data / split / "examples")
        locations = run.locations(split, keys)
        stored = Examples.of(texts).keys
        for key in keys:
            for row in (stored == key).all(dim=1).nonzero()[:1, 0].tolist():
                words = textwrap.shorten(texts[row]["text"], 60, placeholder=" ...")
                yield f"{locations.get(tuple(key.tolist()), f'split {split}')} {words!r}"
