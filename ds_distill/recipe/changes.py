"""Changes to a parsed recipe: an overlay, and `key=value` overrides."""

from __future__ import annotations

from typing import Any

from ds_distill.errors import UserError
from ds_distill.recipe.mistakes import KeyPath
from ds_distill.recipe.yaml_tree import Tree


def lay_over(tree: Tree, data: dict[Any, Any], overlay: Tree, changes: dict[Any, Any]) -> None:
    """Merge an overlay into a recipe, in place, with the lines that its keys stand in.

    A section goes over a section key by key, `phases: {NAME: {...}}` over the phase of that name,
    kind or number. null removes a key, or a phase. Anything else replaces what is there; so does a
    section where the recipe has none.

    Raises UserError for a key that null cannot remove, and for an unknown phase.
    """
    _merge(tree, data, overlay, changes, (), ())


def _merge(
    tree: Tree,
    section: dict[Any, Any],
    overlay: Tree,
    changes: dict[Any, Any],
    at: KeyPath,
    there: KeyPath,
) -> None:
    """at, there: where the section stands in the recipe and the changes in the overlay."""
    for key, value in changes.items():
        here, line = (*at, key), overlay.location((*there, key))
        present = section.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            _merge(tree, present, overlay, value, here, (*there, key))
        elif here == ("phases",) and isinstance(value, dict) and isinstance(present, list):
            _merge_phases(tree, present, overlay, value)
        elif value is not None:
            section[key] = value
            tree.take(here, overlay, (*there, key))
        elif key in section:
            del section[key]
            tree.take(here, overlay, (*there, key))  # should the key be required
        else:
            raise UserError(
                f"{line}  {'.'.join(map(str, here))}: null removes a key, but the recipe has no "
                "such key here. Leave the line out."
            )


def _merge_phases(tree: Tree, phases: list[Any], overlay: Tree, changes: dict[Any, Any]) -> None:
    removed = []
    numbers = [
        int(_list_index(phases, str(name), overlay.location(("phases", name)))) for name in changes
    ]
    for number, (name, settings) in zip(numbers, changes.items(), strict=True):
        there = ("phases", name)
        if settings is None:
            removed.append(number)
        elif isinstance(settings, dict):
            kind, body = phase_of(tree, number, phases[number])
            phases[number] = {kind: body}
            _merge(tree, body, overlay, settings, ("phases", number, kind), there)
        else:
            raise UserError(
                f"{overlay.location(there)}  phases.{name}: must be a section with the settings "
                "that change, or null to leave the phase out."
            )
    for number in sorted(removed, reverse=True):
        del phases[number]
        tree.remove_item(("phases",), number)


def apply_override(tree: Tree, data: dict[Any, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"override {override!r} is not of the form key=value, e.g. training.epochs=1."
        )
    location = f"command line {override!r}"
    parsed = Tree(location).parse(value)
    target: Any = data
    at: KeyPath = ()
    parts = key.split(".")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        step: str | int = part
        if isinstance(target, list):
            step = _list_index(target, part, location)
            if at == ("phases",) and not last:
                kind, body = phase_of(tree, step, target[step])
                target[step] = {kind: body}
                if parts[depth + 1] == kind and depth + 2 < len(parts):
                    parts.pop(depth + 1)  # as messages write it: phases.0.fine-tune.epochs
                    last = depth == len(parts) - 1
                at, target = (*at, step, kind), target[step][kind]
                continue
        elif not isinstance(target, dict):
            raise UserError(f"{location}: {'.'.join(map(str, at))} holds a value, not a section.")
        at = (*at, step)
        if last:
            target[step] = parsed
            tree.forget(at)
            tree.locations[at] = location
        else:
            if isinstance(target, dict) and target.get(step) is None:
                target[step] = {}
                tree.locations[at] = location
            target = target[step]


def _list_index(items: list[Any], part: str, location: str) -> int:
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


def phase_of(tree: Tree, number: str | int, item: Any) -> tuple[str | int, Any]:
    """(kind, settings) of an item of `phases`. Raises UserError when it is not one key."""
    if isinstance(item, str):
        return item, {}
    if isinstance(item, dict) and len(item) == 1:
        [(kind, body)] = item.items()
        if body is None or isinstance(body, dict):
            return kind, body or {}
    raise UserError(
        f"{tree.location(('phases', number))}  phases.{number}: a phase is one key with its "
        "settings, e.g. - evaluate: {split: test}."
    )
