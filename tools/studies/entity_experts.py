"""The study of experts of entity types: genes, diseases and chemicals, an expert of each.

    OMP_NUM_THREADS=2 python tools/studies/entity_experts.py --work FOLDER [--data FOLDER]
        [--seeds 1 2 3]

Each seed is `ds-distill run entity-experts --small seed=SEED`, and after it a run in which its
experts are teachers of all tags, so that the average takes an expert's O for evidence. Run it again
after a stop: finished runs are read, the stopped one continues. At the end it writes
docs/results/entity-experts.json and the tables in docs/studies/entity-experts.md.

Intervals: of a seed's difference, the paired bootstrap over the test sentences; of the mean over
seeds, Student's t.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import yaml
from pages import row, show
from routing import ROOT
from transformers import AutoModelForTokenClassification, PreTrainedModel

from ds_distill.evaluation.bootstrap import mean_interval
from ds_distill.files import new_folder, read_json, write_json, write_text
from ds_distill.sweep.side_by_side import side_by_side

RECIPE = "entity-experts"
RESULTS = ROOT / "docs" / "results" / "entity-experts.json"
PAGE = ROOT / "docs" / "studies" / "entity-experts.md"
MARK = "experts of entity types"
SETS = {"genes": "BC2GM", "diseases": "NCBI-disease", "chemicals": "BC5CDR-chemical"}
METRIC = "entity_f1"
AVERAGE = "student-of-every-o"
"""In the record: the student of the average that takes an expert's O for evidence."""
NEVER = -30.0
"""Logit of a tag that an expert does not know: a probability below 1e-9 beside those of its own."""


def run(recipe: list[str], folder: Path) -> None:
    if (folder / "results.json").is_file():
        return
    command = [sys.executable, "-m", "ds_distill", "run", *recipe]
    resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
    subprocess.run([*command, "--folder", str(folder), *resume], check=True)


def with_all_tags(expert: PreTrainedModel, labels: list[str]) -> PreTrainedModel:
    """The expert as a teacher of all tags: those that its set does not annotate have the logit
    NEVER, so that what it takes for O is O to whoever learns from it."""
    config = type(expert.config).from_dict(
        {**expert.config.to_dict(), "id2label": dict(enumerate(labels))}
    )
    places = [labels.index(expert.config.id2label[n]) for n in range(expert.config.num_labels)]
    weight, bias = (parameter.detach().clone() for parameter in expert.classifier.parameters())
    with torch.no_grad():
        expert.classifier = torch.nn.Linear(weight.shape[1], len(labels))
        expert.classifier.weight.zero_()[places] = weight
        expert.classifier.bias.fill_(NEVER)[places] = bias
    config.label2id = {label: place for place, label in enumerate(labels)}
    expert.config, expert.num_labels = config, len(labels)
    return expert


