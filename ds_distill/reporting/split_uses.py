"""Which examples were used to train, fit, choose and judge, with warnings of overlaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_distill.data.validation_split import CHOOSING_SPLIT
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import shippable, trained_on
from ds_distill.recipe.phases import PHASES

_ORDER = ("train", "fit", "choose", "judge")
_USED_UP = ("fit", "choose")


def uses(recipe: Recipe, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per use, in the order train, fit, choose, judge.

    Each has `use`, `task`, `split`, `examples`, `of` (what was trained, fitted, chosen or judged),
    and `warnings` (why figures on these examples are too optimistic).

    records: the records of the phases, in order; of a run that stopped, those that are done.
    """
    found: dict[tuple[str, str, str, int], dict[str, None]] = {}
    for use, task, split, examples, of in _each(recipe, records):
        found.setdefault((use, task, split, examples), {})[of] = None
    table = []
    ordered = sorted(found.items(), key=lambda item: _ORDER.index(item[0][0]))
    for (use, task, split, examples), every in ordered:
        warnings = []
        if use != "train" and (seen := trained_on(recipe, task, split)):
            were = "was" if len(seen) == 1 else "were"
            warnings.append(f"{', '.join(seen)} {were} trained on this split")
        others = {one[0] for one in found if one[1:3] == (task, split) and one[0] in _USED_UP}
        if use == "judge" and others:
            warnings.append(f"the same split was used to {' and to '.join(sorted(others))}")
        about = {"use": use, "task": task, "split": split, "examples": examples}
        table.append({**about, "of": list(every), "warnings": warnings})
    return table


def _each(
    recipe: Recipe, records: list[dict[str, Any]]
) -> Iterator[tuple[str, str, str, int, str]]:
    """(use, task, split, examples, what for)."""
    candidates, shipped = [name for _, name in shippable(recipe, CHOOSING_SPLIT)], []
    for phase, record in zip(recipe.phases, records, strict=False):
        task, makes = recipe.task_name(phase), PHASES[record["kind"]].makes
        for model in record.get("trained", []):
            yield "train", task, model["split"], model["examples"], model["output"]
            if (chosen := model["choosing"]) is None:
                continue
            where = task, chosen["split"], chosen["examples"]
            if chosen["keep"] == "best":
                yield "choose", *where, f"epoch of {model['output']}"
            if len(candidates) > 1 and model["output"] in candidates:
                shipped.append(("choose", *where, "student to ship"))
        if makes == "expertise":
            what = "routing, and which policy it follows"
            yield "fit", task, record["split"], record["examples"], what
        elif makes == "evaluation":
            for name, model in record["models"].items():
                yield "judge", task, record["split"], model["examples"], name
    yield from shipped
