"""Every built-in recipe, whole: its tasks, phases, losses and policies as its file has them, with
toy models, generated data and a few steps in place of its own. A new recipe is run without being
named here."""

import json
import math
import random
import re

import pytest
import yaml
from processes import events
from toys import TOY_LABELS, make_tiny_bert, toy_text, toy_vocabulary
from transformers import BertForMaskedLM

from ds_distill import run_recipe
from ds_distill.recipe import builtin_recipes, dump_recipe, load_recipe, small_form
from ds_distill.recipe.codecs import CODECS
from ds_distill.recipe.data import SOURCES
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.phases import PHASES
from ds_distill.recipe.policies import POLICIES
from ds_distill.recipe.tasks import TASKS
from ds_distill.recipe.terms import TERMS

ROWS = {"train": 40, "validation": 60, "test": 24}
"""Rows of a split; a fit of routing wants 20 labelled ones in half of validation."""
OTHERS = 40

WIDTHS = (32, 48, 64)
"""Of the toy models: what a recipe says of two models holds for unequal ones."""


def parts_of(name, small):
    """(kind, name) of all parts that a recipe speaks of."""
    words = set(re.findall(r"[\w-]+", dump_recipe(load_recipe(name, small=small))))
    tables = (PHASES, TERMS, POLICIES, CODECS, SOURCES, TASKS, *METRICS.values())
    return {(p.kind_of_part, n) for table in tables for n, p in table.items() if n in words}


def runs(later):
    """(name, small form or not): of all recipes, and of small forms with phases of their own.
    later: those whose parts are all in the ones before them; else the others."""
    left = {}
    for name, path in builtin_recipes().items():
        left[name, False] = parts_of(name, False)
        small = small_form(path)
        if small.is_file() and isinstance(yaml.safe_load(small.read_text()).get("phases"), list):
            left[name, True] = parts_of(name, True)
    seen = set()
    while left:
        name, small = chosen = max(left, key=lambda one: len(left[one] - seen))
        new = left.pop(chosen) - seen
        seen |= new
        if later != bool(new):
            yield pytest.param(name, small, id=f"{name}-small" if small else name)


