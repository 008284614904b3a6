"""The kinds of parts, each with its dict of entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_distill.recipe.codecs import CODECS, CodecSettings
from ds_distill.recipe.entry import (
    CodecEntry,
    Entry,
    MetricEntry,
    PhaseEntry,
    PolicyEntry,
    SourceEntry,
    TaskEntry,
    TermEntry,
)
from ds_distill.recipe.metric_settings import MetricSettings
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.phases import PHASES
from ds_distill.recipe.phases.base import PhaseSettings
from ds_distill.recipe.policies import POLICIES, Routing
from ds_distill.recipe.section import Section
from ds_distill.recipe.sources import SOURCES
from ds_distill.recipe.tasks import TASKS, TaskSettings
from ds_distill.recipe.terms import TERMS, TermSettings

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"

# Its value stands beside these in records, results and events.
_METRIC_NAME = (
    r"(?!(answer|confusion|event|examples|model|number|per_class|phase|reliability|role|split|"
    r"step|time|to_baseline|tokens)$)[a-z][a-z0-9_]{0,63}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of part."""

    name: str
    """As `OneOf` calls it."""
    entry: type[Entry]
    table: dict[Any, Any]
    """Name -> entry; of metrics, what they are over -> name -> entry."""
    settings: type[Section] = Section
    """What the sections of its parts derive from."""
    key: str | None = None
    """The sections' key that holds the part's name."""
    names: str = _NAME
    """What a name must match."""

    @property
    def entries(self) -> dict[str, Any]:
        """Name -> entry; of metrics of one name, one of them."""
        if self.entry is not MetricEntry:
            return self.table
        return {name: entry for table in self.table.values() for name, entry in table.items()}


KINDS = (
    Kind("phase", PhaseEntry, PHASES, PhaseSettings, "kind"),
    Kind("term", TermEntry, TERMS, TermSettings, names=r"[a-z][a-z0-9_]{0,63}"),
    Kind("policy", PolicyEntry, POLICIES, Routing, "policy"),
    Kind("codec", CodecEntry, CODECS, CodecSettings, "name"),
    Kind("metric", MetricEntry, METRICS, MetricSettings, "name", names=_METRIC_NAME),
    Kind("source", SourceEntry, SOURCES),
    Kind("task", TaskEntry, TASKS, TaskSettings, "type"),
)