def average_of_every_o(folder: Path) -> list[str]:
    """The recipe of a finished run's student alone, with its experts as teachers of all tags."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    for name, teacher in recipe["teachers"].items():
        [trained] = (folder / "models").glob(f"*-{name}")
        teacher["model"] = str(folder.with_name(f"{folder.name}-experts") / name)
        if not Path(teacher["model"]).is_dir():
            expert = AutoModelForTokenClassification.from_pretrained(trained)
            with new_folder(Path(teacher["model"])) as aside:
                for file in trained.glob("*token*"):
                    shutil.copy(file, aside)
                with_all_tags(expert, recipe["tasks"]["all"]["labels"]).save_pretrained(aside)
    kept = ("cache", "distil", "evaluate")
    recipe["phases"] = [phase for phase in recipe["phases"] if next(iter(phase)) in kept]
    file = folder.with_name(f"{folder.name}-average.yaml")
    write_text(file, yaml.safe_dump(recipe, sort_keys=False))
    return [str(file)]


def record_of(seed: int, folder: Path, average: Path) -> dict[str, Any]:
    """What the study publishes of a seed's two runs."""
    results, others = read_json(folder / "results.json"), read_json(average / "results.json")
    evaluated = {record["task"]: record for record in others["phases"] if "comparisons" in record}
    # In the order of the evaluate phases, which is that of the sets.
    less = dict(zip(SETS, side_by_side([average, folder]), strict=True))
    found = {}
    for record in results["phases"]:
        if record["kind"] == "evaluate":
            pairs = {
                pair["other"]: {key: pair[key] for key in ("difference", "interval")}
                for pair in record["comparisons"]
                if pair["student"] == results["student"]
            }
            task = record["task"]
            other = evaluated[task]["models"][others["student"]]
            ours = (folder.name, results["student"])
            [pair] = [
                model["to_first"]
                for model in less[task]["models"].values()
                if (model["run"], model["model"]) == ours
            ]
            pairs[AVERAGE] = {key: pair[key] for key in ("difference", "interval")}
            found[task] = {
                "examples": record["baseline"]["examples"],
                "words_without_token": record["baseline"]["words_without_token"],
                "majority": record["baseline"][METRIC],
                "models": {name: model[METRIC] for name, model in record["models"].items()}
                | {AVERAGE: other[METRIC]},
                "student_less": pairs,
            }
    environment = read_json(folder / "environment.json")
    return {
        "seed": seed,
        "environment": environment,
        "environment_of_the_average": read_json(average / "environment.json"),
        "seconds": results["seconds"] + others["seconds"],
        "student": results["student"],
        "sets": found,
    }


def tables(runs: list[dict[str, Any]]) -> str:
    """Scores, then the student's differences, as Markdown."""
    models = {
        "student of the experts": runs[0]["student"],
        "student of the average, an O as evidence": AVERAGE,
        "labels of all sets": "labels-only",
    }

    def scores(task: str, model: str) -> list[float]:
        return [100 * one["sets"][task]["models"][model] for one in runs]

    def cell(values: list[float]) -> str:
        each = " / ".join(f"{value:.1f}" for value in values)
        return f"{sum(values) / len(values):.1f} ({each})"

    text = row(["entity F1 on test", *SETS.values()]) + row(["---"] * (1 + len(SETS)))
    text += row(["its expert", *(cell(scores(task, task)) for task in SETS)])
    for name, model in models.items():
        text += row([name, *(cell(scores(task, model)) for task in SETS)])
    text += row(["labels of this set alone", *(cell(scores(t, f"{t}-only")) for t in SETS)])
    text += row(["always O", *(f"{100 * runs[0]['sets'][task]['majority']:.1f}" for task in SETS)])
    text += "\n" + row(["student less", *SETS.values()]) + row(["---"] * (1 + len(SETS)))
    for name, other in (
        ("its expert", "{}"),
        ("the average, an O as evidence", AVERAGE),
        ("labels of all sets", "labels-only"),
        ("labels of this set alone", "{}-only"),
    ):
        cells = []
        for task in SETS:
            pairs = [one["sets"][task]["student_less"][other.format(task)] for one in runs]
            differences = [100 * pair["difference"] for pair in pairs]
            better = sum(pair["interval"][0] > 0 for pair in pairs)
            worse = sum(pair["interval"][1] < 0 for pair in pairs)
            beyond = [f"above in {better}"] * (better > 0) + [f"below in {worse}"] * (worse > 0)
            low, high = mean_interval(differences)
            mean = sum(differences) / len(differences)
            cells.append("; ".join([f"{mean:+.1f} ({low:+.1f} to {high:+.1f})", *beyond]))
        text += row([name, *cells])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folders = {seed: arguments.work / f"seed-{seed}" for seed in arguments.seeds}
    averages = {seed: arguments.work / f"seed-{seed}-average" for seed in arguments.seeds}
    for seed, folder in folders.items():
        run([RECIPE, "--small", f"seed={seed}", f"data_folder={arguments.data}"], folder)
        run(average_of_every_o(folder), averages[seed])
    # Only now: until here the checkout is as its commit has it.
    runs = [record_of(seed, folders[seed], averages[seed]) for seed in arguments.seeds]
    write_json(RESULTS, {"runs": runs})
    show(PAGE, MARK, tables(runs))


if __name__ == "__main__":
    main()
