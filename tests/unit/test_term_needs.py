"""What terms on hidden states need of the models and of a cache: `check` finds it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from toys import make_tiny_bert, toy_vocabulary

from ds_distill.check.models import Models
from ds_distill.check.needs import phase_mistakes
from ds_distill.recipe import Recipe, load_recipe


def recipe(folder: Path, widths: dict[str, int], *phases: dict[str, Any]) -> Recipe:
    models = {
        name: {"model": str(make_tiny_bert(folder / name, toy_vocabulary(), hidden_size=width))}
        for name, width in widths.items()
    }
    content = {
        "task": {"type": "single-label", "data": {"path": "data"}, "labels": ["a", "b"]},
        "student": models.pop("student"),
        "teachers": models,
        "phases": list(phases),
    }
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    return load_recipe(folder / "toy.yaml")


def test_cosine_needs_models_of_one_width(tmp_path: Path) -> None:
    distil = {"distil": {"losses": {"cosine": {}, "activation_boundary": {}}}}
    assert (
        Models(recipe(tmp_path, {"big": 32, "student": 32}, distil), on_gpu=False).mistakes() == []
    )
    (tmp_path / "other").mkdir()
    unlike = recipe(tmp_path / "other", {"big": 64, "student": 32}, distil)
    [message] = Models(unlike, on_gpu=False).mistakes()
    assert message.startswith("phases.distil.losses.cosine: cosine compares hidden states one to")
    assert "teachers.big are 64 wide and the student's 32" in message


def test_states_come_from_a_cache_that_holds_them(tmp_path: Path) -> None:
    for name in ("cosine", "activation_boundary"):
        distil = {"distil": {"teachers": "cached", "losses": {name: {}}}}
        for hidden, mistakes in (([-1], 0), ([], 1)):
            folder = tmp_path / f"{name}{mistakes}"
            folder.mkdir()
            cache = {"cache": {"splits": "train", "hidden": hidden}}
            found = list(phase_mistakes(recipe(folder, {"big": 32, "student": 32}, cache, distil)))
            assert len(found) == mistakes
        assert f"phases.distil.losses.{name}: needs the teachers' hidden states" in found[0]
        assert "hidden: [-1]" in found[0]


def mistakes(folder: Path, layers: Any, **phase: Any) -> list[str]:
    folder.mkdir()
    cache = {"cache": {"splits": "train", "hidden": [1, -1]}}
    distil = {"distil": {**phase, "losses": {"hidden_mse": {"layers": layers}}}}
    written = recipe(folder, {"t": 32, "student": 32}, cache, distil)
    return [*Models(written, on_gpu=False).mistakes(), *phase_mistakes(written)]


def test_check_finds_layers_that_are_not_there(tmp_path: Path) -> None:
    depth = 2  # of the toy models
    for number, layers in enumerate(["last", "uniform", "every", {1: 1, depth: depth}]):
        assert mistakes(tmp_path / f"good{number}", layers) == []
    [message] = mistakes(tmp_path / "deep", {1: depth + 1})
    assert message.startswith("phases.distil.losses.hidden_mse.layers={1: 3}: with teachers.t, the")
    assert "has 2 layers and the teacher 2" in message


def test_check_finds_layers_that_no_cache_holds(tmp_path: Path) -> None:
    cached = {"teachers": "cached"}
    assert mistakes(tmp_path / "held", {1: 1, 2: 1}, **cached) == []
    assert mistakes(tmp_path / "last", "last", **cached) == []
    [missing] = mistakes(tmp_path / "missing", {1: 2}, **cached)
    assert "needs the teachers' hidden states of layer(s) 2" in missing
    [named] = mistakes(tmp_path / "named", "uniform", **cached)
    assert "Name pairs" in named and "teachers=live" in named
