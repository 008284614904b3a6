"""What a package with parts of its own imports (docs/extending.md). Imports no torch.

The parts of ds_distill itself are in the dicts of `ds_distill.recipe`, in the modules of their
kinds: `phases.PHASES`, `terms.TERMS`, `policies.POLICIES`, `codecs.CODECS`, `metrics.METRICS`,
`sources.SOURCES`, `tasks.TASKS`.
"""

from ds_distill.recipe.codecs import CodecSettings
from ds_distill.recipe.context import Context
from ds_distill.recipe.entry import (
    Candidate,
    CodecEntry,
    Needs,
    PhaseEntry,
    PolicyEntry,
    SourceEntry,
    TaskEntry,
    TermEntry,
)
from ds_distill.recipe.metrics.metric import (
    CountMetric,
    MeanMetric,
    Metric,
    MetricSettings,
    ratio,
)
from ds_distill.recipe.phases.base import PhaseSettings, TrainingPhase, training_mistakes
from ds_distill.recipe.policies import Routing, Weighted
from ds_distill.recipe.section import Count, Name, Section, Share
from ds_distill.recipe.terms import DistillationTerm, SoftenedTerm, TermSettings

__all__ = [
    "Candidate",
    "CodecEntry",
    "CodecSettings",
    "Context",
    "Count",
    "CountMetric",
    "DistillationTerm",
    "MeanMetric",
    "Metric",
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
    "TaskEntry",
    "TermEntry",
    "TermSettings",
    "TrainingPhase",
    "Weighted",
    "ratio",
    "training_mistakes",
]
