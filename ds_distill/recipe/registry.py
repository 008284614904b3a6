"""The kinds of parts, each with its dict of entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_distill.recipe.codecs import CODECS, CodecSettings
from ds_distill.recipe.entry import (
    CodecEntry,
    Entry,
    PhaseEntry,
    PolicyEntry,
    SourceEntry,
    TaskEntry,
    TermEntry,
)
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.metric import Metric, MetricSettings
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
    entry: type[Entry] | type[Metric[Any]]
    """What its parts are; metrics are classes that derive from it."""
    table: dict[Any, Any]
    """Name -> entry; of metrics, what they are over -> name -> class."""
    settings: type[Section] = Section
    """What the sections of its parts derive from."""
    key: str | None = None
    """The sections' key that holds the part's name."""
    names: str = _NAME
    """What a name must match."""

    @property
    def entries(self) -> dict[str, Any]:
        """Name -> entry, or class of metrics."""
        return {name: entry for table in self.tables for name, entry in table.items()}

    @property
    def tables(self) -> list[dict[str, Any]]:
        """Those by name: one, or of metrics one for each thing that they are over."""
        return [*self.table.values()] if self.entry is Metric else [self.table]

    @property
    def sections(self) -> dict[str, type[Section]]:
        """Name -> section, where a key of the sections holds the name."""
        if self.key is None:
            return {}
        settings = "Settings" if self.entry is Metric else "settings"
        return {name: getattr(entry, settings) for name, entry in self.entries.items()}

    def has(self, part: Any) -> bool:
        """Whether a part is of this kind."""
        if isinstance(part, type):
            return self.entry is Metric and issubclass(part, Metric)
        return isinstance(part, self.entry)


KINDS = (
    Kind("phase", PhaseEntry, PHASES, PhaseSettings, "kind"),
    Kind("term", TermEntry, TERMS, TermSettings, names=r"[a-z][a-z0-9_]{0,63}"),
    Kind("policy", PolicyEntry, POLICIES, Routing, "policy"),
    Kind("codec", CodecEntry, CODECS, CodecSettings, "name"),
    Kind("metric", Metric, METRICS, MetricSettings, "name", names=_METRIC_NAME),
    Kind("source", SourceEntry, SOURCES),
    Kind("task", TaskEntry, TASKS, TaskSettings, "type"),
)
