"""Which examples were used to train, fit, choose and judge, with warnings of overlaps."""

from __future__ import annotations

from typing import Any

from ds_distill.data.validation_split import CHOOSING_SPLIT
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import shippable, trained_on
from ds_distill.recipe.phases import PHASES


def uses(recipe: Recipe, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per use, in the order train, fit, choose, judge.

    Each has `use`, `task`, `split`, `examples`, `of` (what was trained, fitted, chosen or judged),
    and `warnings` (why figures on these examples are too optimistic).

    records: the records of the phases, in order; of a run that stopped, those that are done.
    """
    found: dict[tuple[str, str, str, int], list[str]] = {}

    def add(use: str, task: str, split: str, examples: int, of: str) -> None:
        named = found.setdefault((use, task, split, examples), [])
        if of not in named:
            named.append(of)

    tasks = [recipe.task_name(phase) for phase in recipe.phases[: len(records)]]
    trained = [
        (task, model)
        for task, record in zip(tasks, records, strict=True)
        for model in record.get("trained", [])
    ]
    candidates = [name for _, name in shippable(recipe, CHOOSING_SPLIT)]
    for task, model in trained:
        add("train", task, model["split"], model["examples"], model["output"])
    for task, record in zip(tasks, records, strict=True):
        if PHASES[record["kind"]].makes == "expertise":
            what = "routing, and which policy it follows"
            add("fit", task, record["split"], record["examples"], what)
    for task, model in trained:
        if (chosen := model["choosing"]) is not None and chosen["keep"] == "best":
            add("choose", task, chosen["split"], chosen["examples"], f"epoch of {model['output']}")
    for task, model in trained:
        among = len(candidates) > 1 and model["output"] in candidates
        if (chosen := model["choosing"]) is not None and among:
            add("choose", task, chosen["split"], chosen["examples"], "student to ship")
    for task, record in zip(tasks, records, strict=True):
        if PHASES[record["kind"]].makes == "evaluation":
            for name, model in record["models"].items():
                add("judge", task, record["split"], model["examples"], name)
    table = []
    for key, of in sorted(found.items(), key=lambda item: _ORDER[item[0][0]]):
        use, task, split, examples = key
        warnings = []
        if use != "train" and (seen := trained_on(recipe, task, split)):
            were = "was" if len(seen) == 1 else "were"
            warnings.append(f"{', '.join(seen)} {were} trained on this split")
        others = {
            other[0] for other in found if other[1:3] == (task, split) and other[0] in _USED_UP
        }
        if use == "judge" and others:
            warnings.append(f"the same split was used to {' and to '.join(sorted(others))}")
        about = {"use": use, "task": task, "split": split, "examples": examples}
        table.append({**about, "of": of, "warnings": warnings})
    return table


_USED_UP = ("fit", "choose")


_ORDER = {"train": 0, "fit": 1, "choose": 2, "judge": 3}
