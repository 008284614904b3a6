"""What all sections of a recipe share."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, strict=True)]


def mistake_at(key: tuple[str | int, ...], what: str) -> PydanticCustomError:
    """The error of a validator of several keys for one of them, from the validated section on."""
    return PydanticCustomError("mistake_at", "{what}", {"key": key, "what": what})


def _nearest(key: str, known: list[str]) -> list[str]:
    """The known key that is meant: one that is written likewise, or whose initials it is, as `lr`
    is of `learning_rate`."""
    close = difflib.get_close_matches(key, known, n=1)
    return close or [name for name in known if key == "".join(w[:1] for w in name.split("_"))][:1]


class Section(BaseModel):
    """A part of a recipe: frozen, and closed to keys it does not know."""

    # Built at first use: a section that holds other parts is made when all parts are known.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        defer_build=True,
        serialize_by_alias=True,
    )

    renamed: ClassVar[dict[str, str]] = {}
    """Keys of earlier versions -> what they are called now."""

    @classmethod
    def known_keys(cls) -> list[str]:
        """Its keys as a recipe has them: a key that is a word of Python has another name here."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = cls.known_keys()
            unknown = [key for key in data if key not in known]
            if unknown:
                nearest = {
                    str(key): [cls.renamed[key]]
                    if key in cls.renamed
                    else _nearest(str(key), known)
                    for key in unknown
                }
                raise PydanticCustomError(
                    "unknown_keys",
                    "unknown keys",
                    {"nearest": nearest, "known": sorted(known), "renamed": cls.renamed},
                )
        return data
