"""`ds-distill launch` without ranks: options, what the engines are told, ends, and its verdict."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from processes import fork, left_of, marked, python, within
from runs import command_line

from ds_distill import launch
from ds_distill.errors import UserError
from ds_distill.launch import (
    Engine,
    LaunchOptions,
    Work,
    _conclude,
    _deepspeed,
    _torchrun,
    write_for_ranks,
)
from ds_distill.process.failures import Failure, clear_failures, record_failure
from ds_distill.process.identity import LAUNCHED, PORTS, STOP, address_towards, interface_towards
from ds_distill.process.lease import leased
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.run.folder import RunFolder
from ds_distill.run.inputs import refuse_other_start


def work_in(folder, *command):
    run = RunFolder(folder)
    return Work(None, run, [*command] or ["run"], run.results)


# --------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("text", "include", "exclude", "expected"),
    [
        ("# a\none slots=3\n\ntwo slots=2\n", "two:1@one:2,0", None, {"one": [0, 2], "two": [1]}),
        ("one slots=1\ntwo slots=2\n", None, "two:0", {"one": [0], "two": [1]}),
    ],
)
def test_hosts_are_those_of_deepspeeds_runner(text, include, exclude, expected, tmp_path):
    (tmp_path / "hosts").write_text(text)
    options = LaunchOptions(hostfile=tmp_path / "hosts", include=include, exclude=exclude)
    assert options.hosts() == expected


def test_more_ranks_than_gpus_are_refused(toy_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with pytest.raises(UserError, match=r"3 ranks, but this machine has 1 GPUs \(CUDA_VISIBLE"):
        command_line("launch", toy_recipe, "--num-gpus", "3", "--folder", tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------- engines


def test_ranks_get_the_folder_and_nothing_of_the_recipe(tmp_path):
    given = [f"{tmp_path}/{LAUNCHED}", "--folder", str(tmp_path)]
    until = ["--until", "cache"]
    ran, built = work_in(tmp_path, "run", *until), work_in(tmp_path, "cache", "build")
    assert ran.of_ranks() == ["run", *given, "--resume=auto", *until]
    assert built.of_ranks() == ["cache", "build", *given]


def test_torchrun_is_told_where_several_machines_meet(tmp_path):
    work = work_in(tmp_path)
    one = _torchrun(work, LaunchOptions(num_gpus=2, max_restarts=3), tmp_path)
    told = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    assert one[: len(told)] == told
    assert one[-len(work.of_ranks()) :] == work.of_ranks()
    several = LaunchOptions(num_gpus=2, nnodes="2:3", rdzv_endpoint="127.0.0.1:29400")
    two = _torchrun(work, several, tmp_path)
    assert two[1:3] == ["--nnodes", "2:3"] and "--local-addr" not in two
    assert two[two.index("--rdzv-endpoint") + 1] == "127.0.0.1:29400"
    name = two[two.index("--rdzv-id") + 1]
    assert name in _torchrun(work, replace(several, num_gpus=4), tmp_path), "the same everywhere"
    assert name not in _torchrun(work, several, tmp_path / "another")


def test_deepspeeds_runner_gets_what_no_shell_changes(tmp_path, monkeypatch):
    options = LaunchOptions(hostfile=tmp_path / "hosts", include="localhost")
    here = _deepspeed(work_in(tmp_path / "a b"), options, {"localhost": [0, 1]})
    assert "--force_multi" not in here and here[here.index("--master_addr") + 1] == "localhost"
    assert int(here[here.index("--master_port") + 1]) in PORTS
    assert here[here.index("--include") + 1] == "localhost" and "--exclude" not in here
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = {"me@one": [0], "two": [0]}
    with pytest.raises(UserError, match="needs pdsh"):
        _deepspeed(work_in(tmp_path), options, hosts)
    (tmp_path / "pdsh").touch(0o755)
    several = _deepspeed(work_in(tmp_path), replace(options, master_port=7), hosts)
    assert several[several.index("--master_addr") + 1] == "one" and "--force_multi" in several
    assert several[several.index("--master_port") + 1] == "7"
    for odd in ("a b", "$(touch x)", "x;y", "é"):
        with pytest.raises(UserError, match="passes a shell on each host"):
            _deepspeed(work_in(tmp_path / odd), options, hosts)


def test_the_own_address_is_the_one_that_others_reach():
    assert address_towards("127.0.0.1") is None and address_towards("no-such-host.invalid") is None
    assert interface_towards("127.0.0.1") is None


STAND_IN = """
import os, signal, sys, time
what, folder = sys.argv[1:]
def save(*_):
    from pathlib import Path
    from ds_distill.process.failures import Failure, record_failure
    record_failure(Path(folder), Failure(0, "here", time.time(), "stopped", "with a checkpoint"))
    os._exit(1)
