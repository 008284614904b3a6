"""`ds-distill launch` on two ranks of one machine: no file in the working folder disturbs it,
nothing is compiled, and on a signal it ends all its processes and can continue later."""

import json
import re
from pathlib import Path

import psutil
import pytest
from processes import Process, within
from runs import Runs, after_steps, check_same, evaluation, written
from toys import make_toy_classifier

from ds_distill.files import read_json


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("launches")


@pytest.fixture
def runs(place, toy_settings, warm):
    written(toy_settings, place, "toy")
    for name in ("random", "torch", "datasets", "deepspeed"):
        (place / f"{name}.py").write_text("raise SystemExit('a script of the user was run')")
    extensions = {"TORCH_EXTENSIONS_DIR": str(place / "extensions")}
    return Runs(Path("toy.yaml"), warm, 2, extensions)


@pytest.fixture
def whole(runs, place):
    """The launch that nothing happened to."""
    if not (place / "whole").is_dir():
        runs.finish(place / "whole")
    return place / "whole"


def test_stopped_by_signals_a_launch_leaves_no_process_and_goes_on(runs, whole, place):
    folder = place / "stopped"
    assert read_json(whole / "environment.json")["ranks"] == 2
    assert set(evaluation(whole)["models"]) == {"first", "second", "average", "expertise"}
    assert not (place / "extensions").exists(), "something was compiled"

    # Ctrl-C in a terminal, where the first rank draws a bar and hides the cursor.
    code, shown = runs.press(folder, after_steps(8, 0.0), resume=False, keys=b"\x03")
    assert code == 130, shown
    assert runs.left() == []
    _, _, line = shown.replace("\r\n", "\n").rpartition("\r\x1b[2K\x1b[?25h")
    assert line.startswith(f"ds-distill: stopped by Ctrl-C. {folder} keeps the checkpoint of first")
    assert line.endswith(runs.continue_with(folder)) and line.count("\n") == 1
    assert "Traceback" not in shown and "SIGTERM" not in shown, "the ranks' own line"

    # SIGTERM to the one process that a user knows of.
    moment = after_steps(40, 0.0)
    code, output = runs.stop(folder, moment, resume=True, send=Process.terminate)
    assert code == 75, output
    assert runs.left() == []
    line = output.splitlines(keepends=True)[-1]
    assert line.startswith(f"ds-distill: stopped by SIGTERM. {folder} keeps the phases teach-first")
    assert line.endswith(runs.continue_with(folder))
    assert "Traceback" not in output and "exits with return code" not in output

    # SIGKILL to it, which it cannot answer, while its ranks hang.
    runs.stop(folder, after_steps(8, 0.0), resume=True, send=hang_ranks_and_kill)
    assert within(40, lambda: not runs.left())
    assert not (folder / "results.json").exists(), "the ranks went on to the end"

    runs.finish(folder, resume=True)
    check_same(folder, whole)


def test_what_all_ranks_find_is_reported_once(toy_settings, toy_task, warm, tmp_path):
    """A teacher of which both ranks have examples that it answers with NaN."""
    teachers = {
        name: {"model": str(make_toy_classifier(tmp_path / name, word)), "below_majority": "warn"}
        for name, word in {"sound": None, "broken": "the"}.items()
    }
    phase = {"split": "train", "teachers": "live", "routing": "average", "losses": {"kl": {}}}
    written({**toy_settings, "teachers": teachers, "phases": [{"distil": phase}]}, tmp_path, "toy")
    runs = Runs(Path("toy.yaml"), warm, 2)
    runs.arguments += ["--max-restarts", "2"]  # torchrun starts anew whatever a rank ends with
    process = runs.start(tmp_path / "run", resume=False)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    last = output.splitlines()[-1]
    assert last.startswith("ds-distill: teachers.broken: its outputs for"), output
    assert output.count("teachers.broken") == 1 and "exits with return code" not in output
    # Of the first step, of all ranks, and of them alone.
    lines = (toy_task / "train.jsonl").read_text().splitlines()
    bad, of = map(int, re.findall(r"for (\d+) of (\d+) examples of a batch", output)[0])
    assert 1 < bad < of == toy_settings["training"]["batch_size"]
    numbers = [int(number) for number in re.findall(r"train\.jsonl:(\d+) '", output)]
    assert len(numbers) == min(bad, 3)
    assert all("the" in json.loads(lines[n - 1])["text"].split() for n in numbers)
    assert runs.left() == []


def hang_ranks_and_kill(launch):
    """A stopped process does nothing, as one that waits in the kernel or holds Python's lock."""
    for process in psutil.Process(launch.pid).children(recursive=True):
        if "RANK" in process.environ():
            process.suspend()
    launch.kill()


def test_ranks_are_started_anew_after_a_kill_and_the_run_goes_on_by_itself(runs, whole, place):
    """To the bit as if left alone."""
    runs.arguments += ["--max-restarts", "1"]
    folder = place / "killed"
    code, output = runs.stop(folder, after_steps(20, 0.0), False, kill_second_rank, seconds=300)
    assert code == 0, output
    assert "continues at step" in output
    _, attempt = read_json(folder / "environment.json")["starts"]
    assert attempt["attempt"] == 1 and f"Attempt 1, after {attempt['after']}" in output
    check_same(folder, whole)
    assert within(30, lambda: not runs.left())


def kill_second_rank(launch):
    below = psutil.Process(launch.pid).children(recursive=True)
    [second] = [one for one in below if one.environ().get("RANK") == "1"]
    second.kill()


def test_deepspeeds_runner_ends_with_the_launch_and_goes_on(runs, whole, place):
    """On the one host of a hostfile, which needs no ssh."""
    (place / "hosts").write_text("localhost slots=3\n")
    folder = place / "on-hosts"
    runs.arguments[-2:] = ["--hostfile", "hosts", "--include", "localhost:1,2"]
    code, output = runs.stop(folder, after_steps(20, 0.0), False, Process.terminate)
    assert code == 75, output
    assert output.endswith(runs.continue_with(folder)) and "Traceback" not in output
    assert within(10, lambda: not runs.left())
    runs.stop(folder, after_steps(8, 0.0), resume=True, send=hang_ranks_and_kill)
    assert within(10, lambda: not runs.left())
    runs.finish(folder, resume=True)
    check_same(folder, whole)
