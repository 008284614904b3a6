"""The expand-vocabulary phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ds_distill.recipe.context import Context
from ds_distill.recipe.entry import PhaseEntry
from ds_distill.recipe.phases.base import PhaseSettings
from ds_distill.recipe.section import Count, Name, Share


class ExpandVocabulary(PhaseSettings):
    """Add the words of a text to the student's WordPiece vocabulary, and rows for them to its
    embeddings and its output. Tokens that it has keep their ids."""

    kind: Literal["expand-vocabulary"] = "expand-vocabulary"
    split: Name = "train"
    """The split whose words are added."""
    size: Count
    """Tokens and rows in all, e.g. 60000; fewer where the text has no more words."""
    share: Share | None = None
    """Of the text's words, as often as they stand there, the share that shall be one token each: no
    more tokens are added than that takes, and at most `size`. None: as many as `size` has room for.
    """
    embeddings: Literal["pieces", "random"] = "pieces"
    """How new rows begin: `pieces`, as the mean of the rows of the word's old pieces; `random`, as
    transformers begins."""
    start: Name = "student"
    """The model whose vocabulary grows: `student` or the name of an earlier trained model."""
    save_as: Name | None = None
    """Name of the model. Default: `student`."""

    @property
    def starts(self) -> list[str]:
        return [self.start]

    @property
    def outputs(self) -> list[str]:
        return [self.save_as or "student"]

    @property
    def learns_from(self) -> list[str]:
        return [self.split]

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(self.split, False)]

    @property
    def vocabulary(self) -> int:
        return self.size


def mistakes(settings: ExpandVocabulary, context: Context) -> Iterator[str]:
    """A task without a vocabulary to predict, and a start that is not there."""
    if context.task.predicts != "token":
        yield (
            f"{context.location}: adds rows to what a masked-lm predicts, and the task's type is "
            f"{context.task.type}. Name a masked-lm task (task: NAME), or take the phase out."
        )
    if settings.start not in context.models - set(context.recipe.teachers):
        there = context.models - set(context.recipe.teachers)
        yield (
            f"{context.location}.start: no student {settings.start!r} before this phase. There "
            f"are: {', '.join(sorted(there))}."
        )


ENTRY = PhaseEntry(
    name="expand-vocabulary",
    settings=ExpandVocabulary,
    implementation="ds_distill.phases.expand_vocabulary:expand_vocabulary",
    mistakes=mistakes,
    makes="start",
)