if what in ("deaf", "waits", "saves"):
    signal.signal(signal.SIGTERM, save if what == "saves" else signal.SIG_IGN)
open(os.path.join(folder, "up"), "w").close()
while not (what == "waits" and os.path.exists(os.path.join(folder, ".stop"))):
    time.sleep(0.05)
save()
"""


@pytest.fixture
def started(tmp_path, monkeypatch, command_environment):
    """Start an engine whose place a stand-in takes."""
    environment = {**command_environment, **marked()}
    folder = tmp_path / "run"
    folder.mkdir()
    popen = subprocess.Popen

    def in_its_place(command, **options):
        return popen([sys.executable, "-c", STAND_IN, command[5], str(folder)], **options)

    def start(what, asks=False, grace=30.0):
        monkeypatch.setattr(launch.subprocess, "Popen", in_its_place)
        engine = Engine(["torchrun", what], environment, folder, grace)
        engine._asks = asks
        assert within(60, (folder / "up").exists)
        return engine

    start.folder, start.environment = folder, environment
    return start


@pytest.mark.parametrize(
    ("what", "options", "at_once", "saved"),
    [
        ("saves", {}, False, True),
        ("deaf", {"grace": 1.0}, False, False),
        ("deaf", {}, True, False),  # after a second signal
        ("waits", {"asks": True}, False, True),  # by a file: DeepSpeed's runner cuts their output
    ],
)
def test_an_engine_is_asked_and_then_killed(what, options, at_once, saved, started, monkeypatch):
    monkeypatch.setattr(launch, "MARGIN_SECONDS", 0.5)
    engine, begun = started(what, **options), time.monotonic()
    assert engine.stop(at_once=at_once) is saved
    assert "grace" not in options or time.monotonic() - begun > 1
    assert not (started.folder / STOP).exists() and not left_of(started.environment)


@pytest.mark.parametrize(("kind", "ends"), [("stopped", True), ("mistake", True), ("fault", False)])
def test_what_no_restart_mends_ends_the_engine(kind, ends, started, monkeypatch):
    """Of several machines the others would start anew, and wait for this one."""
    monkeypatch.setattr(launch, "MARGIN_SECONDS", 0.2)
    engine = started("anew")
    record_failure(started.folder, Failure(0, "a", time.time(), kind, "why"))
    waiting = threading.Thread(target=engine.wait, daemon=True)
    waiting.start()
    waiting.join(10 if ends else 4)
    assert waiting.is_alive() is not ends
    engine.stop(at_once=True)


def test_an_engine_ends_with_a_launch_that_is_killed(started):
    """Also one that hears no signal."""
    child = fork(lambda: (started("deaf"), time.sleep(60)))
    assert within(60, (started.folder / "up").exists)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert within(5, lambda: not left_of(started.environment))


# ------------------------------------------------------------------------------------- ends


@pytest.fixture
def conclude(tmp_path, monkeypatch, capfd):
    """The exit code and the message after a launch."""
    monkeypatch.setattr(sys, "argv", ["ds-distill", "launch", "my.yaml"])

    def conclude(code):
        with pytest.raises(SystemExit) as stopped:
            _conclude(work_in(tmp_path), code)
        return stopped.value.code, capfd.readouterr().err

    return conclude


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (0, "there is no "),
        (137, "its ranks were ended by SIGKILL, as the system does when memory runs out."),
        (139, "its ranks were ended by SIGSEGV."),
        (1, "the exit code of its ranks is 1."),
        (200, "the exit code of its ranks is 200."),
    ],
)
def test_an_engines_exit_code_is_explained(code, reason, conclude):
    ended, text = conclude(code)
    assert ended == 1 and f"the run stopped: {reason}" in text
    assert "Nothing was written. Start again with: ds-distill launch my.yaml" in text


def test_the_folder_tells_what_came_of_a_run(tmp_path, conclude):
    for rank, kind, message in ((1, "lost", "connection closed"), (3, "fault", "KeyError: 'x'.")):
        record_failure(tmp_path, Failure(rank, "two", 5.0 + rank, kind, message))
    code, text = conclude(1)
    assert code == 1 and "the run stopped: rank 3 on two: KeyError: 'x'. Nothing" in text
    (tmp_path / "results.json").touch()
    assert conclude(0)[0] == 1, "DeepSpeed's of a signal"
    record_failure(tmp_path, Failure(2, "one", 3.0, "stopped", "stopped by SIGTERM"))
    code, text = conclude(1)
    assert code == 75 and text.startswith("ds-distill: stopped. Nothing was written.")
    record_failure(tmp_path, Failure(0, "one", 2.0, "mistake", "no such split"))
    assert conclude(1) == (2, ""), "the rank has printed it"


def test_status_tells_what_came_of_a_run(tmp_path):
    folder = tmp_path / "run"
    run = RunFolder(folder)

    def told():
        done = command_line("status", folder, code=None)
        return done.exit_code, done.output.replace("\n", " ")

    with pytest.raises(UserError, match="holds no run"):
        told()
    folder.mkdir()
    (folder / "recipe.yaml").touch()
    code, text = told()
    assert code == 75 and "it was killed" in text and "--resume" in text
    kinds = [("fault", 1), ("stopped", 75), ("mistake", 2)]
    for number, (kind, expected) in enumerate(kinds):
        record_failure(folder, Failure(9 - number, "a", 9.0 - number, kind, f"{kind} here"))
        code, text = told()
        assert code == expected and f"{kind} here. {folder} keeps" in text
    clear_failures(folder)
    run.results.touch()
    assert told() == (0, f"{folder}: finished. See {run.report}. ")

    def hold():
        with leased(folder, print):
            time.sleep(60)

    holder = fork(hold)
    try:
        assert within(20, (folder / "lock").exists)
        code, text = told()
        assert code == 3 and f"in use by process {holder}" in text
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def test_ranks_with_other_software_are_refused():
    class OfMain:
        rank = 1

        def from_main(self, work):
            return {**work(), "torch": "1.0", "code of ds_distill": "abc"}

    with pytest.raises(UserError) as error:
        refuse_other_start(load_recipe("quickstart"), OfMain())
    text = str(error.value)
    assert text.startswith("rank 1 on ") and "torch (" in text and "there '1.0')" in text
    assert "code of ds_distill" in text and "Install the same" in text


def test_a_launch_that_began_no_run_leaves_a_folder_that_can_be_used(tmp_path, toy_settings):
    (tmp_path / LAUNCHED).touch()
    recipe = Recipe.model_validate(toy_settings)
    RunFolder(tmp_path).check_new_or_same(recipe, resume=False)
    (tmp_path / "other").touch()
    with pytest.raises(UserError, match="holds other"):
        RunFolder(tmp_path).check_new_or_same(recipe, resume=False)


def test_the_launches_of_all_machines_write_what_ranks_read_at_once(tmp_path):
    """Two jobs of Slurm's srun began in the same millisecond, and one found its file gone."""
    with ThreadPoolExecutor(8) as machines:
        for done in [machines.submit(write_for_ranks, tmp_path, "name: x\n") for _ in range(200)]:
            done.result()
    assert [path.name for path in tmp_path.iterdir()] == [LAUNCHED]
    (tmp_path / f"{LAUNCHED}.of-a-launch-that-was-killed").touch()
    RunFolder(tmp_path).check_new_or_same(None, False)


