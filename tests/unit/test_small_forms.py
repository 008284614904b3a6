"""Small forms: an overlay beside a recipe, laid over it by --small."""

import copy
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import command_line

from ds_distill.errors import UserError
from ds_distill.recipe import builtin_recipes, load_recipe, small_form
from ds_distill.recipe.text import parse

SMALL = [name for name, path in builtin_recipes().items() if small_form(path).is_file()]


@pytest.fixture
def overlay(toy_recipe):
    """Write the small form of the toy recipe, and load the two together."""

    def load(text, *overrides):
        path = small_form(toy_recipe)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return load_recipe(toy_recipe, overrides, small=True)

    return load


def test_what_the_overlay_names_changes_and_nothing_else(overlay, toy_recipe):
    small = overlay(
        "task: {max_length: 16}\n"
        "training: {epochs: 1, warmup: 0.5}\n"
        "phases:\n"
        "  distil: {routing: average, losses: {kl: {temperature: 4.0}, logit_mse: {}}}\n"
        "  teach-first: {focus: {share_of_others: 0.5}}\n"
    )
    written = [
        "name=toy-small",
        "task.max_length=16",
        "training.epochs=1",
        "training.warmup=0.5",
        "phases.distil.routing=average",
        "phases.distil.losses.kl.temperature=4.0",
        "phases.distil.losses.logit_mse={}",
        "phases.teach-first.focus.share_of_others=0.5",
    ]
    assert small == load_recipe(toy_recipe, written)
    assert small != load_recipe(toy_recipe, ["name=toy-small"])


def test_null_removes_a_key_and_a_phase(overlay, toy_recipe):
    small = overlay(
        "training: {epochs: null}\n"
        "phases: {teach-first: {focus: null}, expertise: null, distil: {routing: average}}\n"
    )
    whole = load_recipe(toy_recipe)
    kinds = [phase.kind for phase in whole.phases]
    kinds.remove("expertise")
    assert [phase.kind for phase in small.phases] == kinds
    assert small.phases[0].focus is None and whole.phases[0].focus is not None
    assert small.training.epochs == type(whole.training)().epochs != whole.training.epochs


def test_overrides_go_over_the_small_form(overlay):
    assert overlay("seed: 5").seed == 5
    assert overlay("seed: 5", "seed=6").seed == 6
    assert overlay("name: tiny").name == "tiny"
    assert overlay("seed: 5").name == "toy-small", "its run is not in the whole recipe's folder"


def test_a_mistake_of_the_recipe_keeps_its_own_line(overlay, toy_recipe, toy_settings):
    changed = copy.deepcopy(toy_settings)
    changed["phases"][3]["cache"]["split"] = "train"
    text = yaml.safe_dump(changed, sort_keys=False)
    toy_recipe.write_text(text)
    [line] = [n for n, words in enumerate(text.splitlines(), 1) if words.strip() == "split: train"]
    with pytest.raises(UserError, match=rf"^{re.escape(str(toy_recipe))}:{line}  phases\.2\.cache"):
        overlay("phases: {teach-second: null}")


def test_a_recipe_without_a_small_form_says_what_to_do(toy_recipe):
    with pytest.raises(UserError) as failure:
        load_recipe(toy_recipe, small=True)
    message = str(failure.value)
    assert str(small_form(toy_recipe)) in message
    assert all(name in message for name in SMALL)


# --------------------------------------------------------------------------------- properties

VALUES = st.one_of(st.integers(), st.text("ab", max_size=2), st.lists(st.integers(), max_size=2))
SECTIONS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
    lambda deeper: st.dictionaries(st.sampled_from("abc"), deeper | VALUES, max_size=3),
    max_leaves=8,
)


def merged(base, changes):
    """A JSON merge patch without null (RFC 7386)."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}


def keys_of(value, at=()):
    """Every key of a section, and of those in it."""
    items = value.items() if isinstance(value, dict) else []
    return [key for name, v in items for key in [(*at, name), *keys_of(v, (*at, name))]]


@settings(max_examples=15)
@given(SECTIONS, SECTIONS)
def test_sections_merge_key_by_key(base, changes):
    text = parse(yaml.safe_dump(base), "base")
    text.lay_over(parse(yaml.safe_dump(changes), "over"))
    assert text.values == merged(base, changes)
    for key in keys_of(text.values):
        # A key that both have keeps the recipe's line where the overlay only looks into it.
        source = text.places[key].partition(":")[0]
        assert source == "over" if key not in keys_of(base) else source in ("base", "over")


# --------------------------------------------------------------------------------- commands


def test_commands_that_take_a_recipe_take_small(overlay, toy_recipe):
    overlay("phases: {expertise: null, distil: {routing: average}}")
    done = command_line("check", toy_recipe, "--small")
    assert "5 phases: teach-first, teach-second, cache, distil, evaluate." in done.output
    for command in (["run"], ["check"], ["launch"], ["route"], ["cache", "build"]):
        assert "--small" in command_line(*command, "--help").output, command


def test_ranks_read_the_same_small_form(overlay, toy_recipe, monkeypatch, tmp_path):
    read = []
    for command in ("commands.launch_ranks", "cache.launch"):
        monkeypatch.setattr(f"ds_distill.cli.{command}", lambda work, _: read.append(work.recipe))
    overlay("seed: 5")
    folder = tmp_path / "run"
    options = [toy_recipe, "seed=6", "--small", "--num-gpus", "2", "--folder", folder]
    for command in (["launch"], ["cache", "build"]):
        command_line(*command, *options)
    assert read == [load_recipe(toy_recipe, ["seed=6"], small=True)] * 2
