"""`ds-distill launch` on two ranks of one machine: no file in the working folder disturbs it,
nothing is compiled, and on a signal it ends all its processes and can continue later."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from processes import Process, kill_all, left_of, marked, within
from runs import SETTINGS, Runs, after_steps, check_same, curves, digests
from toys import make_toy_classifier


@pytest.fixture
def runs(tmp_path: Path, toy_settings: dict[str, Any], command_environment: dict[str, str]) -> Runs:
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(toy_settings, sort_keys=False))
    for name in ("random", "torch", "datasets", "deepspeed"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a script of the user was run')")
    extensions = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    return Runs(Path("toy.yaml"), {**command_environment, **extensions}, ranks=2)


def test_stopped_by_signals_a_launch_leaves_no_process_and_goes_on(runs, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    runs.finish(whole)
    assert json.loads((whole / "environment.json").read_text())["ranks"] == 2
    assert set(json.loads((whole / "results.json").read_text())["phases"][-1]["models"]) == {
        *("first", "second", "average", "expertise")
    }
    assert not (tmp_path / "extensions").exists(), "something was compiled"

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
    code, output = runs.stop(folder, moment, resume=True, send=lambda parent: parent.terminate())
    assert code == 75, output
    assert runs.left() == []
    line = output.splitlines(keepends=True)[-1]
    assert line.startswith(f"ds-distill: stopped by SIGTERM. {folder} keeps the phases teach-first")
    assert line.endswith(runs.continue_with(folder))
    assert "Traceback" not in output and "exits with return code" not in output

    # SIGKILL to it, which it cannot answer, while its ranks hang.
    runs.stop(folder, after_steps(8, 0.0), resume=True, send=hang_ranks_and_kill)
    assert none_left(runs.environment, seconds=40)
    assert not (folder / "results.json").exists(), "the ranks went on to the end"

    runs.finish(folder, resume=True)
    check_same(folder, whole)


def test_what_all_ranks_find_is_reported_once(
    toy_settings, toy_task, command_environment, tmp_path
):
    """A teacher of which both ranks have examples that it answers with NaN."""
    sound = make_toy_classifier(tmp_path / "sound")
    broken = make_toy_classifier(tmp_path / "broken", broken_word="the")
    phase = {"split": "train", "teachers": "live", "routing": "average"}
    settings = {
        **toy_settings,
        "teachers": {
            name: {"model": str(model), "below_majority": "warn"}
            for name, model in {"sound": sound, "broken": broken}.items()
        },
        "phases": [{"distil": {**phase, "losses": {"kl": {"temperature": 2.0}}}}],
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(settings))
    runs = Runs(Path("toy.yaml"), command_environment, ranks=2)
    process = runs.start(tmp_path / "run", resume=False)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert output.splitlines()[-1].startswith("ds-distill: teachers.broken: its outputs for"), (
        output
    )
    assert output.count("teachers.broken") == 1 and "exits with return code" not in output
    # Of the first step, of all ranks, and of them alone.
    lines = (toy_task / "train.jsonl").read_text().splitlines()
    bad, of = map(int, re.findall(r"for (\d+) of (\d+) examples of a batch", output)[0])
    assert 1 < bad < of == toy_settings["training"]["batch_size"]
    numbers = [int(number) for number in re.findall(r"train\.jsonl:(\d+) '", output)]
    assert len(numbers) == min(bad, 3)
    assert all("the" in json.loads(lines[n - 1])["text"].split() for n in numbers)
    assert runs.left() == []


TAKEN_MEANWHILE = """
import socket, sys
from ds_distill.cli import main
from ds_distill.launch import launch

taken = socket.create_server(("", 0))
print("port", taken.getsockname()[1], flush=True)
launch.free_port = lambda: taken.getsockname()[1]
sys.argv[0] = "ds-distill"
main()
"""


def test_a_port_that_another_program_took_is_no_mistake_of_the_user(
    toy_recipe, command_environment, tmp_path
):
    """The port that a launch has drawn, between that and the first rank's start."""
    command = ["launch", str(toy_recipe), "--num-gpus", "2", "--folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_MEANWHILE, *command],
        env=command_environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    [port] = re.findall(r"^port (\d+)$", done.stdout, re.MULTILINE)
    *_, rank, launch = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    assert f"port {port}" in rank and "--master-port" not in rank
    assert launch.startswith("ds-distill: the run stopped: rank ") and rank[12:] in launch
    assert "The next start takes another port. Nothing was written. Start again with: " in launch
    assert launch.endswith(f"ds-distill {shlex.join(command)}")


def hang_ranks_and_kill(launch: Process) -> None:
    """A stopped process does nothing, as one that waits in the kernel or holds Python's lock."""
    for process in psutil.Process(launch.pid).children(recursive=True):
        if "RANK" in process.environ():
            process.suspend()
    launch.kill()


def none_left(environment: dict[str, str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while left_of(environment):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_torchrun_starts_killed_ranks_anew_and_the_run_goes_on_by_itself(
    toy_settings: dict[str, Any], command_environment: dict[str, str], tmp_path: Path
) -> None:
    """To the bit as if left alone."""
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(toy_settings, sort_keys=False))
    environment = {**command_environment, **marked()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--module", "ds_distill", "run", "toy.yaml", *SETTINGS]
    digests_of = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        with open(tmp_path / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [*command, "--folder", str(folder)],
                env=environment,
                cwd=tmp_path,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        try:
            if name == "killed":
                assert within(300, partial(after_steps(30, 0.0), folder)), "it took no step"
                [second] = [p for p in left_of(environment) if p.environ().get("RANK") == "1"]
                second.kill()
            code = process.wait(timeout=600)
        finally:
            kill_all(process)
        assert code == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
        digests_of[name] = digests(folder)
    assert digests_of["killed"] == digests_of["whole"] != {}
    assert curves(tmp_path / "killed") == curves(tmp_path / "whole")
    assert within(30, lambda: not left_of(environment))
