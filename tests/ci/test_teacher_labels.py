"""A teacher whose classes nobody named, and whose order is not the task's."""

import copy
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from kinds import change
from runs import evaluation, loaded, logged, losses, results
from safetensors.torch import load_file, save_file

from ds_distill.cache.reader import CacheReader
from ds_distill.caching.cached_signals import fingerprint
from ds_distill.check.check import check_all
from ds_distill.errors import UserError
from ds_distill.recipe import LONE_TASK
from ds_distill.run import doubts
from ds_distill.run.execute import execute
from ds_distill.run.run import Run

REVERSED = {"LABEL_0": "weather", "LABEL_1": "food", "LABEL_2": "animal"}
IN_ORDER = {"LABEL_0": "animal", "LABEL_1": "food", "LABEL_2": "weather"}


class Bench:
    """Recipes of one teacher, run in this process."""

    def __init__(self, root, settings):
        self.root, self._settings = root, copy.deepcopy(settings)
        self._settings["training"] |= {"epochs": 4}
        self.runs = {}

    def recipe(self, teacher, phases, *more):
        data = {**self._settings, "teachers": {"sound": teacher}, "phases": phases}
        return loaded(data, self.root, *more)

    def run(self, name, teacher, phases):
        recipe = self.recipe(teacher, phases)
        self.runs[name] = execute(recipe, self.root / name)[LONE_TASK]
        return self.runs[name]

    def models(self, name):
        return dict(evaluation(self.root / name)["models"])

    def mark(self, **teacher):
        """Of the teacher's signals in a cache."""
        old = self.runs["silent"]
        run = Run(self.recipe(teacher, LEARN), old.folder, old.world, old.log, old.data.source)
        return fingerprint(run, run.reference("sound", 0))

    def cache(self, name):
        return CacheReader(self.root / name / "cache" / "00-cache")


KL = {"split": "transfer", "losses": {"kl": {"temperature": 2.0}}, "epochs": 2}
LEARN = [
    {"cache": {"splits": "transfer", "dtype": "float32"}},
    {"distil": {**KL, "teachers": "cached"}},
    {"evaluate": {"split": "test"}},
]
MEASURE = {"expertise": {"split": "validation"}}


@pytest.fixture(scope="module")
def bench(tmp_path_factory, toy_settings):
    """Three runs that differ in the teacher alone: as it was trained (`named`), with its outputs
    reversed and their names taken away (`silent`), and so with the key (`told`)."""
    bench = Bench(tmp_path_factory.mktemp("labels"), toy_settings)
    model = toy_settings["student"]["model"]
    trained = bench.run("teacher", {"model": model}, [{"fine-tune": {"models": "sound"}}])
    named, nameless = trained.folder.model(0, "sound"), bench.root / "nameless"
    shutil.copytree(named, nameless)
    weights = load_file(named / "model.safetensors")
    for part in ("classifier.weight", "classifier.bias"):
        weights[part] = weights[part].flip(0).contiguous()
    save_file(weights, nameless / "model.safetensors", {"format": "pt"})
    names = {f"LABEL_{number}": number for number in range(3)}
    numbers = {str(v): k for k, v in names.items()}
    change(nameless / "config.json", label2id=names, id2label=numbers)
    bench.run("named", {"model": str(named)}, LEARN)
    on_trust = {"model": str(nameless), "below_majority": "warn"}
    bench.run("silent", on_trust, [*LEARN, MEASURE])
    bench.run("told", {"model": str(nameless), "labels": REVERSED}, LEARN)
    return bench


def test_in_the_wrong_order_a_teacher_is_warned_of(bench):
    """That names the order in which it would be right. Without the key nothing else can be done:
    nobody but the user knows what the classes are."""
    teacher, student = (bench.models("silent")[name]["accuracy"] for name in ("sound", "student"))
    assert teacher < 0.4 and student < 0.5, "the class in the middle alone is right"
    found = results(bench.root / "silent")
    [scored] = found["teacher_scores"]
    assert scored["doubt"].startswith("accuracy ") and "%. With its labels" in scored["doubt"]
    order = "teachers.sound.labels to {LABEL_0: weather, LABEL_1: food, LABEL_2: animal}"
    assert order in scored["doubt"]
    assert [record["warnings"] for record in found["phases"][-2:]] == [[], []], "told before"
    assert len(logged(bench.root / "silent", "warning")) == 1
    for sound in ("named", "told"):
        assert results(bench.root / sound)["phases"][-1]["warnings"] == []


