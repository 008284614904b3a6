"""Recipe fields whose sections are those of a kind's entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

from pydantic import Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import core_schema

from ds_distill.parts.outside import load_outside
from ds_distill.parts.section import Section


class OneOf:
    """Annotates a field that holds the settings of one part: a union of the sections of all
    entries, made when a recipe is first read, so that parts from outside are among them."""

    def __init__(
        self,
        kind: str,
        key: str,
        sections: Callable[[], Mapping[str, type[Section]]],
        *,
        default: str | None = None,
    ) -> None:
        """
        kind: what an error calls the part. key: the section's key that holds the part's name.
        sections: by name. default: the name where the key is missing.
        """
        self._kind, self._key, self._sections, self._default = kind, key, sections, default

    def _tag_of(self, value: Any) -> str:
        if isinstance(value, Section):
            name = getattr(value, self._key, None)
        else:
            name = value.get(self._key, self._default) if isinstance(value, dict) else None
        return tag(self._kind, str(name))

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        load_outside()
        sections = self._sections()
        choices = tuple(Annotated[s, Tag(tag(self._kind, name))] for name, s in sections.items())
        choose = Discriminator(
            self._tag_of,
            custom_error_type="unknown_part",
            custom_error_message="unknown part",
            custom_error_context={
                "kind": self._kind,
                "key": self._key,
                "known": ", ".join(sections),
            },
        )
        # mypy takes what is subscripted for a type, and these are known at run time only.
        return handler.generate_schema(Annotated[Union[choices], choose])  # noqa: UP007


def tag(kind: str, name: str) -> str:
    """What pydantic puts into an error's location where it chose among sections."""
    return f"<{kind} {name}>"


def chosen_by(step: object) -> tuple[str, str] | None:
    """(kind, name) of a step of an error's location that is such a tag: no key of the file."""
    if isinstance(step, str) and step.startswith("<") and step.endswith(">"):
        kind, _, name = step[1:-1].partition(" ")
        return kind, name
    return None
