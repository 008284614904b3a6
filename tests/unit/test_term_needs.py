"""What terms on hidden states need of the models and of a cache: `check` finds it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from toys import make_tiny_bert, toy_vocabulary

from ds_distill.check.models import Models
from ds_distill.check.phases import phase_mistakes
from ds_distill.errors import UserError
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


def test_terms_on_states_take_models_of_unlike_widths(tmp_path: Path) -> None:
    distil = {"distil": {"losses": {"cosine": {}, "activation_boundary": {}}}}
    for width in (32, 64):
        (folder := tmp_path / str(width)).mkdir()
        of_width = recipe(folder, {"big": width, "student": 32}, distil)
        assert Models(of_width, on_gpu=False).mistakes() == []


def test_without_a_map_states_are_of_one_width(tmp_path: Path) -> None:
    found = {}
    for width in (32, 64):
        (folder := tmp_path / str(width)).mkdir()
        distil = {"distil": {"losses": {"hidden_mse": {"map": False}}}}
        of_width = recipe(folder, {"big": width, "student": 32}, distil)
        found[width] = [*map(str, Models(of_width, on_gpu=False).mistakes())]
    assert found[32] == []
    [message] = found[64]
    assert message.startswith("phases.distil.losses.hidden_mse.map=false: ")
    assert "student's states are 32 wide and those of teachers.big 64" in message


def test_states_come_from_a_cache_that_holds_them(tmp_path: Path) -> None:
    for name in ("cosine", "activation_boundary"):
        distil = {"distil": {"teachers": "cached", "losses": {name: {}}}}
        for hidden, mistakes in (([-1], 0), ([], 1)):
            folder = tmp_path / f"{name}{mistakes}"
            folder.mkdir()
            cache = {"cache": {"splits": "train", "hidden": hidden}}
            loaded = recipe(folder, {"big": 32, "student": 32}, cache, distil)
            found = [*map(str, phase_mistakes(loaded))]
            assert len(found) == mistakes
        assert f"phases.distil.losses.{name}: needs the teachers' hidden states" in found[0]
        assert "hidden: [-1]" in found[0]


def mistakes(folder: Path, layers: Any, **phase: Any) -> list[str]:
    folder.mkdir()
    cache = {"cache": {"splits": "train", "hidden": [1, -1]}}
    distil = {"distil": {**phase, "losses": {"hidden_mse": {"layers": layers}}}}
    written = recipe(folder, {"t": 32, "student": 32}, cache, distil)
    found = [*Models(written, on_gpu=False).mistakes(), *phase_mistakes(written)]
    return [*map(str, found)]


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


def every_token(folder: Path, losses: dict[str, Any], *before: Any, **options: Any) -> list[str]:
    """What is wrong with a distillation of masked-LMs by these losses."""
    folder.mkdir()
    task = options.pop("task", {"type": "masked-lm", "data": {"path": "data"}})
    heads, teachers = options.pop("heads", {}), options.pop("teachers_named", ["t"])
    for name in (*teachers, "student"):
        make_tiny_bert(
            folder / name, toy_vocabulary(), num_attention_heads=heads.get(name, 2), hidden_size=32
        )
    content = {
        "task": task,
        "student": {"model": str(folder / "student")},
        "teachers": {name: {"model": str(folder / name)} for name in teachers},
        "phases": [*before, {"distil": {**options, "losses": losses}}],
    }
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    written = load_recipe(folder / "toy.yaml")
    found = [*Models(written, on_gpu=False).mistakes(), *phase_mistakes(written)]
    return [*map(str, found)]


OF_EVERY_TOKEN: dict[str, dict[str, Any]] = {
    "cosine": {"rows": "tokens"},
    "kl": {"rows": "tokens"},
    "hidden_mse": {"rows": "tokens", "layers": {0: 0, 1: 1}},
    "attention_kl": {"layers": "every"},
    "relation_kl": {"of": ["values"]},
    "attention_mse": {"layers": {1: 2}},
}


def test_every_token_is_a_row_of_live_masked_lms_alone(tmp_path: Path) -> None:
    assert every_token(tmp_path / "good", OF_EVERY_TOKEN) == []
    task = {"type": "single-label", "data": {"path": "data"}, "labels": ["a", "b"]}
    found = every_token(tmp_path / "classes", OF_EVERY_TOKEN, task=task)
    for name, settings in OF_EVERY_TOKEN.items():
        [message] = [one for one in found if one.startswith(f"phases.distil.losses.{name}: ")]
        assert f"{name} is of every token of a text, and task.type=single-label has" in message
        wanted = f"Leave {name}.rows out." if "rows" in settings else "Choose "
        assert wanted in message
    cache = {"cache": {"splits": "train"}}
    task = {"type": "masked-lm", "data": {"path": "data"}, "masking": {"variants": 2}}
    found = every_token(tmp_path / "cached", OF_EVERY_TOKEN, cache, task=task, teachers="cached")
    assert len(found) == len(OF_EVERY_TOKEN)
    assert all("reads of the teachers what no cache holds" in message for message in found)
    without = every_token(tmp_path / "none", OF_EVERY_TOKEN, task=task, teachers="cached")
    assert without == found, "no cache phase would help"


def test_every_token_has_one_teacher_that_no_policy_mixes(tmp_path: Path) -> None:
    """What mixes teachers reads logits, of every token [tokens, V] of each."""
    of_rows = {name: s for name, s in OF_EVERY_TOKEN.items() if "rows" in s and name != "cosine"}
    found = every_token(tmp_path / "two", of_rows, teachers_named=["t", "u"])
    assert len(found) == len(of_rows)
    for name, message in zip(of_rows, found, strict=True):
        assert message.startswith(f"phases.distil.losses.{name}: counts every token of a text, and")
        assert "2 teachers are mixed" in message and "follow: [NAME]" in message
    followed = every_token(tmp_path / "one", of_rows, teachers_named=["t", "u"], follow=["t"])
    assert followed == []
    [weighs] = every_token(tmp_path / "weighs", {"attention_kl": {}}, routing={"policy": "mt-bert"})
    assert "the policy weighs the teacher" in weighs
    masked = {name: {key: s[key] for key in s if key != "rows"} for name, s in of_rows.items()}
    assert every_token(tmp_path / "masked", masked, teachers_named=["t", "u"]) == []


def test_attention_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    unlike = {"heads": {"t": 4, "student": 2}}
    found = every_token(tmp_path / "heads", {"attention_kl": {}, "relation_kl": {}}, **unlike)
    assert len(found) == 2 and all(
        "heads are compared one to one, and teachers.t has 4, student has 2" in one for one in found
    )
    assert every_token(tmp_path / "anew", {"relation_kl": {"heads": 8}}, **unlike) == []
    odd = every_token(tmp_path / "odd", {"relation_kl": {"heads": 5}})
    for location, message in zip(("teachers.t", "student"), odd, strict=True):
        assert message.startswith(f"phases.distil.losses.relation_kl: {location} is 32 wide, which")
    with pytest.raises(UserError, match="layer 0 is the embeddings, which have no attention"):
        every_token(tmp_path / "zero", {"attention_mse": {"layers": {0: 0}}})
    with pytest.raises(UserError, match="each once"):
        every_token(tmp_path / "twice", {"relation_kl": {"of": ["keys", "keys"]}})
