"""A run that is killed and resumed ends with the same weights, bit for bit, as one left alone."""

import random
import re
import signal

import pytest
from runs import (
    Runs,
    after_steps,
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
    written,
)


@pytest.fixture(scope="module")
def make_runs(tmp_path_factory, toy_settings, warm):
    recipe = written(toy_settings, tmp_path_factory.mktemp("recipe"))
    return lambda ranks: Runs(recipe, warm, ranks)


@pytest.fixture(scope="module")
def whole(make_runs, tmp_path_factory):
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    make_runs(None).finish(folder)
    assert len(curves(folder)) == len(set(curves(folder))) > 100
    return folder


def kill_series(runs, folder, kinds, total, seed):
    """Kill a run at one moment after the other; returns those that were hit."""
    draw = random.Random(seed)
    hit = []
    share = total // (len(kinds) + 1)
    for kind in kinds:
        for _ in range(5):  # a write of milliseconds can be missed
            moment = {
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
        assert f"ds-distill: {name}: ends after this step, with a checkpoint" in asked
        saved = rf"^ds-distill: stopped by {name}, with a checkpoint of (\S+) at step (\d+)\. "
        [(model, step)] = re.findall(saved, line)
        assert f"{folder} keeps the phases teach-first" in line
        assert line.endswith(runs.continue_with(folder)) and "Traceback" not in output
        assert curves(folder)[-1][1:3] == (model, int(step))
        found = [int(path.name[5:]) for path in (folder / "checkpoints").glob("*/step-*")]
        assert max(found) == int(step)
        assert runs.left() == []
    runs.finish(folder, resume=True)
    check_same(folder, whole)


def test_a_finished_run_may_be_resumed(make_runs, whole):
    before = digests(whole), curves(whole), files(whole)
    make_runs(None).finish(whole, resume=True)
    assert (digests(whole), curves(whole), files(whole)) == before


def test_a_killed_masked_lm_training_ends_as_if_left_alone(
    masked_lm_settings, warm, ds_distill, tmp_path
):
    """Masks are drawn anew in every epoch, and the same again after a resume."""
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
    runs = Runs(written(settings, tmp_path), warm, None)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    ds_distill(*runs.arguments, "--folder", whole)
    teachers = sum(event[1] != "student" for event in curves(whole))
    assert runs.kill(folder, after_steps(teachers + 20, 0.0), resume=False), "ended too early"
    assert len(records(folder)) == 1, "killed outside of the student's training"
    ds_distill(*runs.arguments, "--folder", folder, "--resume")
    assert len(digests(whole)) == 4  # two teachers, the student, and again as it is shipped
    assert digests(folder) == digests(whole)
    assert curves(folder) == curves(whole)
    assert others(folder) == others(whole)
