"""The cache phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ds_distill.recipe.codecs import CODECS, CodecSettings, Compact
from ds_distill.recipe.context import Context
from ds_distill.recipe.entry import ConfiguredEntry, Needs, PhaseEntry
from ds_distill.recipe.phases.base import FollowingPhase, PhaseSettings, follow_mistakes
from ds_distill.recipe.section import Count, Name, Section, Several
from ds_distill.recipe.unions import OneOf

Codec = Annotated[
    CodecSettings,
    OneOf(
        "codec",
        "name",
        lambda: {name: entry.settings for name, entry in CODECS.items()},
        default="compact",
    ),
]


class Cache(FollowingPhase):
    """Run the teachers once over splits and store their signals."""

    kind: Literal["cache"] = "cache"
    splits: Several[Name]
    """The splits whose examples the teachers are run on."""
    folder: str | None = None
    """Where the cache lies, for runs that share one: what it lacks is added, and teachers are not
    run again on what it holds. Default: in the run's folder."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    """Of logits and hidden states as they are stored."""
    hidden: list[int] = Field(default_factory=list)
    """Layers whose states are stored beside the logits, for terms and policies that read them:
    -1 is the last one. Of a sequence-level task it is the first token's state, or the mean of all
    tokens' where the model's head reads that."""
    codec: Codec = Compact()
    """For masked-LM teachers."""
    only_if_read: bool = False
    """Skip the phase where no later distil phase reads a split of it: `teachers` there then decides
    alone whether there is a cache. An expertise phase runs the teachers where there is none."""
    batch_size: Count | None = None
    """Examples per rank and teacher call. Default: 64, or of a teacher that runs without
    padding as many as have 32,768 tokens together."""

    def is_left_out(self, later: Iterable[PhaseSettings]) -> bool:
        """Whether the phase does nothing, given those after it."""
        return self.only_if_read and not any(other.cached_split in self.splits for other in later)

    @property
    def shared(self) -> Path | None:
        """The folder that runs share; None where the run has its own."""
        return None if self.folder is None else Path(self.folder).expanduser()

    @property
    def reads(self) -> list[tuple[str, bool]]:
        return [(split, False) for split in self.splits]

    def parts(self) -> Iterator[tuple[str, ConfiguredEntry, Section]]:
        yield "codec", CODECS[self.codec.name], self.codec

    def lists(self) -> dict[str, list[str]]:
        return {"splits": self.splits, **super().lists()}


def mistakes(settings: Cache, context: Context) -> Iterator[str]:
    """A teacher that is not there, and a task whose signals no cache can hold."""
    yield from follow_mistakes(settings, context)
    why = context.task.not_cacheable()
    if why is not None:
        yield f"{context.location}: {why}"


ENTRY = PhaseEntry(
    name="cache",
    settings=Cache,
    implementation="ds_distill.phases.cache:cache",
    needs=Needs(teachers=1),
    mistakes=mistakes,
    makes="cache",
)
