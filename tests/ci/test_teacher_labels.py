"""A teacher whose classes nobody named, and whose order is not the task's."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from runs import losses
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ds_distill.cache.reader import CacheReader
from ds_distill.caching.cached_signals import fingerprint
from ds_distill.cli import app
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.files import read_json
from ds_distill.recipe import LONE_TASK, load_recipe
from ds_distill.run import doubts
from ds_distill.run.execute import execute
from ds_distill.run.run import Run

REVERSED = {"LABEL_0": "weather", "LABEL_1": "food", "LABEL_2": "animal"}
IN_ORDER = {"LABEL_0": "animal", "LABEL_1": "food", "LABEL_2": "weather"}


class Bench:
    """Recipes of one teacher, run in this process."""

    def __init__(self, root: Path, settings: dict[str, Any]) -> None:
        self.root, self._settings = root, copy.deepcopy(settings)
        self._settings["training"] |= {"epochs": 4}
        self.runs: dict[str, Run] = {}

    def recipe(self, name: str, teacher: dict[str, Any], phases: list[Any]) -> Path:
        data = {**self._settings, "teachers": {"sound": teacher}, "phases": phases}
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    def run(self, name: str, teacher: dict[str, Any], phases: list[Any], *more: str) -> Run:
        recipe = load_recipe(str(self.recipe(name, teacher, phases)), more)
        self.runs[name] = execute(recipe, self.root / name)[LONE_TASK]
        return self.runs[name]

    def results(self, name: str) -> dict[str, Any]:
        return dict(read_json(self.root / name / "results.json"))

    def models(self, name: str) -> dict[str, Any]:
        [record] = [r for r in self.results(name)["phases"] if r["kind"] == "evaluate"]
        return dict(record["models"])

    def mark(self, **teacher: Any) -> dict[str, Any]:
        """Of the teacher's signals in a cache."""
        old = self.runs["silent"]
        recipe = load_recipe(str(self.recipe("again", teacher, LEARN)))
        run = Run(recipe, old.folder, old.world, old.log, old.data.source)
        return fingerprint(run, run.reference("sound", 0))

    def cache(self, name: str) -> CacheReader:
        return CacheReader(self.root / name / "cache" / "00-cache")


KL = {"split": "transfer", "losses": {"kl": {"temperature": 2.0}}, "epochs": 2}
LEARN: list[Any] = [
    {"cache": {"splits": "transfer", "dtype": "float32"}},
    {"distil": {**KL, "teachers": "cached"}},
    {"evaluate": {"split": "test"}},
]
MEASURE = {"expertise": {"split": "validation"}}


@pytest.fixture(scope="module")
def bench(
    tmp_path_factory: pytest.TempPathFactory, toy_settings: dict[str, Any]
) -> Iterator[Bench]:
    """Three runs that differ in the teacher alone: as it was trained (`named`), with its outputs
    reversed and their names taken away (`silent`), and so with the key (`told`)."""
    before = dict(os.environ)
    bench = Bench(tmp_path_factory.mktemp("labels"), toy_settings)
    model = toy_settings["student"]["model"]
    trained = bench.run("teacher", {"model": model}, [{"fine-tune": {"models": "sound"}}])
    named, nameless = trained.folder.model(0, "sound"), bench.root / "nameless"
    shutil.copytree(named, nameless)
    weights = load_file(named / "model.safetensors")
    for part in ("classifier.weight", "classifier.bias"):
        weights[part] = weights[part].flip(0).contiguous()
    save_file(weights, nameless / "model.safetensors", {"format": "pt"})
    config = read_json(nameless / "config.json")
    names = {f"LABEL_{number}": number for number in range(3)}
    config |= {"label2id": names, "id2label": {str(v): k for k, v in names.items()}}
    (nameless / "config.json").write_text(json.dumps(config))
    bench.run("named", {"model": str(named)}, LEARN)
    on_trust = {"model": str(nameless), "below_majority": "warn"}
    bench.run("silent", on_trust, [*LEARN, MEASURE])
    bench.run("told", {"model": str(nameless), "labels": REVERSED}, LEARN)
    yield bench
    World.stop()
    os.environ.clear()
    os.environ.update(before)


def test_in_the_wrong_order_a_teacher_is_warned_of(bench: Bench) -> None:
    """That names the order in which it would be right. Without the key nothing else can be done:
    nobody but the user knows what the classes are."""
    teacher, student = (bench.models("silent")[name]["accuracy"] for name in ("sound", "student"))
    assert teacher < 0.4 and student < 0.5, "the class in the middle alone is right"
    results = bench.results("silent")
    [scored] = results["teacher_scores"]
    assert scored["doubt"].startswith("accuracy ") and "%. With its labels" in scored["doubt"]
    order = "teachers.sound.labels to {LABEL_0: weather, LABEL_1: food, LABEL_2: animal}"
    assert order in scored["doubt"]
    assert [record["warnings"] for record in results["phases"][-2:]] == [[], []], "told before"
    events = (bench.root / "silent" / "metrics.jsonl").read_text()
    assert events.count('"event": "warning"') == 1
    for sound in ("named", "told"):
        assert bench.results(sound)["phases"][-1]["warnings"] == []


