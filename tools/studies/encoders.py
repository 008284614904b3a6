"""The study of compact encoders and of a vocabulary that grows: one teacher, many ways to learn.

    OMP_NUM_THREADS=1 python tools/studies/encoders.py --work FOLDER --data DIR [--methods ...]

MiniLM is trained as a masked-LM once. Students that begin as three of its six layers then learn
from it, or from the same text alone, for as many steps (encoders_recipes.py); each is judged as a
masked-LM (encoders_judge.py) and, fine-tuned, on NCBI-disease and GAD. Each student is one
`ds-distill run` in a folder of its own; when it is judged, its figures go to encoders.json in
FOLDER. Two processes may share a FOLDER, of unlike methods, once the teacher is trained.
Start the study again after a stop: a student that was stopped continues, one of that file,
or of docs/results/encoders.json where FOLDER is new, is not trained again. At its end, or by
`--work FOLDER --show` before, the figures go to docs/results/encoders.json and the tables to
docs/studies/encoders.md.

Intervals are Student's t over three seeds. Of one seed there is none, and nothing is said to be
better by it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import yaml
from encoders_judge import judged, weight, windows
from encoders_recipes import ENCODER, SMOKE, TASKS, Method, Size, methods, recipe, teacher_recipe
from encoders_tables import MARK, PAGE, RESULTS, tables
from pages import show
from papers import environment, refuse_changes, run_recipe
from transformers import AutoTokenizer

from ds_distill.files import read_json, write_json

DOCUMENTS = 100
"""Of the test text on which masked-LMs are judged."""


def run(settings: dict[str, Any], folder: Path, dirty: bool) -> None:
    """Run a recipe by the command line, or finish a run that was stopped."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    run_recipe(str(file), [], folder, dirty)


def finish(
    name: str, method: Method, seed: int, work: Path, data: Path, size: Size, dirty: bool
) -> dict[str, Any]:
    """Train a student and judge it, or what of that is not done yet; then its weights go."""
    folder, teacher = place(work, name, seed), trained_teacher(work)
    run(recipe(method, seed, str(teacher), data, size), folder, dirty)
    models = {path.name.partition("-")[2]: path for path in (folder / "models").iterdir()}
    if not method.phases:
        models[ENCODER] = teacher
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    test = windows(data / "raw_biomed" / "biomed_cased_valid.txt.gz", DOCUMENTS, tokenizer)
    found = {
        "text": judged(str(models[ENCODER]), test, tokenizer) if method.head else None,
        "weight": weight(str(models[f"on-{next(iter(TASKS))}"]), str(teacher), test),
    }
    one = record(name, seed, folder) | found
    refuse_changes(one["environment"], dirty)
    shutil.rmtree(folder)
    return one


def place(work: Path, name: str, seed: int) -> Path:
    return work / name.replace(", ", "-").replace(" ", "-") / f"seed-{seed}"


def trained_teacher(work: Path) -> Path:
    return work / "teacher-run" / "student"


def record(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """What the study publishes of a student."""
    results = read_json(folder / "results.json")
    phases = {phase["phase"]: phase for phase in results["phases"]}
    scores = {}
    for task, metric in TASKS.items():
        evaluation = phases[f"judge-{task}"]
        kept = (metric, "accuracy")
        scores[task] = {
            "examples": evaluation["baseline"]["examples"],
            "baseline": {key: evaluation["baseline"][key] for key in kept},
            **{key: evaluation["models"][f"on-{task}"][key] for key in kept},
        }
    return {
        "method": name,
        "seed": seed,
        **scores,
        "seconds": {phase: of["seconds"] for phase, of in phases.items()},
        "environment": environment([folder]),
    }


def publish(found: dict[str, Any]) -> None:
    write_json(RESULTS, found)
    show(PAGE, MARK, tables(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder for runs")
    parser.add_argument("--data", type=Path, help="data_folder of the recipes")
    parser.add_argument("--methods", nargs="+", choices=methods(1), default=list(methods(1)))
    parser.add_argument("--smoke", action="store_true", help="some steps: figures mean nothing")
    parser.add_argument("--dirty", action="store_true", help="also from a changed checkout")
    parser.add_argument("--show", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    own = arguments.work and arguments.work.absolute() / RESULTS.name
    if arguments.show:
        publish(read_json(own or RESULTS))
        return
    if arguments.work is None or arguments.data is None:
        parser.error("--work and --data are needed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    work, data = arguments.work.absolute(), arguments.data.absolute()
    size = SMOKE if arguments.smoke else Size()
    every = [(name, seed) for name, one in methods(1).items() for seed in one.seeds]
    # The first seed of all, then the others: a study that ends early has a figure of each.
    asked = sorted((one for one in every if one[0] in arguments.methods), key=lambda one: one[1])
    known = next((file for file in (own, RESULTS) if file.is_file()), None)
    runs = read_json(known)["runs"] if known and not arguments.smoke else []
    if runs and read_json(known)["size"] != vars(size):
        parser.error(f"{known} is of a study of another size: --work must be another folder")
    done = {(one["method"], one["seed"]) for one in runs}
    left = [one for one in asked if one not in done]
    if left:
        run(teacher_recipe(data, size), work / "teacher-run", arguments.dirty)
    began = time.monotonic()
    for number, (name, seed) in enumerate(left, start=1):
        method = methods(size.steps)[name]
        one = finish(name, method, seed, work, data, size, arguments.dirty)
        if own.is_file():  # another process may have added to it
            runs = read_json(own)["runs"]
        runs.append(one)
        runs.sort(key=lambda one: every.index((one["method"], one["seed"])))
        write_json(own, {"size": vars(size), "runs": runs})
        minutes = (time.monotonic() - began) / number * (len(left) - number) / 60
        rest = ", ".join(f"{of} {one}" for of, one in left[number:]) or "nothing"
        print(f"{name} {seed}; {minutes:.0f} min for {rest}", flush=True)
    if not arguments.smoke:
        publish(read_json(own))


if __name__ == "__main__":
    main()
