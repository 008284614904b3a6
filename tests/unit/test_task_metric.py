"""The key `metric` of a task: how it is written, and what `check` refuses."""

import shutil

import pytest
from kinds import json_lines, jsonl
from runs import loaded

from ds_distill.check.check import check_data, open_sources
from ds_distill.errors import UserError
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.metrics import METRICS, reported_metrics
from ds_distill.recipe.metrics.classes import Accuracy, MicroF1
from ds_distill.recipe.metrics.tokens import Perplexity
from ds_distill.recipe.tasks import metric_of


@pytest.fixture
def load(tmp_path, toy_settings):
    """The toy recipe with other keys of the task, or other phases. Its labels are animal, food,
    weather."""

    def made(phases=None, **keys):
        settings = {**toy_settings, "task": {**toy_settings["task"], **keys}}
        settings |= {} if phases is None else {"phases": phases}
        return loaded(settings, tmp_path)

    return made


def test_a_metric_is_a_name_or_a_section(load, tmp_path):
    assert load().task.metric == Accuracy.Settings()
    assert load(metric="micro_f1").task.metric == load(metric={"name": "micro_f1"}).task.metric
    assert load(type="masked-lm", metric="perplexity").task.metric == Perplexity.Settings()
    recipe = load(metric={"name": "micro_f1", "leave_out": ["food"]})
    assert recipe.task.metric == MicroF1.Settings(leave_out=["food"])
    assert metric_of(recipe.task) is METRICS["classes"]["micro_f1"]
    (tmp_path / "written.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "written.yaml") == recipe


TEACHERS = {"fine-tune": {"models": ["first", "second"], "name": "learn"}}


def test_a_part_of_the_split_on_which_the_metric_has_no_value_is_refused(load, toy_task, tmp_path):
    """All texts of food are of one document, so that they are in one half of the split. The run
    said so after the trainings of the teachers."""
    data = {"path": str(shutil.copytree(toy_task, tmp_path / "data")), "columns": {"group": "doc"}}
    for file in (tmp_path / "data").glob("*.jsonl"):
        rows = json_lines(file)
        for number, row in enumerate(rows):
            row["doc"] = "menu" if row.get("label") == "food" else f"{file.stem} {number % 20}"
        file.write_text(jsonl(rows))
    metric = {"name": "auc", "positive": "food"}
    recipe = load(metric=metric, data=data, phases=[TEACHERS, {"expertise": {}}])
    says = (
        r"metric auc has no value on the part of split 'validation' that (is fitted on|chooses): "
    )
    says += r".*0 of its \d+ are of it\. Add examples to the split, of other groups"
    with pytest.raises(UserError, match=says):
        check_data(recipe, open_sources(recipe))


def test_of_two_labels_the_last_is_meant():
    for name in ("f1", "precision", "recall", "auc"):
        entry = METRICS["classes"][name]
        assert list(entry(entry.Settings(), ["no", "yes"]).label_mistakes()) == []


def test_every_metric_is_whole():
    """Each can be made of its section alone, and is in the table under its name."""
    for over, entries in METRICS.items():
        assert any(over in entry.reported for entry in entries.values()), over
        for name, entry in entries.items():
            assert entry.Settings().model_dump()["name"] == name
            assert next(iter(reported_metrics(over, entry.Settings()))) == name
            entry.shown_as(0.5)


@pytest.mark.parametrize(
    ("name", "over", "difference", "shown"),
    [
        ("accuracy", "classes", 0.1234, "+12.3"),
        ("accuracy", "classes", -0.0004, "+0.0"),
        ("accuracy", "classes", -0.0006, "-0.1"),
        ("perplexity", "masked tokens", -0.004, "+0.00"),
        ("perplexity", "masked tokens", -1.5, "-1.50"),
        ("loss", "masked tokens", 0.25, "+0.250"),
    ],
)
def test_a_difference_as_it_is_shown(name, over, difference, shown):
    assert METRICS[over][name].difference_as(difference) == shown


def test_what_is_better():
    high, low = METRICS["classes"]["accuracy"], METRICS["classes"]["ece"]
    values = {"a": 0.5, "b": 0.7, "c": 0.7, "d": 0.5}
    assert (high.best(values), low.best(values)) == ("b", "a")
    assert high.is_better(0.7, 0.5) and not high.is_better(0.5, 0.5)
    assert low.is_better(0.5, 0.7) and not low.is_better(0.5, 0.5)
    above, below, around = (0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1)
    assert high.better(above) and low.better(below)
    assert high.worse(below) and low.worse(above)
    for at in ([0.1, 0.1], [-0.1, -0.1], [0.1, 0.1 + 1e-15]):  # not known: no resample differs
        for metric in (high, low):
            assert not metric.better(at) and not metric.worse(at) and not metric.too_wide(at, 1.0)
    assert not any(f(around) for f in (high.better, high.worse, low.better, low.worse))
    assert not any(f((0.0, 0.1)) for f in (high.better, low.worse))
