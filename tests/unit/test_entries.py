"""Entries: one makes a part, its needs are checked, and one from outside is as good as ours."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
import yaml
from pydantic import TypeAdapter

from ds_distill.check.needs import phase_mistakes
from ds_distill.data.open_source import open_source
from ds_distill.errors import UserError
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.evaluation.scores import build_metric, build_metrics, model_report
from ds_distill.parts import (
    Candidate,
    Needs,
    PhaseEntry,
    PhaseSettings,
    PolicyEntry,
    Routing,
    SourceEntry,
    TermEntry,
    TermSettings,
)
from ds_distill.phases.distil import router_of
from ds_distill.recipe import dump_recipe, entry_points, load_recipe
from ds_distill.recipe.codecs import CODECS
from ds_distill.recipe.entry import Entry
from ds_distill.recipe.metrics import METRICS, one_metric
from ds_distill.recipe.metrics.metric import CountMetric, MetricSettings
from ds_distill.recipe.policies import POLICIES, Policy, candidates
from ds_distill.recipe.registry import KINDS
from ds_distill.recipe.sources import SOURCES
from ds_distill.recipe.tasks import (
    Data,
    SingleLabel,
)
from ds_distill.recipe.terms import TERMS
from ds_distill.routing import Asked, Target

ENTRIES = [
    (kind, name, entry) for kind in KINDS for table in kind.tables for name, entry in table.items()
]


def test_every_entry_is_whole():
    for kind, name, entry in ENTRIES:
        assert entry.name == name
        if isinstance(entry, Entry):
            assert entry.implementation is None or callable(entry.load()), name
        else:
            assert not entry.__abstractmethods__ and entry.title, name
            assert {*entry.reported} <= {*entry.over}, name
        settings = kind.sections.get(name, getattr(entry, "settings", None))
        if settings is not None:
            assert issubclass(settings, kind.settings) and settings.__doc__, name
            if kind.key:
                assert settings.model_fields[kind.key].default == name


def test_what_an_entry_says_of_a_codec_is_what_the_codec_says():
    for entry in CODECS.values():
        if entry.implementation is not None:
            codec = entry.load()
            assert codec.name == entry.name
            settings = entry.settings()
            assert codec.of(settings, 100).to_json()["codec"] == entry.name


def test_the_documents_name_every_part():
    for page, names in (("routing", POLICIES), ("recipes", TERMS), ("cache", CODECS)):
        text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


# ------------------------------------------------------------------ a policy is its entry alone


class Uniform(Routing):
    """All classes alike, whatever the teachers predict."""

    policy: Literal["uniform"] = "uniform"


def uniform(seen: Asked) -> Target:
    logits = next(iter(seen.teachers.values())).logits.float()
    return Target(torch.zeros_like(logits), torch.ones(len(seen.teachers), len(logits)))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of somebody's, that entries can name."""
    made = ModuleType("somebodys_parts")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.fixture