def test_in_the_wrong_order_it_is_refused_before_anything_runs(bench, monkeypatch):
    """Told to go on, the same run continues, and scores nothing a second time."""
    control = {"fine-tune": {"models": "student", "save_as": "control", "epochs": 1}}
    teacher = {"model": str(bench.root / "nameless")}
    parts = teacher, [control, *LEARN]
    predict = Mock(wraps=doubts.predictions_of)
    monkeypatch.setattr(doubts, "predictions_of", predict)
    folder = bench.root / "refused"
    with pytest.raises(UserError, match=r"^teachers\.sound: accuracy .* on validation") as caught:
        execute(bench.recipe(*parts), folder)
    said = str(caught.value)
    assert "teachers.sound.labels to {LABEL_0: weather, LABEL_1: food, LABEL_2: animal}" in said
    assert said.endswith("set teachers.sound.below_majority=warn.")
    assert not (folder / "models").exists() and not (folder / "cache").exists()
    with pytest.raises(UserError, match=r"^teachers\.sound: accuracy"):
        execute(bench.recipe(*parts), folder, resume=True)
    execute(bench.recipe(*parts, "teachers.sound.below_majority=warn"), folder, resume=True)
    [call] = predict.call_args_list
    assert [reference.name for reference in call.args[1]] == ["sound"]
    [score] = results(folder)["teacher_scores"]
    assert (score["teacher"], score["split"], score["examples"]) == ("sound", "validation", 60)
    [event] = logged(folder, "teacher-score")
    assert event["score"] == score["score"] < 0.4
    report = (folder / "report.html").read_text()
    assert "Teachers before a student learnt" in report and score["doubt"][:20] in report


def test_with_the_key_it_is_the_teacher_that_it_was(bench):
    """All that comes after its outputs are read: cache, student, evaluation."""
    assert bench.models("told") == bench.models("named")
    assert bench.models("told")["sound"]["accuracy"] > 0.8
    assert losses(bench.root / "told", "student") == losses(bench.root / "named", "student")
    readers = [bench.cache(name) for name in ("named", "told", "silent")]
    rows = np.arange(readers[0].manifest.examples)
    named, told, silent = (reader.read("sound", rows).logits for reader in readers)
    assert torch.equal(told, named)
    assert torch.equal(silent, named.flip(1))


def test_a_cache_is_of_one_order(bench):
    """Whether the key comes or goes; a key that says what would hold without it changes nothing."""
    model = str(bench.root / "nameless")
    silent, told = bench.mark(model=model), bench.mark(model=model, labels=REVERSED)
    assert silent["labels"] == ["animal", "food", "weather"], "as before there was a key"
    assert bench.mark(model=model, labels=IN_ORDER) == silent
    for name, own, other in (("told", told, silent), ("silent", silent, told)):
        bench.cache(name).check("sound", own)
        with pytest.raises(UserError, match="was cached with labels"):
            bench.cache(name).check("sound", other)


def test_a_cache_of_first_tokens_states_is_none_of_a_teacher_that_pools(bench):
    """Caches of before held the first token's state of teachers whose head reads the mean."""
    marks = {}
    for pooling in ("mean", "cls"):
        folder = bench.root / pooling
        shutil.copytree(bench.root / "nameless", folder)
        change(folder / "config.json", classifier_pooling=pooling)
        marks[pooling] = bench.mark(model=str(folder))
    assert marks["mean"]["pooling"] == "mean" and "pooling" not in marks["cls"]
    of_before = bench.mark(model=str(bench.root / "nameless"))
    bench.cache("silent").check("sound", of_before)
    with pytest.raises(UserError, match="pooling"):
        bench.cache("silent").check("sound", {**of_before, "pooling": "mean"})


def test_check_notes_that_an_order_is_taken_on_trust(bench):
    def check(phases, **teacher):
        silent = {"model": str(bench.root / "nameless"), **teacher}
        return "\n".join(check_all(bench.recipe(silent, phases)))

    [note] = [one for one in check(LEARN).splitlines() if one.startswith("teachers.sound")]
    assert "{LABEL_0: animal, LABEL_1: food" in note
    train = [{"fine-tune": {"models": "sound"}}, *LEARN]
    assert "teachers.sound" not in check(LEARN, labels=REVERSED)
    assert "teachers.sound" not in check(train), "it gets the task's own order"
    for phases in (train, [{"distil": {"start": "sound", "losses": {"kl": {}}}}]):
        with pytest.raises(UserError, match=r"teachers\.sound\.labels: phase.*Take `labels` out"):
            check(phases, labels=REVERSED)
    with pytest.raises(UserError, match=r"teachers\.sound.*labels\.LABEL_5=food"):
        check(LEARN, labels={"LABEL_5": "food"})
