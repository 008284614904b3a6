"""The parts that a recipe is made of: one entry each, in plain dicts. Imports no torch.

This is what a package with parts of its own imports (docs/extending.md). The dicts are in the
modules of their kinds: `phases.PHASES`, `terms.TERMS`, `policies.POLICIES`, `codecs.CODECS`,
`metrics.METRICS`, `sources.SOURCES`.
"""

from ds_distill.parts.codecs import CodecSettings
from ds_distill.parts.context import Context
from ds_distill.parts.entry import (
    Candidate,
    CodecEntry,
    MetricEntry,
    Needs,
    PhaseEntry,
    PolicyEntry,
    SourceEntry,
    TermEntry,
)
from ds_distill.parts.metric_settings import MetricSettings
from ds_distill.parts.phases.base import PhaseSettings, TrainingPhase, training_mistakes
from ds_distill.parts.policies import Routing, Weighted
from ds_distill.parts.section import Count, Name, Section, Share
from ds_distill.parts.terms import SoftenedTerm, TermSettings

__all__ = [
    "Candidate",
    "CodecEntry",
    "CodecSettings",
    "Context",
    "Count",
    "MetricEntry",
    "MetricSettings",
    "Name",
    "Needs",
    "PhaseEntry",
    "PhaseSettings",
    "PolicyEntry",
    "Routing",
    "Section",
    "Share",
    "SoftenedTerm",
    "SourceEntry",
    "TermEntry",
    "TermSettings",
    "TrainingPhase",
    "Weighted",
    "training_mistakes",
]
