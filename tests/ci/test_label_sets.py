"""Two teachers that know two of the three classes each, from the recipe to the student."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from runs import losses

from ds_distill.cache.reader import CacheReader
from ds_distill.check.check import check_all
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.files import read_json
from ds_distill.keys import content_keys
from ds_distill.phases.expertise import route
from ds_distill.recipe import load_recipe
from ds_distill.reporting.result_tables import evaluation_tables, verdict
from ds_distill.run.execute import execute

FIRST = {"animal": "animal", "food": "food", "weather": None}
SECOND = {"2": "weather", "1": "food"}
HOW = {"split": "transfer", "epochs": 6, "losses": {"kl": {"temperature": 2.0}}}
MIXED = {"policy": "average", "mix": "losses"}
LEARN: list[Any] = [
    {"cache": {"splits": ["validation", "transfer"], "hidden": [-1], "dtype": "float32"}},
    {"expertise": {"split": "validation"}},
    {"distil": {**HOW, "teachers": "cached", "routing": ["gate", MIXED, "chosen"]}},
    {"distil": {**HOW, "teachers": "live", "routing": MIXED, "save_as": "live"}},
    {"evaluate": {"split": "test"}},
]


@dataclass(frozen=True)
class Bench:
    root: Path
    settings: dict[str, Any]

    def recipe(self, name: str, maps: dict[str, Any], phases: list[Any]) -> Path:
        model = str(self.root / "teacher" / "models" / "00-sound")
        teachers = {key: {"model": model, "labels": labels} for key, labels in maps.items()}
        path = self.root / f"{name}.yaml"
        data = {**self.settings, "teachers": teachers, "phases": phases}
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path


@pytest.fixture(scope="module")
def bench(
    tmp_path_factory: pytest.TempPathFactory, toy_settings: dict[str, Any]
) -> Iterator[Bench]:
    before = dict(os.environ)
    settings = copy.deepcopy(toy_settings)
    settings["training"] |= {"epochs": 4}
    bench = Bench(tmp_path_factory.mktemp("sets"), settings)
    path = bench.root / "teacher.yaml"
    teacher = {"sound": {"model": settings["student"]["model"]}}
    phases = [{"fine-tune": {"models": "sound"}}]
    path.write_text(yaml.safe_dump({**settings, "teachers": teacher, "phases": phases}))
    execute(load_recipe(str(path)), bench.root / "teacher")
    yield bench
    World.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def run(bench: Bench) -> Path:
    recipe = load_recipe(str(bench.recipe("run", {"first": FIRST, "second": SECOND}, LEARN)))
    execute(recipe, bench.root / "run")
    return bench.root / "run"


def test_the_cache_has_a_column_for_each_known_class(run: Path, toy_task: Path) -> None:
    reader = CacheReader(run / "cache" / "00-cache")
    lines = (toy_task / "transfer.jsonl").read_text().splitlines()
    rows = reader.indices(content_keys([json.loads(line)["text"] for line in lines]))
    for name, known in (("first", [0, 1]), ("second", [1, 2])):
        signals = reader.read(name, rows)
        assert signals.logits.shape[1] == 2
        assert signals.classes is not None and signals.classes.tolist() == known
    first, second = (reader.read(name, rows).logits for name in ("first", "second"))
    torch.testing.assert_close(first[:, 1], second[:, 0])  # of the same checkpoint


def test_cached_teachers_give_the_losses_of_live_ones(run: Path) -> None:
    cached, live = losses(run, "average"), losses(run, "live")
    assert cached == pytest.approx(live, rel=1e-4) and len(live) > 2


def test_the_comparison_has_what_can_be_trained(run: Path) -> None:
    comparison = read_json(run / "routing.json")
    assert set(comparison["policies"]) == {"average, losses", "gate"}
    assert comparison["baseline"] == "average, losses"
    chosen = {"gate": "gate", "average, losses": "average"}[comparison["choice"]]
    assert losses(run, "chosen") == losses(run, chosen)
    assert "average, losses" in (run / "report.html").read_text()


def test_route_judges_teachers_on_all_classes(
    bench: Bench, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is best at the class that the other lacks, so both stay."""
    recipe = load_recipe(bench.root / "run.yaml", ["phases.expertise.leave_out=unqualified"])
    comparison = route(recipe, run)
    assert set(comparison.teachers) == {"first", "second"}
    assert "Left out" not in capsys.readouterr().out


