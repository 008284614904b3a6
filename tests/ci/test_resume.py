"""A run that is killed and resumed ends with the same weights, bit for bit, as one left alone."""

from __future__ import annotations

import random
import re
import shutil
import signal
from pathlib import Path

import pytest
from e2e.test_resume import make_runs, whole  # noqa: F401
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
    records,
    steps,
    writing_a_checkpoint,
)


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


def test_a_finished_run_may_be_resumed(make_runs, whole):
    before = digests(whole), curves(whole), files(whole)
    make_runs(None).finish(whole, resume=True)
    assert (digests(whole), curves(whole), files(whole)) == before