class Toys:
    """What stands in for the models and the data of a recipe."""

    def __init__(self, folder):
        self.folder = folder
        self.draw = random.Random(0)
        self.models = {}
        self.widths = WIDTHS

    def recipe(self, whole):
        settings = yaml.safe_load(dump_recipe(whole))
        phases = [next(iter(phase.values())) for phase in settings["phases"]]
        without_map = "map: false" in dump_recipe(whole)
        if without_map or any(phase.get("shared_head") for phase in phases):
            self.widths = WIDTHS[:1]
        for model in [settings["student"], *settings["teachers"].values()]:
            if model.get("predictions") is None:
                model |= {"model": str(self.model(model["model"])), "revision": None}
            else:
                model["predictions"] = str(self.folder / "answers.jsonl")
        if settings["student"]["layers"] is not None:
            settings["student"]["layers"] = [0]
        if settings["student"].get("config") is not None:
            depth = 2 if "layers: every" in dump_recipe(whole) else 1  # of toy teachers: two
            settings["student"]["config"] = {"hidden_size": WIDTHS[0], "num_hidden_layers": depth}
        for phase in phases:
            shorten(phase)
        for name, task in (settings.get("tasks") or {"task": settings["task"]}).items():
            asks = task["type"] in ("character-spans", "extractive-qa")
            task["max_length"] = 32 if asks else 24
            self.replace_data(name, task, phases)
        self.answer()
        settings |= {"deepspeed": "zero0_fp32", "models_folder": None, "logging": {"every": 1}}
        path = self.folder / f"{whole.name}.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False))
        return load_recipe(path)

    def model(self, reference):
        """One toy for each model that a recipe names: masked-LMs, as the published ones are; all
        have the same vocabulary."""
        if reference not in self.models:
            width = self.widths[len(self.models) % len(self.widths)]
            folder = self.folder / f"model-{len(self.models)}"
            make_tiny_bert(folder, toy_vocabulary(), hidden_size=width)
            BertForMaskedLM.from_pretrained(folder).save_pretrained(folder)
            self.models[reference] = folder
        return self.models[reference]

    def replace_data(self, name, task, phases):
        """Folders with the splits, columns and labels that the recipe reads."""
        data = task["data"]
        labels = task.get("labels") or TOY_LABELS
        if task["type"] == "regression":
            labels = [0.0, 0.3, 0.8]
        kind = task["type"]
        sections = {key: s for key, s in data["splits"].items() if not isinstance(s, str)}
        read = {phase["split"] for phase in phases if phase.get("split")}
        read |= {split for phase in phases for split in phase.get("splits", [])}
        own = {*ROWS, *read} - {*sections}
        folder = self.folder / f"data-{name}"
        for split in own:
            self.write(folder / f"{split}.jsonl", data["columns"], labels, kind)
        data |= {"path": str(folder), "config": None, "splits": sections, "per_class": {}}
        data |= {key: empty for key, empty in (("limit", {}), ("folds", None)) if key in data}
        for split, given in sections.items():
            for part, section in enumerate(given if isinstance(given, list) else [given]):
                there = self.folder / f"data-{name}-{split}-{part}"
                mapped = section["labels"]
                names = list(mapped) if isinstance(mapped, dict) else labels
                self.write(there / "train.jsonl", section["columns"], names, kind)
                section |= {"path": str(there), "config": None, "split": "train", "limit": None}

    def answer(self):
        """A file of what a teacher that is no model says of all texts."""
        found = {}
        for file in self.folder.glob("data-*/*.jsonl"):
            for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                if {"text", "label"} <= row.keys():
                    found[row["text"]] = {"text": row["text"], "predicted": row["label"]}
        lines = "".join(json.dumps(row) + "\n" for row in found.values())
        (self.folder / "answers.jsonl").write_text(lines, encoding="utf-8")

    def write(self, file, columns, labels, kind):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "w", encoding="utf-8") as lines:
            for number in range(ROWS.get(file.stem, OTHERS)):
                label = number % len(labels)
                texts = [
                    toy_text(TOY_LABELS[label % len(TOY_LABELS)], self.draw)
                    for _ in filter(None, (columns["text"], columns["text_b"]))
                ]
                if kind in ("character-spans", "extractive-qa"):
                    end = texts[0].index(" ")
                    answer = {"start": 0, "end": end, "text": texts[0][:end]}
                    del answer["text" if kind == "character-spans" else "end"]
                    answers = [answer] if number % 2 or kind == "extractive-qa" else []
                    names = [columns[name] for name in ("question", "context", "answers")]
                    row = dict(zip(names, ["we saw", texts[0], answers], strict=True))
                elif kind == "token-classification":
                    words = texts[0].split()
                    tags = [self.draw.choice(labels) for _ in words]
                    row = {columns["tokens"]: words, columns["tags"]: tags}
                else:
                    names = [columns["label"], columns["text"], columns["text_b"]]
                    row = dict(zip(names, [labels[label], *texts], strict=False))
                lines.write(json.dumps(row) + "\n")


def shorten(phase):
    """A few small steps; what is done in them stays."""
    for key, few in (("epochs", 1), ("steps", 3), ("per_class", 4)):
        if phase.get(key) is not None:
            phase[key] = few
    for loss in (phase.get("losses") or {}).values():
        if isinstance(loss.get("layers"), dict):  # toys have few
            loss["layers"] = {1: 1}
        if loss.get("heads") is not None:
            loss["heads"] = 4
    if any(layer > 0 for layer in phase.get("hidden") or ()):
        phase["hidden"] = [1]
    if "learning_rate" in phase:
        phase |= {"batch_size": 16, "micro_batch_size": None}


@pytest.mark.parametrize(("name", "small"), list(runs(later=False)))
def test_a_builtin_recipe_runs_whole(name, small, tmp_path):
    check_run(name, small, tmp_path)


def check_run(name, small, tmp_path):
    whole = load_recipe(name, small=small)
    recipe = Toys(tmp_path).recipe(whole)
    assert [phase.kind for phase in recipe.phases] == [phase.kind for phase in whole.phases]
    done = run_recipe(recipe, tmp_path / "run")

    records = done.results["phases"]
    assert len(records) == len(whole.phases)
    trained = {model for _, model in whole.trained_models()}
    judged = {model for record in records for model in record.get("models", {})}
    assert trained <= judged | intermediate(whole) or not judged
    assert done.results["student"] in trained
    assert done.student is not None and done.report.stat().st_size > 0

    losses = [event["loss"] for event in events(done.folder) if event["event"] == "train"]
    assert losses and all(map(math.isfinite, losses))


def intermediate(recipe):
    """Models that another phase starts from."""
    return {start for phase in recipe.phases for start in phase.starts}
