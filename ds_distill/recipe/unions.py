"""Recipe fields whose sections are those of a kind's entries, ours and other packages'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ds_distill.errors import did_you_mean
from ds_distill.recipe.entry_points import load_entry_points
from ds_distill.recipe.section import Section, refused

Sections = Callable[[], Mapping[str, type[Section]]]
"""The sections of a kind's parts, by name, once all parts are known."""


class OneOf:
    """Annotates a field that holds the settings of one part: the section's `key` names it. The name
    alone stands for a section with nothing else."""

    def __init__(self, kind: str, key: str, sections: Sections, default: str | None = None) -> None:
        """kind: what an error calls the part. default: the name where the key is missing."""
        self._kind, self._key, self._sections, self._default = kind, key, sections, default

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        load_entry_points()
        any_of = handler.generate_schema(Union[tuple(self._sections().values())])  # noqa: UP007
        # The union is for the JSON schema: of it pydantic would tell the mistakes of every form.
        return core_schema.no_info_wrap_validator_function(lambda v, _: self._read(v), any_of)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        sections = handler(schema)
        names = alone(self._sections())
        short = [{"enum": names}] if names else []
        return {"anyOf": [*sections.get("anyOf", [sections]), *short]}

    def _read(self, value: Any) -> Section:
        sections = self._sections()
        if isinstance(value, Section):
            return value
        if isinstance(value, str):
            value = {self._key: value}
        if not isinstance(value, dict):
            raise PydanticCustomError("section", "no section")  # see `mistakes.TOLD`
        name = value.get(self._key, self._default)
        if name is None and self._key not in value:
            raise refused([((self._key,), "is required and missing")])
        if str(name) not in sections:
            hint = did_you_mean(str(name), sections) or f" Known: {', '.join(sections)}"
            what = f"unknown {self._kind} {name!r}.{hint.rstrip('.')}"
            raise refused([((self._key,), what)], "unknown_part")
        return sections[str(name)].model_validate(value)


def alone(sections: Mapping[str, type[Section]]) -> list[str]:
    """The parts that need no setting, so that the name alone says all."""
    return [
        name
        for name, section in sections.items()
        if not any(field.is_required() for field in section.model_fields.values())
    ]


def keyed(title: str, meaning: str, sections: Mapping[str, type[Section]]) -> type[Section]:
    """A section with a key for each part, which holds that part's settings."""
    bare = alone(sections)
    fields: dict[str, Any] = {
        name.replace("-", "_"): (
            section | None if name in bare else section,
            Field(None, alias=name, description=" ".join((section.__doc__ or "").split())),
        )
        for name, section in sections.items()
    }
    return create_model(title, __base__=Section, __doc__=meaning, **fields)


def those_set(keys: Section) -> dict[str, Section]:
    """The settings in such a section, by name."""
    values = zip(type(keys).known_keys(), type(keys).model_fields, strict=True)
    found = {key: getattr(keys, name) for key, name in values}
    return {key: settings for key, settings in found.items() if settings is not None}
