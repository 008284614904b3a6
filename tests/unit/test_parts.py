"""Parts: a class makes one, its needs are checked, and one from outside is as good as ours."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from runs import loaded, written

from ds_distill.check.phases import phase_mistakes
from ds_distill.data.open_source import open_source
from ds_distill.errors import Mistake, UserError
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.evaluation.scores import build_metric, build_metrics, model_report
from ds_distill.parts import Compared, DataSource, Needs, Routing
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.codecs import CODECS
from ds_distill.recipe.data import SOURCES
from ds_distill.recipe.metrics import METRICS, one_metric
from ds_distill.recipe.metrics.metric import CountMetric, MetricSettings
from ds_distill.recipe.phases import PHASES
from ds_distill.recipe.policies import POLICIES, Policy, candidates
from ds_distill.recipe.tasks import TASKS, Data, SingleLabel
from ds_distill.recipe.terms import TERMS
from ds_distill.routing import Target

TABLES = {
    "phase": PHASES,
    "term": TERMS,
    "policy": POLICIES,
    "codec": CODECS,
    "source": SOURCES,
    "task": TASKS,
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_part_is_whole(kind):
    for name, part in TABLES[kind].items():
        assert part.part_name == name and part.kind_of_part == kind
        assert part.runs is None or callable(part.load()), name
        assert kind == "source" or part.__doc__, name


def test_every_metric_is_whole():
    for metric in (metric for table in METRICS.values() for metric in table.values()):
        assert not metric.__abstractmethods__ and metric.title and metric.Settings.__doc__
        assert {*metric.reported} <= {*metric.over}, metric


def test_what_settings_say_of_a_codec_is_what_the_codec_says():
    for name, settings in CODECS.items():
        if settings.runs is not None:
            codec = settings.load()
            assert codec.name == name
            assert codec.of(settings(), 100).to_json()["codec"] == name


def test_the_documents_name_every_part():
    for page, names in (("routing", POLICIES), ("recipes", TERMS), ("cache", CODECS)):
        text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


# ------------------------------------------------------------------- a part is its class alone


def uniform(seen):
    logits = next(iter(seen.teachers.values())).logits.float()
    return Target(torch.zeros_like(logits), torch.ones(len(seen.teachers), len(logits)))


@pytest.fixture
def module(monkeypatch):
    """A module of somebody's, that parts can name."""
    made = ModuleType("somebodys_parts")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_policy_that_changes_a_lone_teachers_target_is_not_skipped(module, parts_as_before):
    """Its class says nothing of lone teachers: what is forgotten must not skip it."""
    module.uniform = uniform

    class Uniform(Routing):
        """All classes alike, whatever the teachers predict."""

        runs, compared = "somebodys_parts:uniform", (Compared("uniform", "nothing"),)

        policy: Literal["uniform"] = "uniform"

    settings = TypeAdapter(Policy).validate_python({"policy": "uniform"})
    assert isinstance(settings, Uniform)
    assert candidates()["average"].settings.keeps_lone_teacher
    assert not Uniform().keeps_lone_teacher, "a policy of one's own says what to make of one"
    assert "uniform" in candidates()


OneMetric = Annotated[MetricSettings, one_metric("classes")]


def test_a_metric_is_its_class_alone(parts_as_before):
    class Half(CountMetric[ClassPredictions]):
        """Half of the examples."""

        name = title = "half"
        over = reported = ("classes",)

        def counts(self, predictions):
            return np.ones((len(predictions), 1))

        def score(self, sums):
            return sums[..., 0] / 2

    predictions = ClassPredictions(np.eye(3)[:2], np.array([0, 1]))
    metrics = build_metrics("classes", "abc")
    report = model_report(predictions, metrics, "abc")
    assert report["half"] == 1.0 and report["accuracy"] == 1.0
    settings = TypeAdapter(OneMetric).validate_python({"name": "half"})
    assert isinstance(build_metric("classes", settings, "abc"), Half)


def test_a_source_is_its_class_alone(module, parts_as_before):
    module.opened = lambda task, folder, progress: task.data.path

    class Rows(DataSource):
        part_name, runs = "rows", "somebodys_parts:opened"

        @classmethod
        def recognises(cls, path):
            return path.startswith("rows:")

    assert open_source(SingleLabel(data=Data(path="rows:a"))) == "rows:a"
    with pytest.raises(UserError, match="no such file or folder"):
        open_source(SingleLabel(data=Data(path="other:a")))