# ------------------------------------------------------------------------------------ Slurm

TELL = """
import json, os, sys
from ds_distill.process.identity import heed_slurm, is_rank
heed_slurm()
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(*(os.environ[name] for name in names) if is_rank() else ())
"""


@pytest.mark.parametrize(
    ("command", "step", "expected"),
    [
        ("run", {}, "9 1 16 8 node003 20045"),
        ("cache", {"SLURM_STEP_NODELIST": "gpu1,gpu2"}, "9 1 16 8 gpu1 20045"),
        ("run", {"MASTER_ADDR": "ib-1"}, "9 1 16 8 ib-1 20045"),
        ("run", {"SLURM_STEP_NUM_TASKS": "1"}, ""),
        ("launch", {}, ""),  # of one task a node, which starts the ranks
        ("run", {"RANK": "3", "LOCAL_RANK": "3"}, None),
    ],
)
def test_tasks_of_srun_are_ranks(command, step, expected):
    variables = {
        **{"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "10045"},
        **{"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NODELIST": "node[003-004,7],x1"},
        **{"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_ID": "0"},
    }
    group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in group}
    done = python(TELL, command, env={**clean, **variables, **step}, code=expected is None)
    if expected is None:
        assert "KeyError: 'WORLD_SIZE'" in done.stderr, "the launcher's own are left alone"
    else:
        assert done.stdout.strip() == expected, done.stderr
