"""Which examples were used to train, fit, choose and judge, with warnings of overlaps."""

from __future__ import annotations

from typing import Any

from ds_distill.parts.phases import PHASES
from ds_distill.recipe import Recipe


def uses(recipe: Recipe, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per use, in the order train, fit, choose, judge.

    Each has `use`, `split`, `examples`, `of` (what was trained, fitted, chosen or judged), and
    `warnings` (why figures on these examples are too optimistic).

    records: the records of the phases, in order.
    """
    found: dict[tuple[str, str, int], list[str]] = {}

    def add(use: str, split: str, examples: int, of: str) -> None:
        named = found.setdefault((use, split, examples), [])
        if of not in named:
            named.append(of)

    trained = [model for record in records for model in record.get("trained", [])]
    for model in trained:
        add("train", model["split"], model["examples"], model["output"])
    for record in records:
        if PHASES[record["kind"]].makes == "expertise":
            add("fit", record["split"], record["examples"], "routing, and which policy it follows")
    for model in trained:
        if (choosing := model["choosing"]) is not None and choosing["keep"] == "best":
            add("choose", choosing["split"], choosing["examples"], f"epoch of {model['output']}")
    for model in trained:
        if (choosing := model["choosing"]) is not None and len(trained) > 1:
            add("choose", choosing["split"], choosing["examples"], "student to ship")
    for record in records:
        if PHASES[record["kind"]].makes == "evaluation":
            for name, model in record["models"].items():
                add("judge", record["split"], model["examples"], name)
    table = []
    for (use, split, examples), of in sorted(found.items(), key=lambda item: _ORDER[item[0][0]]):
        warnings = []
        if use != "train" and (seen := recipe.trained_on(split)):
            were = "was" if len(seen) == 1 else "were"
            warnings.append(f"{', '.join(seen)} {were} trained on this split")
        others = {other for other, its, _ in found if its == split and other in ("fit", "choose")}
        if use == "judge" and others:
            warnings.append(f"the same split was used to {' and to '.join(sorted(others))}")
        table.append(
            {"use": use, "split": split, "examples": examples, "of": of, "warnings": warnings}
        )
    return table


_ORDER = {"train": 0, "fit": 1, "choose": 2, "judge": 3}
