"""What a part is: a class that is its section of a recipe, and says what the schema, `check`, the
plan, the comparison of policies and the report know of it.

A class names what it runs as `module:name`, which is imported when it runs: nothing here imports
torch, so that `ds-distill check` answers at once. Of each kind there is one dict, name -> class:
`TASKS`, `PHASES`, `TERMS`, `POLICIES` and `CODECS`, which a class joins when it is defined, and
likewise `METRICS`, by what they are over. So does one of a package that a recipe's `import` names.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import AfterValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ds_distill.errors import Mistake, UserError
from ds_distill.recipe.section import NOT_A_SECTION, Section, refused, unknown


@dataclass(frozen=True)
class Needs:
    """What a part cannot do without. `check` refuses a recipe that does not have it."""

    labels: bool = False
    """Of a term or a policy: labelled examples."""
    classes: bool = False
    """A task with classes."""
    distributions: bool = False
    """A task whose models predict distributions, over classes or a vocabulary, and not numbers."""
    numbers: bool = False
    """A task whose labels are numbers."""
    expertise: bool = False
    """What an expertise phase fits. It has classes, so `classes` need not be set."""
    states: tuple[int, ...] = ()
    """Of a term: layers whose hidden states it reads of every teacher, as `Signals.hidden` numbers
    them."""
    every_token: bool = False
    """Of a term: a row for every token of a text, which masked-LM has."""
    fitted_states: bool = False
    """Of a policy: the teachers' last states too, where the expertise phase fitted on them (as the
    gate does). Without it `Asked.states` is empty."""
    logits: bool = False
    """The teachers' logits themselves, where some codecs keep the distributions alone."""
    teacher_ids: bool = False
    """Of a policy: data that name the teacher that an example follows (`columns.teacher`)."""
    live_teachers: bool = False
    """What a teacher computes and a cache does not keep."""
    same_tokens: bool = False
    """That all models split a text into the same tokens: it compares them token by token."""
    teachers: int = 0
    """So many teachers at least."""
    at_most: int | None = None
    """So many teachers at most."""


def imported(reference: str) -> Any:
    """What `module:name` names. Raises ImportError, AttributeError or ValueError."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


class Implemented:
    """What runs when a recipe names it."""

    kind_of_part: ClassVar[str]
    """As messages call it."""
    part_name: ClassVar[str] = ""
    """As recipes and results call it."""
    runs: ClassVar[str | None] = None
    """`module:name`. None for a part that other code handles (`chosen`, `dense`)."""

    @classmethod
    def load(cls) -> Any:
        """What it runs. Raises UserError when it cannot be imported."""
        try:
            return imported(cls.runs or "")
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"part {cls.part_name!r}: what it runs, {cls.runs!r}, cannot be imported: {error}. "
                "Correct it in the package that the part comes from."
            ) from error


class Part(Section, Implemented):
    """Settings of a part. Its docstring and those of its fields are its documentation."""

    table: ClassVar[dict[str, Any]]
    """The parts of its kind, by name."""
    key: ClassVar[str]
    """What holds its name: a key of the section, or of terms, whose name stands before the section,
    an attribute of the class."""
    needs: ClassVar[Needs] = Needs()
    """Whatever its settings are."""

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        """Puts a class with a name of its own among the parts."""
        super().__pydantic_init_subclass__(**keywords)
        key = getattr(cls, "key", "")
        field = cls.model_fields.get(key)
        name = getattr(cls, key, None) if field is None else field.default
        if not isinstance(name, str) or name == cls.part_name:
            return
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name) or name in cls.table:
            raise UserError(
                f"{cls.__module__}.{cls.__name__}: the {cls.kind_of_part} {name!r} is there, or no "
                "name. Choose another."
            )
        cls.part_name = name
        cls.table[name] = cls

    @classmethod
    def siblings(cls) -> tuple[str, str, Mapping[str, type[Section]]]:
        return cls.kind_of_part, cls.part_name, cls.table

    def all_needs(self) -> Needs:
        """What it needs with these settings."""
        return self.needs

    def mistakes(self, context: Any) -> Iterator[Mistake]:
        """What else is wrong with the settings.

        context: a `Context`, what the phase finds.
        """
        return iter(())


def _package(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a package's code raises
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error}") from error
    return name


Package = Annotated[str, AfterValidator(_package)]
"""Of a package with parts, which is imported."""


class OneOf:
    """Annotates a field that holds the settings of one part: the section's `key` names it. The name
    alone stands for a section with nothing else."""

    def __init__(
        self, kind: str, key: str, sections: Mapping[str, Any], default: str | None = None
    ) -> None:
        """kind: what an error calls the part. sections: by name; of metrics their classes.
        default: the name where the key is missing."""
        self._kind, self._key, self._sections, self._default = kind, key, sections, default

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        sections = {name: _settings(part) for name, part in self._sections.items()}
        forms = [*sections.values(), *names_alone(sections)]
        # The union is for the JSON schema: packages bring other parts later.
        return core_schema.no_info_plain_validator_function(
            self._read,
            json_schema_input_schema=handler.generate_schema(Union[tuple(forms)]),  # noqa: UP007
            serialization=core_schema.plain_serializer_function_ser_schema(Section.as_written),
        )

    def _read(self, value: Any) -> Section:
        if isinstance(value, Section):
            return value
        if isinstance(value, str):
            value = {self._key: value}
        if not isinstance(value, dict):
            raise NOT_A_SECTION
        name = value.get(self._key, self._default)
        if name is None and self._key not in value:
            raise refused([Mistake(self._key, "is required and missing")])
        if str(name) not in self._sections:
            what = unknown(self._kind, name, self._sections)
            raise refused([Mistake(self._key, what)], "unknown_part")
        return _settings(self._sections[str(name)]).model_validate(value)


def _settings(part: Any) -> type[Section]:
    """The section of a part, or of a metric, whose class computes and has one inside."""
    section: type[Section] = getattr(part, "Settings", part)
    return section


def a_key_each(sections: Mapping[str, type[Section]], handler: GetCoreSchemaHandler) -> CoreSchema:
    """A section with a key for each part, for the JSON schema; see `section.keyed`."""
    fields = {}
    for name, section in sections.items():
        form = section | None if any(names_alone({name: section})) else section
        fields[name] = core_schema.typed_dict_field(handler.generate_schema(form), required=False)
    return core_schema.typed_dict_schema(fields, extra_behavior="forbid")


def names_alone(sections: Mapping[str, type[Section]]) -> Iterator[Any]:
    """The names of parts that need no setting, so that the name says all."""
    for name, section in sections.items():
        if not any(field.is_required() for field in section.model_fields.values()):
            yield Literal[name]
