"""What the expertise phase and `route` read: a cache of the teachers as they are, or the teachers;
nothing of which a teacher says nothing."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
from kinds import json_lines, write
from runs import loaded, results
from toys import make_toy_classifier, write_toy_task

from ds_distill.data.batches import Units
from ds_distill.data.open_source import open_source
from ds_distill.errors import UserError
from ds_distill.phases.expertise import _texts, route
from ds_distill.recipe.tasks import SingleLabel
from ds_distill.run.execute import execute

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module")
def settings(toy_settings, tmp_path_factory):
    """The toy recipe with two teachers of random weights, and no phases."""
    made = copy.deepcopy(toy_settings)
    here = tmp_path_factory.mktemp("expertise")
    sizes = {"train": 60, "validation": 120, "test": 30, "transfer": 60}
    made["task"]["data"]["path"] = str(write_toy_task(here / "data", sizes))
    teacher = {"model": str(make_toy_classifier(here / "model")), "below_majority": "warn"}
    made["teachers"] = {"first": teacher, "second": dict(teacher)}
    made["training"]["epochs"] = 1
    return made


def test_teachers_that_were_trained_since_their_cache_run_again(settings, tmp_path):
    """As `check` has it. The run ended there, with the advice to build a cache that a resumed run
    does not build again. A layer that is named twice is cached once, and read."""
    reads = {"split": "transfer", "losses": {"kl": {}}}
    phases = [
        {"cache": {"splits": ["validation", "transfer"], "hidden": [-1, -1]}},
        {"distil": {"name": "one", "teachers": "cached", **reads, "save_as": "one"}},
        {"fine-tune": {"models": "first"}},
        {"expertise": {}},
        {"distil": {"name": "two", "teachers": "live", "routing": "gate", **reads}},
    ]
    execute(loaded({**settings, "phases": phases}, tmp_path), tmp_path / "run")
    expertise = results(tmp_path / "run")["phases"][3]
    assert expertise["kind"] == "expertise" and expertise["teachers"] == ["first", "second"]


def test_route_compares_nothing_of_which_a_teacher_says_nothing(settings, tmp_path):
    """Its silence was taken for the first class, and all scores were wrong."""
    data = Path(settings["task"]["data"]["path"])
    rows = json_lines(data / "validation.jsonl")
    said = [{"text": row["text"], "predicted": row["label"]} for row in rows[::2]]
    llm = {"predictions": str(write(tmp_path / "said.jsonl", said))}
    made = {**settings, "teachers": {"first": settings["teachers"]["first"], "llm": llm}}
    recipe = loaded({**made, "phases": [{"cache": {"splits": ["validation"]}}]}, tmp_path)
    execute(recipe, tmp_path / "run")
    lacks = len(rows) - len({row["text"] for row in said} & {row["text"] for row in rows})
    says = rf"teachers\.llm\.predictions: says nothing of {lacks} of the {len(rows)} examples of"
    with pytest.raises(UserError, match=says):
        route(recipe, tmp_path / "run")


def test_both_texts_of_a_pair_are_those_of_the_example(tmp_path):
    """Also where a split has examples twice: the second texts were those of another one."""
    pairs = [(f"first {n % 7}", f"second {n % 7}") for n in range(20)]
    rows = [{"text_a": a, "text_b": b, "label": "x"} for a, b in pairs]
    write(tmp_path / "data" / "validation.jsonl", rows)
    task = SingleLabel.model_validate(
        {"data": {"path": str(tmp_path / "data")}, "labels": ["x", "y"]}
    )
    data = open_source(task, tmp_path / "cache").read("validation")
    examples = Units.of(data)
    run = SimpleNamespace(data=SimpleNamespace(table=lambda split: data))
    shown = [SimpleNamespace(row=row) for row in range(20)]
    found = _texts("validation", run, shown, examples)
    assert found == [f"{first}\n{second}" for first, second in pairs]
