"""Changes to a parsed recipe: an overlay, and `key=value` overrides."""

from __future__ import annotations

from typing import Any

from ds_distill.errors import UserError
from ds_distill.recipe.phases import one_key
from ds_distill.recipe.yaml_tree import Items, Keys, parse


def lay_over(section: Keys, changes: Keys, at: str = "") -> None:
    """Merge an overlay into a section, in place.

    A section goes over a section key by key, `phases: {NAME: {...}}` over the phase of that name,
    kind or number. null removes a key, or a phase. Anything else replaces what is there; so does a
    section where the recipe has none.

    at: where the section stands, for messages: "" or "KEY.".

    Raises UserError for a key that null cannot remove, and for an unknown phase.
    """
    for key, value in changes.items():
        present, location = section.get(key), changes.locations[key]
        if isinstance(value, Keys) and isinstance(present, Keys):
            lay_over(present, value, f"{at}{key}.")
        elif f"{at}{key}" == "phases" and isinstance(value, Keys) and isinstance(present, Items):
            _lay_over_phases(present, value)
        elif value is None and key not in section:
            raise UserError(
                f"{location}  {at}{key}: null removes a key, but the recipe has no such key here. "
                "Leave the line out."
            )
        else:
            section.locations[key] = location
            section[key] = value
            if value is None:
                del section[key]  # should it be required, its location is told


def _lay_over_phases(phases: Items, changes: Keys) -> None:
    numbers = [_number(phases, str(name), changes.locations[name]) for name in changes]
    removed = []
    for number, (name, settings) in zip(numbers, changes.items(), strict=True):
        if settings is None:
            removed.append(number)
        elif isinstance(settings, Keys):
            kind, body = _phase(phases, number)
            lay_over(body, settings, f"phases.{number}.{kind}.")
        else:
            raise UserError(
                f"{changes.locations[name]}  phases.{name}: must be a section with the settings "
                "that change, or null to leave the phase out."
            )
    for number in sorted(removed, reverse=True):
        phases.drop(number)


def apply_override(data: Keys, override: str) -> None:
    """Set `key=value`, whose value is YAML, in place."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"override {override!r} is not of the form key=value, e.g. training.epochs=1."
        )
    location = f"command line {override!r}"
    value = parse(text, location, lines=False)
    target: Any = data
    steps = key.split(".")
    while steps:
        step: Any = steps.pop(0)
        if isinstance(target, Items):
            step = _number(target, step, location)
            if target is data.get("phases") and steps:
                kind, target = _phase(data["phases"], step)
                if steps[0] == kind and len(steps) > 1:
                    steps.pop(0)  # as messages write it: phases.0.fine-tune.epochs
                continue
        elif not isinstance(target, Keys):
            done = key.removesuffix(".".join([step, *steps])).rstrip(".")
            raise UserError(f"{location}: {done} holds a value, not a section.")
        if not steps:
            target[step], target.locations[step] = value, location
        elif isinstance(target, Keys) and target.get(step) is None:
            target[step], target.locations[step] = Keys(location), location
        target = target[step]


def _number(items: Items, part: str, location: str) -> int:
    """A list's item by number, or a phase by its name or kind."""
    if part.isdigit() and int(part) < len(items):
        return int(part)
    names: list[str] = []
    for item in items:
        [(kind, body)] = item.items() if isinstance(item, dict) and len(item) == 1 else [(item, {})]
        names.append((isinstance(body, dict) and body.get("name")) or str(kind))
    if names.count(part) == 1:
        return names.index(part)
    if part in names:
        numbers = [str(number) for number, name in enumerate(names) if name == part]
        raise UserError(
            f"{location}: {part!r} names several items; use a number: {' or '.join(numbers)}."
        )
    raise UserError(f"{location}: no item {part!r} in the list. It has: {', '.join(names)}.")


def _phase(phases: Items, number: int) -> tuple[str, Keys]:
    """(kind, settings) of an item of `phases`, which from now on is one key with its settings."""
    location = phases.locations[number]
    try:
        kind, body = one_key(phases[number])
    except ValueError as error:
        raise UserError(f"{location}  phases.{number}: {error}.") from error
    if not isinstance(body, Keys):
        body, phases[number] = Keys(location), Keys(location)
        phases[number][kind], phases[number].locations[kind] = body, location
    return kind, body
