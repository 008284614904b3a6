"""The hub is asked once whether it can be reached, and only where a recipe needs it."""

import os
import socket

import pytest
from runs import command_line

from ds_distill.cli.loading import go_offline
from ds_distill.cli.options import Given


@pytest.fixture
def asked(monkeypatch):
    """What is connected to; nothing can be reached."""
    addresses = []

    def refuse(address, timeout):
        addresses.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr("ds_distill.cli.loading.getproxies", dict)
    return addresses


def test_a_hub_that_cannot_be_reached_is_asked_once(asked, capsys):
    for _ in range(2):
        Given("mind").load()
    assert "huggingface.co cannot be reached (Connection refused)" in capsys.readouterr().err
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert asked == [("huggingface.co", 443)]


def test_predict_asks_once_too(asked, monkeypatch, tmp_path):
    """For a student that is nowhere it tried for half a minute."""
    monkeypatch.setattr("ds_distill.predictors.file.predict_file", lambda *_, **__: None)
    (tmp_path / "texts.txt").write_text("a\n")
    done = command_line("predict", "nowhere", tmp_path / "texts.txt")
    assert "huggingface.co cannot be reached" in done.stderr
    assert asked == [("huggingface.co", 443)]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    command_line("predict", tmp_path, tmp_path / "texts.txt")
    assert len(asked) == 1  # a folder is no hub id


def test_a_mirror_is_asked_in_its_place(asked, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/hub")
    go_offline(["org/data"])
    assert asked == [("mirror.example", 8080)]


def test_behind_a_proxy_and_of_what_is_local_nothing_is_asked(asked, monkeypatch, tmp_path):
    Given("quickstart").load()
    (tmp_path / "org" / "bert").mkdir(parents=True)
    go_offline(["org/bert", "/no/such/folder", "data:x", str(tmp_path)], str(tmp_path))
    monkeypatch.setattr("ds_distill.cli.loading.getproxies", lambda: {"https": "proxy:3128"})
    go_offline(["org/data"])
    assert not asked and "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.setattr("ds_distill.cli.loading.getproxies", dict)
    go_offline(["org/data"], str(tmp_path))
    assert len(asked) == 1