def test_in_the_wrong_order_it_is_refused_before_anything_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to go on, the same run continues, and scores nothing a second time."""
    control = {"fine-tune": {"models": "student", "save_as": "control", "epochs": 1}}
    teacher = {"model": str(bench.root / "nameless")}
    path = bench.recipe("refused", teacher, [control, *LEARN])
    asked: list[list[str]] = []
    predict = doubts.predictions_of

    def counted(run: Run, references: list[Any], *arguments: Any, **options: Any) -> Any:
        asked.append([reference.name for reference in references])
        return predict(run, references, *arguments, **options)

    monkeypatch.setattr(doubts, "predictions_of", counted)
    folder = bench.root / "refused"
    with pytest.raises(UserError, match=r"^teachers\.sound: accuracy .* on validation") as caught:
        execute(load_recipe(str(path)), folder)
    said = str(caught.value)
    assert "teachers.sound.labels to {LABEL_0: weather, LABEL_1: food, LABEL_2: animal}" in said
    assert said.endswith("set teachers.sound.below_majority=warn.")
    assert not (folder / "models").exists() and not (folder / "cache").exists()
    with pytest.raises(UserError, match=r"^teachers\.sound: accuracy"):
        execute(load_recipe(str(path)), folder, resume=True)
    go_on = load_recipe(str(path), ["teachers.sound.below_majority=warn"])
    execute(go_on, folder, resume=True)
    assert asked == [["sound"]]
    [score] = bench.results("refused")["teacher_scores"]
    assert (score["teacher"], score["split"], score["examples"]) == ("sound", "validation", 60)
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [event] = [event for event in events if event["event"] == "teacher-score"]
    assert event["score"] == score["score"] < 0.4
    report = (folder / "report.html").read_text()
    assert "Teachers before a student learnt" in report and score["doubt"][:20] in report


def test_with_the_key_it_is_the_teacher_that_it_was(bench: Bench) -> None:
    """All that comes after its outputs are read: cache, student, evaluation."""
    assert bench.models("told") == bench.models("named")
    assert bench.models("told")["sound"]["accuracy"] > 0.8
    assert losses(bench.root / "told", "student") == losses(bench.root / "named", "student")
    readers = [bench.cache(name) for name in ("named", "told", "silent")]
    rows = np.arange(readers[0].manifest.examples)
    named, told, silent = (reader.read("sound", rows).logits for reader in readers)
    assert torch.equal(told, named)
    assert torch.equal(silent, named.flip(1))


def test_a_cache_is_of_one_order(bench: Bench) -> None:
    """Whether the key comes or goes; a key that says what would hold without it changes nothing."""
    model = str(bench.root / "nameless")
    silent, told = bench.mark(model=model), bench.mark(model=model, labels=REVERSED)
    assert silent["labels"] == ["animal", "food", "weather"], "as before there was a key"
    assert bench.mark(model=model, labels=IN_ORDER) == silent
    for name, own, other in (("told", told, silent), ("silent", silent, told)):
        bench.cache(name).check("sound", own)
        with pytest.raises(UserError, match="was cached with labels"):
            bench.cache(name).check("sound", other)


def test_a_cache_of_first_tokens_states_is_none_of_a_teacher_that_pools(bench: Bench) -> None:
    """Caches of before held the first token's state of teachers whose head reads the mean."""
    marks = {}
    for pooling in ("mean", "cls"):
        folder = bench.root / pooling
        shutil.copytree(bench.root / "nameless", folder)
        config = read_json(folder / "config.json")
        (folder / "config.json").write_text(json.dumps({**config, "classifier_pooling": pooling}))
        marks[pooling] = bench.mark(model=str(folder))
    assert marks["mean"]["pooling"] == "mean" and "pooling" not in marks["cls"]
    of_before = bench.mark(model=str(bench.root / "nameless"))
    bench.cache("silent").check("sound", of_before)
    with pytest.raises(UserError, match="pooling"):
        bench.cache("silent").check("sound", {**of_before, "pooling": "mean"})


def test_check_notes_that_an_order_is_taken_on_trust(bench: Bench) -> None:
    def says(teacher: dict[str, Any], phases: list[Any]) -> tuple[int, str]:
        path = bench.recipe("check", teacher, phases)
        done = CliRunner().invoke(app, ["check", str(path)])
        error = str(done.exception) if isinstance(done.exception, UserError) else ""
        return done.exit_code, done.output + error

    silent = {"model": str(bench.root / "nameless")}
    code, text = says(silent, LEARN)
    assert code == 0 and "no mistakes found" in text
    assert "Note: teachers.sound" in text and "{LABEL_0: animal, LABEL_1: food" in text
    assert "Note" not in says({**silent, "labels": REVERSED}, LEARN)[1]
    train = [{"fine-tune": {"models": "sound"}}, *LEARN]
    assert "Note" not in says(silent, train)[1], "it gets the task's own order"
    for phases in (train, [{"distil": {"start": "sound", "losses": {"kl": {}}}}]):
        code, text = says({**silent, "labels": REVERSED}, phases)
        assert code != 0 and "teachers.sound.labels: phase" in text and "Take `labels` out" in text
    code, text = says({**silent, "labels": {"LABEL_5": "food"}}, LEARN)
    assert code != 0 and "teachers.sound" in text and "labels.LABEL_5=food" in text
