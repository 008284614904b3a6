"""Losses, routing and metrics are those of the golden file, and what compares them notices."""

import copy
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import two_commits
from golden import FILE, moved, numbers_of, run_scenarios
from readings import read_run
from safetensors.numpy import load_file, save_file


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_scenarios(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def found(runs):
    return {name: numbers_of(read_run(folder)) for name, folder in runs.items()}


@pytest.fixture(scope="module")
def golden():
    return json.loads(FILE.read_text())


def test_no_number_moved(golden, found):
    lines = moved(golden, found)
    assert not lines, "\n".join([*lines, f"If that was meant to be: {golden['command']}"])


def test_the_choice_has_a_margin(runs):
    """So that no machine's rounding decides it."""
    policies = json.loads((runs["single-label"] / "routing.json").read_text())["policies"]
    first, second = sorted((score["score"] for score in policies.values()), reverse=True)[:2]
    assert first - second > 0.1


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("first losses", lambda losses: [*losses[:4], losses[4] * (1 + 2e-4), *losses[5:]]),
        ("first losses", lambda losses: losses[:-1]),
        ("last losses", lambda loss: loss * (1 - 2e-3)),
        ("last losses", lambda loss: float("nan")),
        ("shares", lambda share: share + 0.02),
        ("choices", lambda choice: f"not {choice}"),
    ],
)
def test_a_number_that_moved_is_named(golden, kind, change):
    now = copy.deepcopy(golden["scenarios"])
    assert moved(golden, now) == []
    numbers = now["single-label"][kind]
    name = list(numbers)[-1]
    numbers[name] = change(numbers[name])
    [line] = moved(golden, now)
    assert line.startswith(f"single-label, {kind}, {name}: ")


def test_a_number_that_is_gone_is_named(golden):
    now = copy.deepcopy(golden["scenarios"])
    name, _ = now["masked-lm"]["last losses"].popitem()
    [line] = moved(golden, now)
    assert line.startswith(f"masked-lm, last losses, {name}: ")


# --------------------------------------------------------------- two commits, bit for bit


def one_weight(run):
    file = run / "models" / "05-compact" / "model.safetensors"
    tensors = load_file(file)
    name = "cls.predictions.bias"
    tensors[name][3] = np.nextafter(tensors[name][3], np.float32(1))
    save_file(tensors, file, {"format": "pt"})
    return f"models/05-compact/model.safetensors/{name}"


def one_loss(run):
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines()
    number = max(n for n, line in enumerate(lines) if '"train"' in line)
    event = json.loads(lines[number])
    event["loss"] = float(np.nextafter(event["loss"], 0.0))
    lines[number] = json.dumps(event)
    file.write_text("\n".join(lines) + "\n")
    return f"metrics.jsonl/{event['number']}/{event['phase']}/train/{event['step']}/loss"


def one_byte_of_a_cache(run):
    [file] = (run / "cache" / "04-compact" / "bert").glob("*.arrow")
    with pa.ipc.open_stream(file.read_bytes()) as stream:
        batch = stream.read_all().to_batches()[0]
    place = file.read_bytes().find(batch.columns[-1].flatten().buffers()[-1].to_pybytes()[:64])
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(bytes(content))
    name = batch.schema.names[-1]
    return f"{file.relative_to(run).as_posix()}/{name}"


@pytest.mark.parametrize("change", [one_weight, one_loss, one_byte_of_a_cache])
def test_one_bit_is_noticed(runs, tmp_path, change):
    base, other = runs["masked-lm"], tmp_path / "other"
    shutil.copytree(base, other)
    assert two_commits.differences(read_run(base), read_run(other)) == {}
    place = change(other)
    head = read_run(other)
    different = two_commits.differences(read_run(base), head)
    assert list(different) == [place]
    first, line = two_commits.report("masked-lm", len(head), different)
    assert first == f"masked-lm: 1 of {len(head)} differ" and line.startswith(f"  {place}: ")


def test_a_place_that_one_side_lacks_differs_and_a_verdict_may():
    base = {"results.json/f1": 0.5, "left": 1, "results.json/verdict": "a", "zero": 0.0}
    head = {"results.json/f1": 0.5, "new": 2, "results.json/verdict": "b", "zero": -0.0}
    found = {"new": ("not there", 2), "left": (1, "not there"), "zero": (0.0, -0.0)}
    assert two_commits.differences(base, head) == found


def test_where_the_runs_were_is_not_compared(tmp_path):
    """`launch` writes whole paths."""
    reading = {"phases/02-cache.json/folder": f"{tmp_path}/runs/two-ranks/cache", "steps": 2}
    expected = {"phases/02-cache.json/folder": "/runs/two-ranks/cache", "steps": 2}
    assert two_commits.without(tmp_path, reading) == expected
