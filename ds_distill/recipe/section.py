"""What all sections of a recipe share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import (
    CoreSchema,
    ErrorDetails,
    InitErrorDetails,
    PydanticCustomError,
    core_schema,
)

from ds_distill.errors import Mistake, did_you_mean

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, strict=True)]


def _names(labels: Any) -> Any:
    if not isinstance(labels, dict):
        return labels
    texts = {True: "true", False: "false"}
    return {texts[k] if isinstance(k, bool) else str(k): label for k, label in labels.items()}


LabelMap = Annotated[dict[str, str | None], BeforeValidator(_names)]
"""From labels, also such as YAML reads as numbers or booleans, to the task's; null leaves out."""

T = TypeVar("T")
S = TypeVar("S", bound="Section")


class _OneOrMore:
    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        several: Any = handler(source)
        return core_schema.no_info_before_validator_function(
            lambda value: value if isinstance(value, list) else [value],
            several,
            json_schema_input_schema=core_schema.union_schema([several["items_schema"], several]),
        )


Several = Annotated[list[T], _OneOrMore()]
"""A list, or one item of it alone."""

PLAIN, SECTION, LIST = Tag("<plain>"), Tag("<section>"), Tag("<list>")
"""The forms of a value, for a union `Annotated[A, PLAIN] | Annotated[B, SECTION]`."""


def _form(value: Any) -> str:
    if isinstance(value, dict | BaseModel):
        return SECTION.tag
    return (LIST if isinstance(value, list) else PLAIN).tag


BY_FORM = Discriminator(_form)
"""Annotates such a union, so that a mistake is told once, of the form that was meant."""

NOT_A_SECTION = PydanticCustomError("section", "no section")
"""See `load`."""


def refused(mistakes: Iterable[Mistake], kind: str = "mistake") -> ValidationError:
    """What a validator raises for mistakes in other places than its own: keys from its section on,
    with dots.

    kind: pydantic's type of the errors.
    """
    details: list[InitErrorDetails] = [
        {
            "type": PydanticCustomError(kind, "{what}", {"what": what}),
            "loc": tuple(int(step) if step.isdigit() else step for step in at.split(".")),
            "input": None,
        }
        for at, what in mistakes
    ]
    return ValidationError.from_exception_data("recipe", details)


MAY_CHANGE = "may change on a resume"
"""Annotates a key that a resumed run may have otherwise than it began with, because it changes no
result; or of a phase, until that is done, for a student that diverged or memory that ran out."""


class Section(BaseModel):
    """A part of a recipe: frozen, and closed to keys it does not know."""

    # Built at first use: a command that reads no recipe need not wait.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    gone: ClassVar[dict[str, tuple[object, str]]] = {}
    """Keys of earlier versions -> the value that every run has now, which recipes of earlier runs
    may still say, and what it does."""

    @classmethod
    def known_keys(cls) -> list[str]:
        """Its keys as a recipe has them: a key that is a word of Python has another name here."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def siblings(cls) -> tuple[str, str, Mapping[str, type[Section]]]:
        """Of the settings of a part, its kind, its name and the sections of its kind."""
        return "", "", {}

    @classmethod
    def may_change(cls, key: str) -> bool:
        """See `MAY_CHANGE`."""
        return key in cls.model_fields and MAY_CHANGE in cls.model_fields[key].metadata

    def as_written(self, without: Collection[str] = ()) -> dict[str, Any]:
        """JSON values under the keys that a recipe has."""
        return self.model_dump(mode="json", by_alias=True, exclude=set(without))

    @classmethod
    def key_rules(cls, data: dict[Any, Any]) -> Iterable[Mistake]:
        """What is wrong with which keys there are, whatever their values."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _with_all_mistakes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Those of keys beside those of values; an unknown key tells whose section it is in."""
        if isinstance(data, dict) and cls.gone:
            obsolete = {key for key, (value, _) in cls.gone.items() if data.get(key) == value}
            data = {key: value for key, value in data.items() if key not in obsolete}
        found = refused(cls.key_rules(data) if isinstance(data, dict) else ()).errors()
        try:
            made = handler(data)
        except ValidationError as failure:
            found += failure.errors()
        if found:
            details = [_again(error, cls) for error in found]
            raise ValidationError.from_exception_data(cls.__name__, details)
        return made


def _again(
    error: ErrorDetails, section: type[Section] | None = None, key: tuple[str, ...] = ()
) -> InitErrorDetails:
    """An error, to be raised from a section, or from below a key."""
    context = dict(error.get("ctx", {}))
    if error["type"] == "extra_forbidden" and section is not None:
        context.setdefault("section", section)
    told = PydanticCustomError(error["type"], error["msg"], context)
    return {"type": told, "loc": (*key, *error["loc"]), "input": error["input"]}


def unknown(kind: str, name: object, known: Collection[str]) -> str:
    """What is wrong with the name of a part that there is not."""
    hint = did_you_mean(str(name), known) or f" Known: {', '.join(known)}"
    return f"unknown {kind} {name!r}.{hint.rstrip('.')}"


def keyed(kind: str, known: Mapping[str, type[S]], given: Any) -> dict[str, S]:
    """The sections in one that has a key for each part, by name, in the order of `known`; null is
    none. kind: what an error calls a part."""
    if not isinstance(given, dict):
        raise NOT_A_SECTION
    others = [Mistake(str(name), unknown(kind, name, known)) for name in given if name not in known]
    found, errors = {}, [_again(error) for error in refused(others, "unknown_part").errors()]
    for name, section in known.items():
        if given.get(name) is None:
            continue
        try:
            found[name] = section.model_validate(given[name])
        except ValidationError as failure:
            errors += [_again(error, key=(name,)) for error in failure.errors()]
    if errors:
        raise ValidationError.from_exception_data("recipe", errors)
    return found
