"""Recipes: YAML in, a checked Recipe out, and back."""

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs import loaded
from runs import written as write

from ds_distill.cli.options import Given
from ds_distill.errors import UserError
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.text import Dumper, one_line, parse
from ds_distill.recipe.training import Training


@pytest.fixture
def load(tmp_path, toy_settings):
    """Load the toy recipe with other top-level keys and overrides."""

    def load(*overrides, **changes):
        return loaded({**toy_settings, **changes}, tmp_path, *overrides)

    return load


# ------------------------------------------------------------------------------------------ YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("labels: [yes, no, on, off, y, n]", {"labels": ["yes", "no", "on", "off", "y", "n"]}),
        ("[true, True, FALSE]", [True, True, False]),
        ("[1, -2, +3, 010]", [1, -2, 3, 10]),
        ("[1.5, .5, 5., 1e-5, 2.0e-4, -1E3]", [1.5, 0.5, 5.0, 1e-5, 2e-4, -1000.0]),
        ("[1:30, 1_000, 0x1f, 1.2.3]", ["1:30", "1_000", "0x1f", "1.2.3"]),
        ("[.inf, -.Inf, .nan]", [".inf", "-.Inf", ".nan"]),
        ("[2024-01-31, 2024-99-99, =, <<]", ["2024-01-31", "2024-99-99", "=", "<<"]),
        ("", None),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(text, value):
    read = parse(text, "a.yaml").values
    assert read == value
    if isinstance(value, list):
        assert [type(item) for item in read] == [type(item) for item in value]


