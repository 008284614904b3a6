"""The benchmark of a distillation step: its paths compute the same loss, its record is whole."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import growing
import pytest
import torch
from distillation_paths import (
    CLASSES,
    COUNTED,
    Setting,
    Steps,
    cached_batch,
    make_batch,
    prepare,
)
from distillation_step import (
    PATHS,
    compare,
    device_seconds,
    finished,
    in_own_process,
    larger_batches,
    measure,
    record,
    table,
)

from ds_distill.engine.world import World
from ds_distill.views import PaddedView

TINY = Setting("classification", "tiny", batch=4, length=20, steps=2, config="zero1_fp32")
SETTINGS = {task: replace(TINY, task=task) for task in ("classification", "masked-lm")}
FIGURES = {
    *("path", "dtype", "seconds_per_step", "tokens_per_second", "peak_bytes", "first_loss"),
}
INSTALLED = importlib.util.find_spec("textbrewer") is not None
needs_textbrewer = pytest.mark.skipif(not INSTALLED, reason="textbrewer is not installed")

Made = tuple[Setting, Path, dict[str, Any], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", params=SETTINGS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, world: World
) -> Made:
    """Of a task: the folder of models, what `prepare` said, and each path's row."""
    setting = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp(setting.task)
    shared = prepare(setting, folder, world)
    names = [name for name in PATHS if INSTALLED or name != "textbrewer"]
    rows = {name: measure(name, setting, folder, world, 0) for name in names}
    return setting, folder, shared, rows


def test_two_engines_start_from_the_same_loss(made: Made) -> None:
    _, _, _, rows = made
    assert rows["live"]["first_loss"] > 1e-3
    assert rows["two-engines"]["first_loss"] == pytest.approx(rows["live"]["first_loss"], rel=1e-4)


@needs_textbrewer
def test_textbrewer_starts_from_the_same_loss(made: Made) -> None:
    _, _, _, rows = made
    # What is left when two numbers of some units are taken from each other.
    assert rows["textbrewer"]["first_loss"] == pytest.approx(rows["live"]["first_loss"], abs=2e-5)


def test_the_cached_path_loses_the_tail_alone(made: Made) -> None:
    """KL falls when entries are joined into one: those beyond the top 64."""
    setting, _, _, rows = made
    ours, live = rows["cached"]["first_loss"], rows["live"]["first_loss"]
    if setting.task == "classification":
        assert ours == pytest.approx(live, rel=1e-5)
    else:
        assert 0.7 * live < ours < live


def test_the_path_of_labels_begins_as_a_student_that_knows_nothing(made: Made) -> None:
    setting, _, _, rows = made
    kinds = CLASSES if setting.task == "classification" else setting.student.vocab_size
    assert rows["labels"]["first_loss"] == pytest.approx(math.log(kinds), rel=0.1)


def test_the_record_has_all_fields(made: Made) -> None:
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


def test_paths_that_are_done_are_left_out(made: Made, tmp_path: Path) -> None:
    setting, _, _, rows = made
    output = tmp_path / "step.json"
    growing.write(output, record(setting, list(rows.values())))
    names = list(rows)
    kept = compare(setting, names, 0, output, resume=True)  # nothing is started
    assert [row["path"] for row in kept["paths"]] == names
    with pytest.raises(SystemExit, match="2"):
        compare(replace(setting, steps=3), names, 0, output, resume=True)


def test_what_is_measured_again() -> None:
    rows = [
        {"path": "live", "largest_batch": 64},
        {"path": "cached"},
        {"path": "textbrewer", "error": "killed"},
    ]
    assert set(finished(rows, up_to=0)) == {"live", "cached"}
    assert set(finished(rows, up_to=64)) == {"live"}


def test_a_path_that_failed_is_tried_again(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # of the group that this process is in
    setting, _, _, rows = made
    if setting.task == "masked-lm":
        pytest.skip("the same for both tasks")
    output = tmp_path / "step.json"
    failed = {"path": "cached", "error": "killed"}
    growing.write(output, record(setting, [rows["live"], failed]))
    compare(setting, ["live", "cached"], 0, output, resume=True)
    live, cached = json.loads(output.read_text())["paths"]
    assert live["seconds_per_step"] == rows["live"]["seconds_per_step"]
    assert cached["first_loss"] == pytest.approx(rows["cached"]["first_loss"], rel=1e-5)


def test_rows_of_a_masked_lm_are_its_share(made: Made) -> None:
    setting, folder, _, _ = made
    view = make_batch(setting, 0).views["student"]
    assert isinstance(view, PaddedView)
    if setting.task == "classification":
        assert view.positions is None
        return
    assert view.positions is not None and len(set(view.positions.tolist())) == len(view.positions)
    each = torch.bincount(view.positions // setting.length, minlength=setting.batch)
    assert each.tolist() == [round(COUNTED * setting.length)] * setting.batch
    larger = cached_batch(setting, 0, folder, repeats=2)
    assert len(larger.signals["bert-large"]) == 2 * len(view.positions) == len(larger.keys)


def test_the_largest_batch_is_the_last_that_ran(made: Made, world: World) -> None:
    setting, folder, _, _ = made

    def run(batches: list[Any]) -> Steps:
        examples = len(batches[0].views["student"].input_ids)
        if examples > 30:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nMore")
        return Steps([9.0, *[examples / 10] * (len(batches) - 1)], 1.0)

    for name in ("live", "cached"):
        found = larger_batches(name, run, setting, folder, world, 99)
        assert found["largest_batch"] == 16
        assert {size: row["seconds"] for size, row in found["larger"].items()} == {
            "8": 0.8,
            "16": 1.6,
        }
        assert found["stopped_by"] == "OutOfMemoryError: CUDA out of memory."


def test_what_a_gpu_computes_is_nothing_on_a_cpu(made: Made, world: World) -> None:
    setting, folder, _, _ = made
    batches = [cached_batch(setting, number, folder) for number in range(2)]
    assert device_seconds(PATHS["cached"](setting, folder, world), batches) == 0.0


def test_a_row_is_there_before_the_largest_batch_is(made: Made, world: World) -> None:
    setting, folder, _, _ = made
    seen: list[dict[str, Any]] = []

    def stop(row: dict[str, Any]) -> None:
        seen.append(row)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure("cached", setting, folder, world, 8, stop)
    assert set(seen[0]) == FIGURES


def test_a_path_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # of the group that this process is in
    row = in_own_process("live", TINY, tmp_path, 0)
    assert row["path"] == "live" and row["error"].startswith("Unreachable: model ")
