"""The papers' small forms over seeds, for the tables of docs/papers.md.

python tests/studies/papers.py --work FOLDER --data DIR [--tables ...] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_distill.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "papers"


@dataclass(frozen=True)
class Variant:
    """One run per seed."""

    overrides: tuple[str, ...] = ()
    """Of the recipe's small form."""
    more: tuple[dict[str, Any], ...] = ()
    """Phases before the last one, `evaluate`. Settings of `like`, a phase's name, are taken over
    where they name none of their own."""


@dataclass(frozen=True)
class Table:
    recipe: str
    variants: dict[str, Variant]
    overrides: tuple[str, ...] = ()
    """Of all variants."""


BOUNDARIES = {"activation_boundary": {"weight": 0.001, "until": 0.9}}
ON_LABELS = {"cross_entropy": {"from": 0.9}}
PENALTY = {"confidence_penalty": {"weight": 0.3, "from": 0.9}}
KL = {"kl": {"temperature": 1.0, "until": 0.9}}
START = "phases.evaluate.start=true"
"""Evaluate the student before any training as well."""

PREDICTIONS = {"like": "distil", "save_as": "predictions", "losses": {**KL, **ON_LABELS, **PENALTY}}
"""KL of the predictions in place of the boundaries."""
NO_PENALTY = {"like": "distil", "save_as": "no-penalty", "losses": {**BOUNDARIES, **ON_LABELS}}
LABELS_ONLY = {"like": "control", "models": "fine-tuned", "save_as": "labels-only", "epochs": 5}
"""From the start of `distil`, as many steps, on labels alone."""

DOKTRA = {
    "calibrated": Variant(more=(PREDICTIONS, NO_PENALTY, LABELS_ONLY)),
    "not-calibrated": Variant(
        ("phases.teach.losses={cross_entropy: {}}",), (PREDICTIONS, LABELS_ONLY)
    ),
}
TABLES = {
    "doktra-gad": Table("doktra", DOKTRA, (START,)),
    "transfer-general": Table("transfer-general", {"": Variant()}),
    "transfer-random": Table("transfer-random", {"": Variant()}),
    "transfer-domain": Table("transfer-domain", {"": Variant()}),
}


def overrides_of(table: Table, variant: Variant) -> list[str]:
    """The overrides that make a run of the recipe's small form, but for seed and data folder."""
    overrides = [*table.overrides, *variant.overrides]
    if not variant.more:
        return overrides
    recipe = load_recipe(table.recipe, overrides, small=True)
    names = recipe.phase_names()
    phases = [phase.model_dump(mode="json") for phase in recipe.phases]
    listed = [{phase.pop("kind"): phase} for phase in phases]
    for settings in variant.more:
        own = {key: value for key, value in settings.items() if key != "like"}
        [(kind, like)] = listed[names.index(settings["like"])].items()
        listed.insert(-1, {kind: {**like, "name": own["save_as"], **own}})
    return [*overrides, f"phases={json.dumps(listed)}"]


def run(table: Table, variant: Variant, seed: int, data: Path, folder: Path) -> None:
    """Run a recipe's small form by the command line, or finish a run that was stopped."""
    if (folder / "report.html").is_file():
        return
    overrides = [*overrides_of(table, variant), f"seed={seed}", f"data_folder={data}"]
    command = [sys.executable, "-m", "ds_distill", "run", table.recipe, *overrides]
    resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*command, "--small", "--folder", str(folder), *resume], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--data", type=Path, required=True, help="data_folder of the recipes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for name in arguments.tables:
            table = TABLES[name]
            for label, variant in table.variants.items():
                place = arguments.work / name / (label or "recipe") / f"seed-{seed}"
                run(table, variant, seed, arguments.data, place)


if __name__ == "__main__":
    main()