def test_what_a_part_runs_that_is_not_there_is_the_parts_mistake(monkeypatch):
    for where in ("no_such_module:f", "ds_distill.losses:NoTerm", "nothing"):
        monkeypatch.setattr(TERMS["kl"], "runs", where)
        with pytest.raises(UserError, match="part 'kl': what it runs"):
            TERMS["kl"].load()


# ------------------------------------------------------------------------------- what parts need


@pytest.fixture
def mistakes(tmp_path, toy_settings):
    """What is wrong with the toy recipe under overrides."""
    return lambda *more: [*map(str, phase_mistakes(loaded(toy_settings, tmp_path, *more)))]


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
    monkeypatch.setattr(TERMS["kl"], "needs", needs)
    found = [text for text in mistakes(*override) if ".losses.kl" in text]
    assert len(found) == bool(says), found
    assert all(part in found[0] for part in says)


def test_a_rule_of_a_part_is_asked_with_its_location(mistakes, monkeypatch):
    def rule(self, context):
        yield Mistake(context.location, f"{self.temperature} of {sorted(context.models)}")

    monkeypatch.setattr(TERMS["kl"], "mistakes", rule)
    names = ["first", "second", "student"]
    assert mistakes() == [f"phases.distil.losses.kl: 2.0 of {names}"]


def test_a_recipe_of_every_policy_loads_again(toy_settings, tmp_path):
    routing = f"phases.distil.routing=[{', '.join(POLICIES)}]"
    recipe = loaded(toy_settings, tmp_path, routing)
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe


# ----------------------------------------------------------------------------- parts from outside

PACKAGE = """
from typing import Literal
from ds_distill.parts import CountMetric, DataSource, PhaseSettings, Routing, TermSettings
"""
BAD = {
    "a name of ours": ("class A(TermSettings):\n    term = 'kl'", ["the term 'kl' is there"]),
    "a name with a space": (
        "class A(PhaseSettings):\n    kind: Literal['a b'] = 'a b'",
        ["the phase 'a b' is there, or no name"],
    ),
    "a key of records": (
        "class A(CountMetric):\n    name, over = 'tokens', ('classes',)",
        ["'tokens' is another metric, or another value of records"],
    ),
    "a metric of ours": (
        "class A(CountMetric):\n    name, over = 'ece', ('labels', 'classes')",
        ["'ece' is another metric"],
    ),
    "nothing that runs": ("1 / 0", ["ZeroDivisionError"]),
}


@pytest.fixture
def package(tmp_path, monkeypatch, parts_as_before):
    """Writes a module, and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code):
        name = f"parts_{len(list(tmp_path.glob('parts_*')))}_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(PACKAGE + code, encoding="utf-8")
        return name

    return write


@pytest.mark.parametrize("case", BAD)
def test_a_bad_part_is_refused_with_its_line(case, package, tmp_path, toy_settings):
    code, says = BAD[case]
    path = written({"import": [package(code)], **toy_settings}, tmp_path)
    with pytest.raises(UserError) as refusal:
        load_recipe(path)
    for part in (f"{path}:2  import.0: cannot be imported: ", *says):
        assert part in str(refusal.value)


def test_a_recipe_brings_its_packages_parts(package, tmp_path, toy_settings):
    """Also where it is read from what a run has written."""
    code = (
        "class A(Routing):\n    policy: Literal['mine'] = 'mine'\n    power: int = 1\n"
        "class B(TermSettings):\n    term = 'my_term'\n"
        "class C(CountMetric):\n    name, over = 'third', ('classes', 'labels')\n"
        "class D(DataSource):\n    part_name = 'rows'\n"
    )
    name = package(code)
    given = [f"import=[{name}]", "phases.distil.routing={policy: mine, power: 3}"]
    given += ["phases.distil.losses={my_term: {weight: 2}}"]
    recipe = loaded(toy_settings, tmp_path, *given)
    text = dump_recipe(recipe)
    assert f"import:\n- {name}" in text and "power: 3" in text
    (tmp_path / "again.yaml").write_text(text)
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert [over for over in METRICS if "third" in METRICS[over]] == ["classes", "labels"]
    assert "rows" in SOURCES
