"""What a package with parts of its own imports (docs/extending.md). Imports no torch.

The parts of ds_distill itself are in the dicts of `ds_distill.recipe`, in the modules of their
kinds: `phases.PHASES`, `terms.TERMS`, `policies.POLICIES`, `codecs.CODECS`, `metrics.METRICS`,
`sources.SOURCES`, `tasks.TASKS`.
"""

from ds_distill.errors import Mistake
from ds_distill.recipe.codecs import CodecSettings
from ds_distill.recipe.context import Context
from ds_distill.recipe.data import DataSource
from ds_distill.recipe.metrics.metric import (
    CountMetric,
    MeanMetric,
    Metric,
    MetricSettings,
    ratio,
)
from ds_distill.recipe.part import Needs
from ds_distill.recipe.phases import PhaseSettings, TrainingPhase
from ds_distill.recipe.policies import Compared, Routing, Weighted
from ds_distill.recipe.section import MAY_CHANGE, Count, Name, Section, Share
from ds_distill.recipe.tasks import TaskSettings
from ds_distill.recipe.terms import DistillationTerm, SoftenedTerm, TermSettings

__all__ = [
    "MAY_CHANGE",
    "CodecSettings",
    "Compared",
    "Context",
    "Count",
    "CountMetric",
    "DataSource",
    "DistillationTerm",
    "MeanMetric",
    "Metric",
    "MetricSettings",
    "Mistake",
    "Name",
    "Needs",
    "PhaseSettings",
    "Routing",
    "Section",
    "Share",
    "SoftenedTerm",
    "TaskSettings",
    "TermSettings",
    "TrainingPhase",
    "Weighted",
    "ratio",
]
