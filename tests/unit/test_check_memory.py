"""Models beyond the machine's memory are refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel

from ds_distill.check.memory import fewest_parameters, machine_memory, memory_mistakes
from ds_distill.models.configuration import load_config
from ds_distill.planning.models import shipped_configs
from ds_distill.recipe import load_recipe
from ds_distill.recipe.load import validated


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_the_count_is_a_little_too_small(name):
    config = load_config(str(shipped_configs()[name]))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert 0.85 * real < fewest_parameters(config) < real


def configs(recipe):
    models = {"student": recipe.student.model}
    models |= {f"teachers.{name}": teacher.model for name, teacher in recipe.teachers.items()}
    return {where: load_config(str(shipped_configs()[model])) for where, model in models.items()}


def test_a_phase_is_named_with_what_it_takes():
    recipe = load_recipe("large-teachers")
    found = list(memory_mistakes(recipe, configs(recipe), 5_000_000_000))
    assert [mistake.split(":")[0] for mistake in found] == ["phases.teach"]
    # Three teachers of 300 to 430 million parameters at 2 bytes, a student at 16.
    found = list(memory_mistakes(recipe, configs(recipe), 3_000_000_000))
    assert [mistake.split(":")[0] for mistake in found] == ["phases.teach", "phases.distil"]
    assert "this machine has 3.0 GB of memory" in found[1]
    assert "phases.distil.teachers=cached" in found[1] and "=cached" not in found[0]
    cached = load_recipe("large-teachers", ["phases.distil.teachers=cached"])
    found = list(memory_mistakes(cached, configs(cached), 3_000_000_000))
    assert [mistake.split(":")[0] for mistake in found] == ["phases.teach"]
    assert not list(memory_mistakes(recipe, configs(recipe), 64_000_000_000))


def test_a_model_that_a_phase_saved_under_another_name_has_the_size_of_its_start():
    """It was counted as none."""
    starts = {"fine-tune": {"models": "base", "save_as": "again", "name": "again"}}
    first = {"fine-tune": {"models": "bert", "save_as": "base", "name": "first"}}
    model = {"model": "google-bert/bert-base-uncased"}
    recipe = validated(
        "memory",
        {
            "name": "memory",
            "task": {"data": {"path": "data"}},
            "teachers": {"bert": model},
            "student": model,
            "phases": [first, starts],
        },
    )
    found = list(memory_mistakes(recipe, configs(recipe), 1_000_000_000))
    assert [mistake.split(":")[0] for mistake in found] == ["phases.first", "phases.again"]
    assert found[0].split("alone take")[1] == found[1].split("alone take")[1]


def test_the_machine_has_memory():
    assert 1e9 < machine_memory() < 1e14