def uniform_policy(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> PolicyEntry:
    module.uniform = uniform  # type: ignore[attr-defined]
    entry = PolicyEntry(
        name="uniform",
        settings=Uniform,
        implementation="somebodys_parts:uniform",
        candidates=(Candidate("uniform", Uniform(), "nothing"),),
    )
    monkeypatch.setitem(POLICIES, entry.name, entry)
    return entry


def test_a_policy_that_changes_a_lone_teachers_target_is_not_skipped(uniform_policy):
    """Its entry says nothing of lone teachers: what is forgotten must not skip it."""
    settings = TypeAdapter(Policy).validate_python({"policy": "uniform"})
    assert isinstance(settings, Uniform)
    average = POLICIES["average"].candidates[0].settings
    assert router_of(average, 1, temperature=1.0, seed=0, fitted=Path("none")) is None
    assert router_of(Uniform(), 1, temperature=1.0, seed=0, fitted=Path("none")) is not None
    assert "uniform" in candidates()


OneMetric = Annotated[MetricSettings, one_metric("classes")]


class Half(CountMetric[ClassPredictions]):
    """Half of the examples."""

    name = title = "half"
    over = reported = ("classes",)

    def counts(self, predictions: ClassPredictions) -> np.ndarray:
        return np.ones((len(predictions), 1))

    def score(self, sums: np.ndarray) -> np.ndarray:
        return sums[..., 0] / 2


def test_a_metric_is_its_class_alone(monkeypatch):
    monkeypatch.setitem(METRICS["classes"], "half", Half)
    predictions = ClassPredictions(np.eye(3)[:2], np.array([0, 1]))
    metrics = build_metrics("classes", "abc")
    report = model_report(predictions, metrics, "abc")
    assert report["half"] == 1.0 and report["accuracy"] == 1.0
    settings = TypeAdapter(OneMetric).validate_python({"name": "half"})
    assert isinstance(build_metric("classes", settings, "abc"), Half)


def test_a_source_is_its_entry_alone(module, monkeypatch):
    module.opened = lambda task, folder, progress: task.data.path  # type: ignore[attr-defined]
    entry = SourceEntry(
        name="rows",
        implementation="somebodys_parts:opened",
        recognises=lambda path: path.startswith("rows:"),
    )
    monkeypatch.setitem(SOURCES, "rows", entry)
    assert open_source(SingleLabel(data=Data(path="rows:a"))) == "rows:a"
    with pytest.raises(UserError, match="no such file or folder"):
        open_source(SingleLabel(data=Data(path="other:a")))


def test_an_implementation_that_is_not_there_is_the_parts_mistake():
    for where in ("no_such_module:f", "ds_distill.losses:NoTerm", "nothing"):
        entry = TermEntry(name="mine", settings=TermSettings, implementation=where)
        with pytest.raises(UserError, match="part 'mine': its implementation"):
            entry.load()


# ------------------------------------------------------------------------------- what parts need


@pytest.fixture
def mistakes(tmp_path: Path, toy_settings: dict[str, Any]) -> Callable[..., list[str]]:
    """What is wrong with the toy recipe under overrides."""
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_settings, sort_keys=False))
    return lambda *overrides: [*map(str, phase_mistakes(load_recipe(str(path), overrides)))]


@pytest.mark.parametrize(
    ("needs", "override", "says"),
    [
        (Needs(live_teachers=True), [], ["phases.distil.losses.kl: reads", "teachers=live"]),
        (Needs(live_teachers=True), ["phases.distil.teachers=live"], []),
        (Needs(states=(-1, 2)), [], ["losses.kl", "layer(s) -1, 2", "hidden: [-1, 2]"]),
        (Needs(states=(-1, 2)), ["phases.cache.hidden=[2]"], ["layer(s) -1,", "hidden: [-1, 2]"]),
        (Needs(states=(-1, 2)), ["phases.cache.hidden=[2, -1]"], []),
        (Needs(at_most=1), [], ["losses.kl: kl takes at most 1 teacher(s)", "has 2"]),
        (Needs(teachers=3), [], ["losses.kl: kl needs at least 3 teachers", "has 2"]),
        (Needs(teachers=2), [], []),
        (Needs(logits=True), [], []),  # class logits are stored as they are
        (Needs(expertise=True), [], []),
        (
            Needs(classes=True),
            ["task.type=masked-lm"],
            ["losses.kl", "no classes", "Choose cross_entropy, logit_mse"],
        ),
    ],
)
def test_what_a_part_needs_is_checked(needs, override, says, mistakes, monkeypatch):
    monkeypatch.setitem(TERMS, "kl", replace(TERMS["kl"], needs=needs))
    found = [text for text in mistakes(*override) if ".losses.kl" in text]
    assert len(found) == bool(says), found
    assert all(part in found[0] for part in says)


def test_a_rule_of_an_entry_is_asked_with_its_location(mistakes, monkeypatch):
    def rule(settings, context):
        yield f"{context.location}: {settings.temperature} of {sorted(context.models)}"

    monkeypatch.setitem(TERMS, "kl", replace(TERMS["kl"], mistakes=rule))
    names = ["first", "second", "student"]
    assert mistakes() == [f"phases.distil.losses.kl: 2.0 of {names}"]


