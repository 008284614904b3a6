"""The values of the papers and of their authors' code, in the recipes and suites that ship."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from ds_distill.recipe import Recipe, load_recipe
from ds_distill.tasks.labelled import TokenClassificationKind, word_token_rows

CONFIGS = Path(__file__).parents[2] / "ds_configs"
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_values.yaml").read_text())
ROWS = [(name, key, *row) for name, rows in PUBLISHED.items() for key, row in rows.items()]


@pytest.fixture(scope="module")
def loaded():
    found = {}
    for name in PUBLISHED:
        reference, *overrides = shlex.split(name)
        if reference.startswith("suites/"):
            reference = str(CONFIGS / reference)
        found[name] = load_recipe(reference, overrides)
    return found


@pytest.mark.parametrize(("name", "key", "value", "source"), ROWS)
def test_a_value_is_as_published(name, key, value, source, loaded):
    found = at(loaded[name], key)
    if isinstance(found, Mapping) and isinstance(value, list):
        found = sorted(found)  # the names of the terms of a loss
    assert found == value, f"{source} has {value}"


@pytest.mark.xfail(
    strict=True,
    reason="An evaluation has one row for each word: scores of pieces wait for rows of pieces.",
)
def test_entities_are_scored_by_their_pieces(loaded):
    """As ner.py does: what is predicted and scored are the rows that are trained on."""
    task = loaded["suites/compact-biomedical/entities/bc2gm.yaml"].task
    kind = TokenClassificationKind(task, ["O", "B-GENE", "I-GENE"])
    assert kind.label_rows(pytest.fail) is word_token_rows
    assert kind.rows(pytest.fail, False) is word_token_rows


def at(section, key):
    """The value at a recipe's key."""
    for part in key.split("."):
        if part == "phases" and isinstance(section, Recipe):
            section = dict(section.named_phases())
        elif isinstance(section, Mapping):
            section = section[part]
        else:
            fields = type(section).model_fields.items()
            section = getattr(section, {f.alias: name for name, f in fields}.get(part, part))
    return section
