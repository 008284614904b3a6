"""The phases of a recipe: one file each with its section, its rules and its entry."""

from __future__ import annotations

from typing import Annotated

from ds_distill.parts.entry import PhaseEntry
from ds_distill.parts.one_of import OneOf
from ds_distill.parts.phases import (
    cache,
    distil,
    evaluate,
    expand_vocabulary,
    expertise,
    fine_tune,
)
from ds_distill.parts.phases.base import PhaseSettings, Training
from ds_distill.parts.phases.cache import Cache
from ds_distill.parts.phases.distil import Distil
from ds_distill.parts.phases.evaluate import Evaluate
from ds_distill.parts.phases.expand_vocabulary import ExpandVocabulary
from ds_distill.parts.phases.expertise import Expertise
from ds_distill.parts.phases.fine_tune import FineTune, Focus

__all__ = [
    "PHASES",
    "Cache",
    "Distil",
    "Evaluate",
    "ExpandVocabulary",
    "Expertise",
    "FineTune",
    "Focus",
    "Phase",
    "PhaseSettings",
    "Training",
]

PHASES: dict[str, PhaseEntry] = {
    entry.name: entry
    for entry in (
        fine_tune.ENTRY,
        expand_vocabulary.ENTRY,
        expertise.ENTRY,
        cache.ENTRY,
        distil.ENTRY,
        evaluate.ENTRY,
    )
}

Phase = Annotated[
    PhaseSettings,
    OneOf("phase", "kind", lambda: {name: entry.settings for name, entry in PHASES.items()}),
]