def test_places_name_the_line():
    places = parse("one: 1\ntwo:\n  three: [a,\n    {four: 4}]\n", "a.yaml").places
    assert places.of(("two", "three")) == "a.yaml:3"
    assert places.of(("two", "three", 1, "four")) == "a.yaml:4"
    assert places.of(("two", "gone", "deeper")) == "a.yaml:2"


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t\x85\u2028"))
TREES = st.recursive(
    SCALARS | TEXTS | st.sampled_from(["yes", "on", "1e5", "010", "null", "~", "=", "0x1", ".5"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=15)
@given(TREES)
def test_what_is_dumped_reads_the_same(tree):
    text = yaml.dump(tree, Dumper=Dumper, allow_unicode=True, width=100)
    assert parse(text, "a.yaml").values == tree


@settings(max_examples=15)
@given(TREES)
@example({"1e5": "on", "two\nlines": ["1e5", "a: b"]})
def test_a_value_on_one_line_reads_the_same(tree):
    """As messages and first recipes show labels: YAML 1.1 would leave 1e5 bare, a number in 1.2."""
    line = one_line(tree)
    assert "\n" not in line and parse(f"a: {line}", "a.yaml").values == {"a": tree}


# --------------------------------------------------------------------------------------- recipes


@settings(max_examples=15)
@given(data=st.data())
def test_a_resolved_recipe_loads_to_itself(data):
    name = data.draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,8}", fullmatch=True), "name")
    labels = data.draw(st.lists(TEXTS, min_size=2, max_size=4, unique=True), "labels")
    body = {
        "losses": {"kl": {"temperature": data.draw(st.floats(0.1, 10), "temperature")}},
        "routing": data.draw(st.sampled_from(["average", ["random", "mt-bert"], []]), "routing")
        or [{"policy": "expertise", "conflict": "best-expert"}],
        "learning_rate": data.draw(st.floats(1e-9, 1), "rate"),
    }
    recipe = Recipe.model_validate(
        {
            "name": name,
            "description": data.draw(TEXTS, "description"),
            "task": {"data": {"path": data.draw(TEXTS, "path")}, "labels": labels},
            "teachers": {name: {"model": data.draw(TEXTS, "model")}},
            "student": {"model": "m", "layers": data.draw(st.none() | st.just([0, 2]), "layers")},
            "training": {"epochs": data.draw(st.integers(1, 99), "epochs")},
            "phases": [{"fine-tune": {"models": name}}, "expertise", {"distil": body}],
        }
    )
    assert Recipe.model_validate(parse(dump_recipe(recipe), "written").values) == recipe


def test_a_key_that_is_gone_may_say_what_every_run_does(load):
    """Recipes of earlier runs have it: `predict`, `export` and `--resume` read them."""
    stops = ["training.not_finite=stop", "phases.distil.not_finite=stop"]
    assert load(*stops) == load()


def test_overrides_reach_everything(load):
    recipe = load(
        "seed=7",
        "task.data.path=else/where",
        "task.labels=[yes, no]",
        "student.layers=[1]",
        "phases.teach-first.epochs=9",
        "phases.distil.losses.kl.temperature=5",
        "phases.4.distil.batch_size=4",
        "phases.distil.routing.0=random",
        "phases.expertise.split=test",
        "teachers.third.model=some/model",
        "logging.wandb=project",
    )
    assert recipe.seed == 7 and recipe.task.data.path == "else/where"
    assert recipe.task.labels == ["yes", "no"] and recipe.student.layers == [1]
    teach, _, expertise, _, distil, _ = recipe.phases
    assert teach.epochs == 9 and expertise.split == "test"
    assert distil.losses["kl"].temperature == 5.0 and distil.batch_size == 4
    assert [routing.policy for routing in distil.routing] == ["random", "expertise"]
    assert list(recipe.teachers) == ["first", "second", "third"]
    assert recipe.logging.wandb == "project"


def test_a_phase_says_steps_or_epochs_in_place_of_training(load):
    def lengths(*overrides):
        recipe = load(*overrides)
        assert Recipe.model_validate(parse(dump_recipe(recipe), "written").values) == recipe
        return [(p.steps, p.epochs) for p in recipe.phases if isinstance(p, Training)]

    both = lengths("training.steps=50", "phases.teach-first.epochs=2", "phases.distil.steps=9")
    assert both == [(None, 2), (50, 6), (9, 6)]
    assert lengths("training.epochs=4", "phases.distil.steps=9")[-1] == (9, 4)


def test_repeated_phases_have_names_of_their_own(load):
    tune = {"fine-tune": {"models": "first"}}
    recipe = load(phases=[tune, tune, {"evaluate": {"name": "fine-tune-2"}}, "evaluate"])
    names = recipe.phase_names()
    assert len(set(names)) == 4 and names[:2] == ["fine-tune", "fine-tune-2"]


def test_a_mistake_in_training_is_told_once(load):
    with pytest.raises(UserError) as refusal:
        load("training.epochs=0")
    [mistake] = map(str, refusal.value.mistakes)
    assert "training.epochs" in mistake


def damaged(data, section):
    """Give one key of a section, or of one in it, another name or value."""
    keys = list(section) if isinstance(section, dict) else list(range(len(section)))
    if not keys:
        return
    key = data.draw(st.sampled_from(keys), "key")
    if isinstance(section[key], dict | list) and data.draw(st.booleans(), "deeper"):
        damaged(data, section[key])
    elif isinstance(section, dict) and data.draw(st.booleans(), "renamed"):
        section[f"{key[:-1]}"] = section.pop(key)
    else:
        section[key] = data.draw(st.sampled_from([None, "x", -1, [], {}, [3], {"x": 1}]), "value")


@settings(max_examples=15)
@given(data=st.data())
def test_whatever_is_wrong_is_told_once_and_as_a_mistake(data, toy_settings, tmp_path_factory):
    written = copy.deepcopy(toy_settings)
    for _ in range(data.draw(st.integers(1, 4), "mistakes")):
        damaged(data, written)
    path = write(written, tmp_path_factory.mktemp("damaged"))
    try:
        assert Given(str(path)).load().location_of("phases").startswith(str(path))
    except UserError as refusal:
        assert len(set(refusal.mistakes)) == len(refusal.mistakes) > 0
        assert all("recipe.yaml" in str(mistake) for mistake in refusal.mistakes)


def test_a_file_wins_over_a_built_in_name(load, tmp_path, monkeypatch):
    load()
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").rename("quickstart")
    assert load_recipe("quickstart").name == "toy"


@pytest.mark.parametrize(
    ("file", "name"),
    [("my.yaml", "my"), ("two words.v2.yml", "two-words-v2"), ("_.yaml", "recipe"), ("ä1.y", "1")],
)
def test_a_recipe_without_a_name_is_called_as_its_file(file, name, toy_settings, tmp_path):
    unnamed = {key: value for key, value in toy_settings.items() if key != "name"}
    (tmp_path / file).write_text(yaml.safe_dump(unnamed))
    recipe = load_recipe(str(tmp_path / file))
    assert recipe.name == name
    assert "\nname: " in "\n" + dump_recipe(recipe), "a run's recipe.yaml says it"
