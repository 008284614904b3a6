"""The hub is asked once whether it can be reached, and only where a recipe needs it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_distill.cli import app
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.recipe.offline import go_offline_without_hub, models_and_data, reads_hub


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is connected to; nothing can be reached."""
    addresses: list[Any] = []

    def refuse(address: Any, timeout: float) -> None:
        addresses.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr("ds_distill.recipe.offline.getproxies", dict)
    return addresses


def local(toy_settings: dict[str, Any], **changes: Any) -> Recipe:
    return Recipe.model_validate({**toy_settings, **changes})


def named(recipe: str) -> tuple[list[str], list[str]]:
    return models_and_data(load_recipe(recipe))


def test_a_hub_that_cannot_be_reached_is_asked_once(asked: list[Any]) -> None:
    note = go_offline_without_hub(*named("mind"))
    assert note is not None and "huggingface.co cannot be reached (Connection refused)" in note
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert go_offline_without_hub(*named("mind")) is None
    assert asked == [("huggingface.co", 443)]


def test_predict_asks_once_too(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For a student that is nowhere it tried for half a minute."""
    monkeypatch.setattr("ds_distill.predictors.file.predict_file", lambda *_, **__: None)
    (tmp_path / "texts.txt").write_text("a\n")
    done = CliRunner().invoke(app, ["predict", "nowhere", str(tmp_path / "texts.txt")])
    assert done.exit_code == 0 and "huggingface.co cannot be reached" in done.stderr
    assert asked == [("huggingface.co", 443)]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    CliRunner().invoke(app, ["predict", str(tmp_path), str(tmp_path / "texts.txt")])
    assert len(asked) == 1  # a folder is no hub id


def test_a_mirror_is_asked_in_its_place(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/hub")
    assert "mirror.example" in str(go_offline_without_hub(*named("mind")))
    assert asked == [("mirror.example", 8080)]


def test_behind_a_proxy_nothing_is_asked(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_distill.recipe.offline.getproxies", lambda: {"https": "proxy:3128"})
    assert go_offline_without_hub(*named("mind")) is None
    assert not asked and "HF_HUB_OFFLINE" not in os.environ


def test_what_is_local_needs_no_hub(asked: list[Any], toy_settings: dict[str, Any]) -> None:
    assert go_offline_without_hub(*models_and_data(local(toy_settings))) is None
    assert go_offline_without_hub(*named("quickstart")) is None
    assert not asked


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"student": {"model": "google-bert/bert-base-uncased"}}, True),
        ({"student": {"model": "/no/such/folder"}}, False),
    ],
)
def test_models_of_the_hub_are_seen(
    toy_settings: dict[str, Any], changes: dict[str, Any], expected: bool
) -> None:
    assert reads_hub(*models_and_data(local(toy_settings, **changes))) == expected


@pytest.mark.parametrize(("path", "expected"), [("org/data", True), ("data:x", False)])
def test_data_of_the_hub_are_seen(toy_settings: dict[str, Any], path: str, expected: bool) -> None:
    task = {**toy_settings["task"], "data": {"path": path}}
    assert reads_hub(*models_and_data(local(toy_settings, task=task))) == expected
