"""The study of compact encoders and of a vocabulary that grows: one teacher, many ways to learn.

    OMP_NUM_THREADS=1 python tests/studies/encoders.py --work FOLDER --data DIR [--methods ...]

MiniLM is trained as a masked-LM once. Students that begin as three of its six layers then learn
from it, or from the same text alone, for as many steps (encoders_recipes.py); each is judged as a
masked-LM (encoders_judge.py) and, fine-tuned, on NCBI-disease and GAD. Each student is one
`ds-distill run` in a folder of its own. Start it again after a stop: finished runs are read, the
stopped one continues. At the end it writes docs/results/encoders.json and the tables of
docs/papers.md; `--show` writes the tables alone, from the file that is there.

Intervals are Student's t over three seeds. Of one seed there is none, and nothing is said to be
better by it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
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
from papers import environment, refuse_changes
from transformers import AutoTokenizer

from ds_distill.files import read_json, write_json
from ds_distill.run.environment import describe_environment

JUDGED = "judged.json"
DOCUMENTS = 100
"""Of the test text on which masked-LMs are judged."""


def run(settings: dict[str, Any], folder: Path, dirty: bool) -> None:
    """Run a recipe by the command line, or finish a run that was stopped."""
    if (folder / "report.html").is_file():
        return
    refuse_changes(describe_environment(1, "cpu"), dirty)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "ds_distill", "run", str(file), "--folder", str(folder)]
    resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
    subprocess.run([*command, *resume], check=True)


def finish(
    name: str, method: Method, seed: int, work: Path, data: Path, size: Size, dirty: bool
) -> None:
    """Train a student and judge it, or what of that is not done yet; then its weights go."""
    folder, teacher = place(work, name, seed), trained_teacher(work)
    if (folder / JUDGED).is_file():
        return
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
    write_json(folder / JUDGED, found)
    for heavy in ("models", "student", "data"):
        shutil.rmtree(folder / heavy, ignore_errors=True)


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
        **read_json(folder / JUDGED),
        **scores,
        "seconds": {phase: of["seconds"] for phase, of in phases.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder for runs")
    parser.add_argument("--data", type=Path, help="data_folder of the recipes")
    parser.add_argument("--methods", nargs="+", choices=methods(1), default=list(methods(1)))
    parser.add_argument("--smoke", action="store_true", help="some steps: figures mean nothing")
    parser.add_argument("--dirty", action="store_true", help="also from a changed checkout")
    parser.add_argument("--show", action="store_true", help="only write docs/papers.md")
    arguments = parser.parse_args()
    if arguments.show:
        show(PAGE, MARK, tables(read_json(RESULTS)))
        return
    if arguments.work is None or arguments.data is None:
        parser.error("--work and --data are needed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    work, data = arguments.work.absolute(), arguments.data.absolute()
    size = SMOKE if arguments.smoke else Size()
    run(teacher_recipe(data, size), work / "teacher-run", arguments.dirty)
    chosen = {name: methods(size.steps)[name] for name in arguments.methods}
    # The first seed of all, then the others: a study that ends early has a figure of each.
    asked = [(seed, name) for seed in (1, 2, 3) for name in chosen if seed in chosen[name].seeds]
    began, trained = time.monotonic(), 0
    for number, (seed, name) in enumerate(asked):
        trained += not (place(work, name, seed) / JUDGED).is_file()
        finish(name, chosen[name], seed, work, data, size, arguments.dirty)
        each = (time.monotonic() - began) / max(1, trained)
        left = ", ".join(f"{other} {of}" for of, other in asked[number + 1 :]) or "nothing"
        minutes = each * (len(asked) - number - 1) / 60
        print(
            f"done {number + 1} of {len(asked)}, {name} {seed}; {minutes:.0f} min for {left}",
            flush=True,
        )
    folders = [place(work, name, seed) for seed, name in asked]
    found = {
        "environment": environment([work / "teacher-run", *folders]),
        "size": vars(size),
        "runs": [record(name, seed, place(work, name, seed)) for seed, name in asked],
    }
    refuse_changes(found["environment"], arguments.dirty)
    whole = not arguments.smoke and list(chosen) == list(methods(1))
    write_json(RESULTS if whole else work / "encoders.json", found)
    print(tables(found))
    if whole:
        show(PAGE, MARK, tables(found))


if __name__ == "__main__":
    main()