def test_a_teacher_is_never_right_on_a_class_that_it_lacks(run: Path) -> None:
    models = read_json(run / "results.json")["phases"][-1]["models"]
    assert models["first"]["per_class"]["weather"] == 0.0
    assert models["second"]["per_class"]["animal"] == 0.0
    assert np.array(models["first"]["confusion"])[:, 2].sum() == 0
    assert models["first"]["per_class"]["animal"] > 0.8
    alone = max(models[name]["accuracy"] for name in ("first", "second"))
    assert models["gate"]["accuracy"] > alone
    assert read_json(run / "results.json")["phases"][-1]["warnings"] == []


def test_wherever_its_score_stands_it_says_how_many_labels_a_teacher_knows(run: Path) -> None:
    results = read_json(run / "results.json")
    record = results["phases"][-1]
    assert record["models"]["second"]["knows"] == {"labels": ["food", "weather"], "of": 3}
    assert "knows" not in record["models"]["gate"]
    of_first = record["models"]["first"]["accuracy"]
    limit = "(knows 2 of 3 labels)"
    assert f"`first` ({of_first:.1%}; knows 2 of 3 labels)" in verdict(results)
    [table, *_] = evaluation_tables(record)
    assert [row[0] for row in table.rows[:2]] == [f"first {limit}", f"second {limit}"]
    card = (run / "student" / "README.md").read_text()
    assert f"| second {limit} | teacher |" in card
    report = (run / "report.html").read_text()
    assert report.count(f">first {limit}</td>") == 2, "also before a student learnt from it"
    assert "first knows animal, food: its score counts examples of all 3 labels." in report


def test_a_cache_of_another_mapping_is_refused(bench: Bench, run: Path) -> None:
    maps = {"first": {**FIRST, "weather": "food"}, "second": SECOND}
    cache = {**LEARN[0]["cache"], "folder": str(run / "cache" / "00-cache")}
    recipe = load_recipe(str(bench.recipe("other", maps, [{"cache": cache}])))
    with pytest.raises(UserError, match="was cached with labels"):
        execute(recipe, bench.root / "other")


def test_check_refuses_what_would_mix_unlike_distributions(bench: Bench) -> None:
    maps = {"first": FIRST, "second": SECOND}
    phases = [*LEARN[:2], {"distil": {**HOW, "teachers": "cached", "routing": ["average", "best"]}}]
    with pytest.raises(UserError) as caught:
        check_all(load_recipe(str(bench.recipe("mixed", maps, phases))))
    message = str(caught.value)
    assert "2 mistakes" in message
    for part in (
        "distil.routing: average takes",
        "best takes",
        "first, second",
        "gate",
        "average with mix: losses",
        "random with mix: losses",
    ):
        assert part in message


def test_check_names_a_label_that_no_teacher_knows(bench: Bench) -> None:
    maps = {"first": FIRST, "second": {"animal": "animal", "food": "food"}}
    with pytest.raises(UserError, match=r"task\.labels: no teacher knows weather\. "):
        check_all(load_recipe(str(bench.recipe("unknown", maps, LEARN))))


def test_check_notes_who_knows_what_and_what_a_loss_leaves_open(bench: Bench) -> None:
    """Teachers that share a label are compared by way of it."""
    sharing = check_all(load_recipe(str(bench.recipe("s", {"a": FIRST, "b": SECOND}, LEARN))))
    text = "\n".join(sharing)
    assert "teachers.a.labels: knows 2 of the 3 labels (animal, food)" in text
    assert "leaves open" not in text