def test_a_recipe_of_every_policy_loads_again(toy_settings, tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_settings, sort_keys=False))
    recipe = load_recipe(str(path), [f"phases.distil.routing=[{', '.join(POLICIES)}]"])
    path.write_text(dump_recipe(recipe))
    assert load_recipe(str(path)) == recipe


# ----------------------------------------------------------------------------- parts from outside


class Named(PhaseSettings):
    """A phase that does nothing."""

    kind: Literal["named"] = "named"


def half(**facts: Any) -> type[Half]:
    return type("Another", (Half,), facts)


GOOD = PhaseEntry(name="named", settings=Named, implementation="somebodys_parts:f")
KL_AGAIN = TermEntry(name="kl", settings=TermSettings, implementation="a:b")
BAD: dict[str, tuple[Any, list[str]]] = {
    "no entry": ("hello", ["'hello' is no entry", "PhaseEntry", "SourceEntry"]),
    "a name of ours": ([KL_AGAIN], ["'kl' is taken"]),
    "a name with a space": (replace(GOOD, name="a b"), ["phase cannot be called 'a b'"]),
    "a key of records": (half(name="tokens"), ["metric cannot be called 'tokens'"]),
    "over nothing": (half(over=("sums",)), ["over ('sums',)", "masked tokens"]),
    "over a text": (half(over="classes"), ["over 'classes'", "Give a tuple"]),
    "a metric of ours": (half(name="ece", over=("labels", "classes")), ["'ece' is taken"]),
    "half a metric": (CountMetric, ["CountMetric has no name, no over, no title, no counts"]),
    "other settings": (replace(GOOD, settings=TermSettings), ["TermSettings", "no PhaseSettings"]),
    "a policy of states": (
        PolicyEntry(name="p", settings=Uniform, implementation="a:b", needs=Needs(states=(-1,))),
        ["needs states=(-1,)", "fitted_states alone"],
    ),
    "a candidate of another name": (
        PolicyEntry(
            name="uniform",
            settings=Uniform,
            implementation="a:b",
            candidates=(Candidate("average", Uniform(), "ours"),),
        ),
        ["a candidate of 'uniform' is called 'average'"],
    ),
    "another kind": (replace(GOOD, name="n"), ['kind: Literal["n"] = "n"', "Named"]),
}


def installed(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("parts", value, entry_points.GROUP)
    vars(point)["dist"] = SimpleNamespace(name="somebodys-package")
    monkeypatch.setattr(entry_points, "entry_points", lambda group: [point])


@pytest.mark.parametrize("case", BAD)
def test_a_bad_entry_is_refused_with_its_package(case, module, monkeypatch):
    module.ENTRIES, says = BAD[case]  # type: ignore[attr-defined]
    installed(monkeypatch, "somebodys_parts:ENTRIES")
    before = [dict(kind.table) for kind in KINDS]
    with pytest.raises(UserError) as refusal:
        entry_points.load_entry_points.__wrapped__()
    text = str(refusal.value)
    for part in ("package 'somebodys-package', entry point 'parts'", "pip uninstall", *says):
        assert part in text, text
    assert [dict(kind.table) for kind in KINDS] == before


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    installed(monkeypatch, "no_such_module:ENTRIES")
    with pytest.raises(UserError, match=r"s-package'.* cannot be imported: ModuleNotFound"):
        entry_points.load_entry_points.__wrapped__()


def test_a_metric_over_several_things_is_added_to_each(module, monkeypatch):
    third = half(name="third", over=("classes", "labels"))
    module.ENTRIES = [third, GOOD]  # type: ignore[attr-defined]
    installed(monkeypatch, "somebodys_parts:ENTRIES")
    try:
        entry_points.load_entry_points.__wrapped__()
        assert KINDS[0].table["named"] is GOOD
        assert [over for over in METRICS if "third" in METRICS[over]] == ["classes", "labels"]
    finally:
        KINDS[0].table.pop("named", None)
        for over in METRICS:
            METRICS[over].pop("third", None)
