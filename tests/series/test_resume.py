"""A run that is killed and resumed ends with the same weights, bit for bit, as one left alone."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import psutil
from ci.test_resume import kill_series, make_runs, whole  # noqa: F401
from processes import within
from runs import after_steps, check_same, curves, records, steps

from ds_distill.files import read_json, write_json
from ds_distill.run.inputs import describe_environment

RESULTS = Path(__file__).parents[1] / "results" / "resume-kills.json"


def test_ten_kills_change_nothing(make_runs, whole, tmp_path):
    runs, folder = make_runs(None), tmp_path / "run"
    seed = int(os.environ.get("DS_DISTILL_SEED", time.time_ns() % 10**6))
    kinds = ["random"] * 7 + ["checkpoint"] * 2 + ["phase"]
    random.Random(seed).shuffle(kinds)
    hit = kill_series(runs, folder, kinds, len(curves(whole)), seed)
    runs.finish(folder, resume=True)
    check_same(folder, whole)
    write_results("one process", seed, hit)


def test_two_ranks_killed_once(make_runs, tmp_path):
    runs = make_runs(2)
    (tmp_path / "whole").mkdir()
    runs.finish(tmp_path / "whole" / "run")
    folder = tmp_path / "run"
    hit = kill_series(runs, folder, ["random"], len(curves(tmp_path / "whole" / "run")), seed=2)
    runs.finish(folder, resume=True)
    check_same(folder, tmp_path / "whole" / "run")
    write_results("two ranks", 2, hit)


def test_thirty_kills_of_anything_change_nothing(make_runs, tmp_path):
    """Of a launch of two ranks: a rank, torchrun, the launch itself, or all at once as when a host
    dies. Each time nothing is left, and the same command goes on."""
    runs = make_runs(2)
    runs.arguments += ["training.epochs=8"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    runs.finish(whole)
    memory = set(os.listdir("/dev/shm"))
    seed = int(os.environ.get("DS_DISTILL_SEED", time.time_ns() % 10**6))
    draw, hit = random.Random(seed), []
    kinds = ["rank", "rank", "torchrun", "launch", "host"] * 6
    draw.shuffle(kinds)
    for kind in kinds:
        seconds, count = draw.uniform(0.3, 12), draw.randint(1, 9)
        moment = draw.choice([after_seconds(seconds), after_steps(count, draw.uniform(0, 0.03))])
        runs.stop(
            folder, moment, folder.exists(), lambda launch, kind=kind: end(kind, launch, draw)
        )
        assert within(40, lambda: not runs.left()), kind
        assert set(os.listdir("/dev/shm")) <= memory
        hit.append(f"{kind}, {len(records(folder))} phases done, {steps(folder)} steps logged")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "run"}
    runs.finish(folder, resume=True)
    check_same(folder, whole)
    write_results("a launch of two ranks", seed, hit)


def after_seconds(seconds):
    deadline = time.monotonic() + seconds
    return lambda folder: time.monotonic() > deadline


def end(kind, launch, draw):
    """SIGKILL to what a kind names, or to the launch where it is not there yet."""
    found = {"launch": [psutil.Process(launch.pid)]}
    below = found["launch"][0].children(recursive=True)
    engine = [one for one in below if one.ppid() == launch.pid]
    ranks = [one for one in below if one.ppid() in {one.pid for one in engine}]
    found |= {"torchrun": engine, "host": [*below, *found["launch"]]}
    found["rank"] = [draw.choice(ranks)] if ranks else []
    for one in found[kind] or found["launch"]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def write_results(series, seed, hit):
    if os.environ.get("DS_DISTILL_WRITE_RESULTS") != "1":
        return
    known = read_json(RESULTS) if RESULTS.is_file() else {}
    known[series] = {
        "command": "DS_DISTILL_WRITE_RESULTS=1 pytest tests/series/test_resume.py",
        "kills": len(hit),
        "moments": hit,
        "seed": seed,
        "outcome": "weights, losses and files equal to the uninterrupted run's",
        **describe_environment(1, "cpu"),
    }
    write_json(RESULTS, known)
