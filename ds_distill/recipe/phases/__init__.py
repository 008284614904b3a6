"""The phases of a recipe: one file each with its section, its rules and its entry."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from ds_distill.recipe.entry import PhaseEntry
from ds_distill.recipe.entry_points import load_entry_points
from ds_distill.recipe.phases import (
    cache,
    distil,
    evaluate,
    expand_vocabulary,
    expertise,
    fine_tune,
)
from ds_distill.recipe.phases.base import PhaseSettings
from ds_distill.recipe.phases.cache import Cache
from ds_distill.recipe.phases.distil import Distil
from ds_distill.recipe.phases.evaluate import Evaluate
from ds_distill.recipe.phases.expand_vocabulary import ExpandVocabulary
from ds_distill.recipe.phases.expertise import Expertise
from ds_distill.recipe.phases.fine_tune import FineTune, Focus
from ds_distill.recipe.section import Section
from ds_distill.recipe.training import Training
from ds_distill.recipe.unions import alone, keyed, those_set

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


def one_key(item: Any) -> tuple[str, Any]:
    """(kind, settings) of an item of `phases`; the kind alone has none. Raises ValueError."""
    if isinstance(item, str):
        return item, {}
    if isinstance(item, dict) and len(item) == 1:
        [(kind, body)] = item.items()
        if body is None or isinstance(body, dict):
            return str(kind), body or {}
    raise ValueError("a phase is one key with its settings, e.g. - evaluate: {split: test}")


def _sections() -> dict[str, type[Section]]:
    return {name: entry.settings for name, entry in PHASES.items()}


class _OnePhase:
    """Reads an item of `phases`, {KIND: {...}}; a phase that trains starts from `training`."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        load_entry_points()
        return core_schema.with_info_wrap_validator_function(
            _read,
            handler.generate_schema(keyed("Phase", "One key, the phase's kind.", _sections())),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda phase: {phase.kind: phase.as_written(without=["kind"])}
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        one_key = {**handler.resolve_ref_schema(handler(schema))}
        return {
            "anyOf": [
                one_key | {"minProperties": 1, "maxProperties": 1},
                {"enum": alone(_sections())},
            ]
        }


def _read(item: Any, handler: Any, info: ValidationInfo) -> PhaseSettings:
    if isinstance(item, PhaseSettings):
        return item
    kind, body = one_key(item)
    if kind in PHASES and issubclass(PHASES[kind].settings, Training):
        shared = info.data.get("training", Training())  # not there where it has mistakes
        body = {**shared.inherited(body), **body}
    [phase] = those_set(handler({kind: body})).values()
    assert isinstance(phase, PhaseSettings)
    return phase


Phase = Annotated[PhaseSettings, _OnePhase()]
