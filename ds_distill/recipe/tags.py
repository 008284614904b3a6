"""Tags of words, and the entities that they make (IOB2: B-TYPE begins one, I-TYPE goes on)."""

from __future__ import annotations

from collections.abc import Sequence

OUTSIDE = "O"
"""The tag of a word that is part of no entity."""

IN_SPAN = "I-answer"
"""The tag of a word of which some character is in an answer."""

SPAN_TAGS = [OUTSIDE, IN_SPAN]
"""The tags of a task that finds spans of characters. Words of a span have no first one, because
spans that touch or overlap would be one all the same."""


def type_of(tag: str) -> str:
    """The entity type of a tag; of a tag that is none of an entity, the tag."""
    return tag[2:] if tag[:2] in ("B-", "I-") else tag


def are_entities(tags: Sequence[str]) -> bool:
    """Whether tags are O, B-TYPE and I-TYPE alone."""
    others = [tag for tag in tags if tag != OUTSIDE]
    return len(others) < len(tags) and all(tag[:2] in ("B-", "I-") and tag[2:] for tag in others)


def entity_types(tags: Sequence[str]) -> list[str]:
    """The types in the order of their first tags; of tags that are none of entities, the tags but
    O."""
    return list(dict.fromkeys(type_of(tag) for tag in tags if tag != OUTSIDE))
