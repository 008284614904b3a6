"""A run that is killed and resumed ends with the same weights, bit for bit, as one left alone."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from processes import Process
from runs import (
    Moment,
    Runs,
    after_steps,
    cache_without_record,
    check_same,
    curves,
    digests,
    end_of_a_phase,
    files,
    is_between_phases,
    others,
    records,
    steps,
    writing_a_checkpoint,
)

from ds_distill.files import read_json

RESULTS = Path(__file__).parents[1] / "results" / "resume-kills.json"
# -------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def make_runs(
    tmp_path_factory: pytest.TempPathFactory,
    toy_settings: dict[str, Any],
    command_environment: dict[str, str],
) -> Callable[[int | None], Runs]:
    recipe = tmp_path_factory.mktemp("recipe") / "toy.yaml"
    recipe.write_text(yaml.safe_dump(toy_settings, sort_keys=False))
    return lambda ranks: Runs(recipe, command_environment, ranks)


@pytest.fixture(scope="module")
def whole(make_runs: Callable[..., Runs], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    make_runs(None).finish(folder)
    assert len(curves(folder)) == len(set(curves(folder))) > 100
    return folder


def kill_series(runs: Runs, folder: Path, kinds: list[str], total: int, seed: int) -> list[str]:
    """Kill a run at one moment after the other; returns those that were hit."""
    draw = random.Random(seed)
    hit: list[str] = []
    share = total // (len(kinds) + 1)
    for kind in kinds:
        for _ in range(5):  # a write of milliseconds can be missed
            moment: Moment = {
                "checkpoint": lambda folder: writing_a_checkpoint(folder),
                "phase": end_of_a_phase(folder),
                "random": after_steps(
                    draw.randint(1, max(1, min(3 * share // 2, total - steps(folder) - 8))),
                    draw.uniform(0, 0.03),
                ),
            }[kind]
            assert runs.kill(folder, moment, resume=folder.exists()), "the run ended too early"
            if kind == "checkpoint" and not writing_a_checkpoint(folder):
                continue
            if kind == "phase" and not is_between_phases(folder):
                continue
            break
        else:
            pytest.fail(f"no kill hit: {kind}")
        hit.append(f"{kind}, {len(records(folder))} phases done, {steps(folder)} steps logged")
    return hit


@pytest.mark.further
def test_two_kills_and_ctrl_c_change_nothing(make_runs, whole, tmp_path):
    runs, folder = make_runs(None), tmp_path / "run"
    kill_series(runs, folder, ["checkpoint", "phase"], len(curves(whole)), seed=1)
    # A signal in a training: a checkpoint at the step that it came in.
    for sign, name, expected in ((signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 75)):
        moment = after_steps(5, 0.0)
        code, output = runs.stop(folder, moment, True, lambda run, s=sign: run.send_signal(s))
        assert code == expected, output
        *_, asked, line = output.splitlines(keepends=True)
        assert f"ds-distill: {name}: ends at the next report, with a checkpoint" in asked
        saved = rf"^ds-distill: stopped by {name}, with a checkpoint of (\S+) at step (\d+)\. "
        [(model, step)] = re.findall(saved, line)
        assert f"{folder} keeps the phases teach-first" in line
        assert line.endswith(runs.continue_with(folder)) and "Traceback" not in output
        assert curves(folder)[-1][1:3] == (model, int(step))
        found = [int(path.name[5:]) for path in (folder / "checkpoints").glob("*/step-*")]
        assert max(found) == int(step)
        assert runs.left() == []
    for _ in range(3):  # it is some hundredths of a second
        runs.stop(folder, cache_without_record, True, lambda run: run.kill())
        if "03-cache.json" not in records(folder):
            break
        shutil.rmtree(folder / "cache")
        (folder / "phases" / "03-cache.json").unlink()
    assert "03-cache.json" not in records(folder)
    runs.finish(folder, resume=True)
    check_same(folder, whole)


@pytest.mark.further
def test_a_finished_run_may_be_resumed(make_runs, whole):
    before = digests(whole), curves(whole), files(whole)
    make_runs(None).finish(whole, resume=True)
    assert (digests(whole), curves(whole), files(whole)) == before


def test_a_killed_masked_lm_training_ends_as_if_left_alone(
    masked_lm_settings, command_environment, ds_distill, tmp_path
):
    """Masks are drawn anew in every epoch, and the same again after a resume."""
    recipe = tmp_path / "masked-lm.yaml"
    teacher = masked_lm_settings["teachers"]["bert"]
    routing = {"policy": "average", "mix": "losses"}
    settings = {
        **masked_lm_settings,
        "teachers": {"bert": teacher, "other": teacher},
        "phases": [
            {"fine-tune": {"models": ["bert", "other"]}},
            {"distil": {"losses": {"kl": {"temperature": 2.0}}, "routing": routing}},
        ],
    }
    recipe.write_text(yaml.safe_dump(settings, sort_keys=False))
    runs = Runs(recipe, command_environment, None)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    done = ds_distill(*runs.arguments, "--folder", whole)
    assert done.returncode == 0, done.stderr
    teachers = sum(event[1] != "student" for event in curves(whole))
    assert runs.kill(folder, after_steps(teachers + 20, 0.0), resume=False), "ended too early"
    assert len(records(folder)) == 1, "killed outside of the student's training"
    done = ds_distill(*runs.arguments, "--folder", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert len(digests(whole)) == 4  # two teachers, the student, and again as it is shipped
    assert digests(folder) == digests(whole)
    assert curves(folder) == curves(whole)
    assert others(folder) == others(whole)


@pytest.mark.slow
def test_ten_kills_change_nothing(make_runs, whole, tmp_path):
    runs, folder = make_runs(None), tmp_path / "run"
    seed = int(os.environ.get("DS_DISTILL_SEED", time.time_ns() % 10**6))
    kinds = ["random"] * 7 + ["checkpoint"] * 2 + ["phase"]
    random.Random(seed).shuffle(kinds)
    hit = kill_series(runs, folder, kinds, len(curves(whole)), seed)
    runs.finish(folder, resume=True)
    check_same(folder, whole)
    write_results("one process", seed, hit)


@pytest.mark.slow
def test_two_ranks_killed_once(make_runs, tmp_path):
    runs = make_runs(2)
    (tmp_path / "whole").mkdir()
    runs.finish(tmp_path / "whole" / "run")
    folder = tmp_path / "run"
    hit = kill_series(runs, folder, ["random"], len(curves(tmp_path / "whole" / "run")), seed=2)
    runs.finish(folder, resume=True)
    check_same(folder, tmp_path / "whole" / "run")
    write_results("two ranks", 2, hit)


@pytest.mark.slow
def test_thirty_kills_of_anything_change_nothing(make_runs, tmp_path):
    """Of a launch of two ranks: a rank, the guard of its ranks, the agent, the launch itself, or
    all at once as when a host dies. Each time nothing is left, and the same command goes on."""
    runs = make_runs(2)
    runs.arguments += ["training.epochs=8"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    runs.finish(whole)
    memory = set(os.listdir("/dev/shm"))
    seed = int(os.environ.get("DS_DISTILL_SEED", time.time_ns() % 10**6))
    draw, hit = random.Random(seed), []
    kinds = ["rank", "guard", "agent", "launch", "host"] * 6
    draw.shuffle(kinds)
    for kind in kinds:
        seconds, count = draw.uniform(0.3, 12), draw.randint(1, 9)
        moment = draw.choice([after_seconds(seconds), after_steps(count, draw.uniform(0, 0.03))])
        runs.stop(
            folder, moment, folder.exists(), lambda launch, kind=kind: end(kind, launch, draw)
        )
        deadline = time.monotonic() + 40
        while runs.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert runs.left() == [], kind
        assert set(os.listdir("/dev/shm")) <= memory
        hit.append(f"{kind}, {len(records(folder))} phases done, {steps(folder)} steps logged")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "run"}
    runs.finish(folder, resume=True)
    check_same(folder, whole)
    write_results("a launch of two ranks", seed, hit)


def after_seconds(seconds: float) -> Moment:
    deadline = time.monotonic() + seconds
    return lambda folder: time.monotonic() > deadline


def end(kind: str, launch: Process, draw: random.Random) -> None:
    """SIGKILL to what a kind names, or to the launch where it is not there yet."""
    found: dict[str, list[psutil.Process]] = {"launch": [psutil.Process(launch.pid)]}
    below = found["launch"][0].children(recursive=True)
    agents = [one for one in below if one.ppid() == launch.pid]
    guards = [one for one in below if one.ppid() in {agent.pid for agent in agents}]
    ranks = [one for one in below if one.ppid() in {guard.pid for guard in guards}]
    found |= {"agent": agents, "guard": guards, "host": [*below, *found["launch"]]}
    found["rank"] = [draw.choice(ranks)] if ranks else []
    for one in found[kind] or found["launch"]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def write_results(series: str, seed: int, hit: list[str]) -> None:
    if os.environ.get("DS_DISTILL_WRITE_RESULTS") != "1":
        return
    known = read_json(RESULTS) if RESULTS.is_file() else {}
    known[series] = {
        "date": datetime.date.today().isoformat(),
        "command": "DS_DISTILL_WRITE_RESULTS=1 pytest tests/e2e/test_resume.py",
        "kills": len(hit),
        "moments": hit,
        "seed": seed,
        "outcome": "weights, losses and files equal to the uninterrupted run's",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "deepspeed", "transformers", "datasets")
        },
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")
