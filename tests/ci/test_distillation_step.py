"""The benchmark of a distillation step: its paths compute the same loss, its record is whole."""

import importlib.util
import json
import math
from dataclasses import replace

import pytest
from distillation_paths import CLASSES, Setting, prepare
from distillation_step import PATHS, in_own_process, measure, record, table

TINY = Setting("classification", "tiny", batch=4, length=20, steps=2, config="zero1_fp32")
SETTINGS = {task: replace(TINY, task=task) for task in ("classification", "masked-lm")}
FIGURES = {"path", "dtype", "seconds_per_step", "tokens_per_second", "peak_bytes", "first_loss"}
INSTALLED = importlib.util.find_spec("textbrewer") is not None


@pytest.fixture(scope="module", params=SETTINGS)
def made(request, tmp_path_factory, world):
    """Of a task: the folder of models, what `prepare` said, and each path's row."""
    setting = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp(setting.task)
    shared = prepare(setting, folder, world)
    names = [name for name in PATHS if INSTALLED or name != "textbrewer"]
    rows = {name: measure(name, setting, folder, world, 0) for name in names}
    return setting, folder, shared, rows


def test_all_paths_start_from_the_same_loss(made):
    """But for the tail that a cache joins into one, those beyond the top 64: KL falls by it. Labels
    alone begin as a student that knows nothing."""
    setting, _, _, rows = made
    first = {name: row["first_loss"] for name, row in rows.items()}
    live, of_classes = first["live"], setting.task == "classification"
    assert live > 1e-3 and first["two-engines"] == pytest.approx(live, rel=1e-4)
    # What is left when two numbers of some units are taken from each other.
    assert first.get("textbrewer", live) == pytest.approx(live, abs=2e-5)
    assert (first["cached"] == pytest.approx(live, rel=1e-5)) == of_classes
    assert 0.7 * live < first["cached"] <= live * (1 + 1e-5)
    kinds = CLASSES if of_classes else setting.student.vocab_size
    assert first["labels"] == pytest.approx(math.log(kinds), rel=0.1)


def test_the_record_has_all_fields(made):
    setting, _, shared, rows = made
    failed = {"path": "textbrewer", "error": "ModuleNotFoundError: No module named 'textbrewer'"}
    given = [row for name, row in rows.items() if name != "textbrewer"] + [failed]
    measured = json.loads(json.dumps({**record(setting, given), "shared": shared}))
    assert measured["environment"]["date"] and measured["environment"]["device"] == "cpu"
    assert measured["settings"]["task"] == setting.task
    assert set(measured["shared"]["parameters"]) == {"student", *setting.teachers}
    for row in measured["paths"][:-1]:
        assert set(row) == FIGURES
        seconds = row["seconds_per_step"]
        assert 0 < seconds["p20"] <= seconds["median"] <= seconds["p80"]
        assert row["tokens_per_second"] == pytest.approx(4 * 20 / seconds["median"])
        assert row["peak_bytes"] > 2**20 and row["dtype"] == "float32"
    assert set(measured["of_live"]) == {"live", "cached", "labels", "two-engines"}
    assert measured["of_live"]["live"] == {"seconds": 1.0, "peak_bytes": 1.0}
    lines = table(measured).splitlines()
    assert len(lines) == 6 and lines[-1] == f"textbrewer: {failed['error']}"
    assert all(line.split()[0] in PATHS for line in lines[1:5])


def test_a_path_that_fails_is_a_row(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # of the group that this process is in
    row = in_own_process("live", TINY, tmp_path, 0)
    assert row["path"] == "live" and row["error"].startswith("Unreachable: model ")
