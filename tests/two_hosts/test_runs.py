"""Runs on two hosts, by torchrun and by DeepSpeed's runner: the same student as on one; stopped,
killed and continued."""

import json
import shutil
from contextlib import ExitStack
from functools import partial

import pytest
from processes import left_of, marked, within
from runs import check_same
from two_hosts.launches import SESSION, Run, rank, start_both
from two_hosts.network import inner
from two_hosts.relay import Way


def test_torchrun_on_two_hosts(hosts, whole, environment, tmp_path):
    folder = tmp_path / "run"
    bad = Way(loss=0.02, delay=0.002)
    hosts.cable_of_b(bad, bad)
    first, second = start_both(hosts, folder, environment, "--max-restarts", "3")
    first.is_training()
    second.terminate()
    for output in (first.end(75, seconds=120), second.end(75, seconds=120)):
        assert "stopped" in output.splitlines()[-1] and "Continue with: " in output
    assert within(30, lambda: not left_of(environment))

    hosts.cable_of_b()
    both = start_both(hosts, folder, environment, "--max-restarts", "1")
    both[0].is_training()
    rank(environment, 1).kill()
    for run in both:
        run.end(0)
    assert json.loads((folder / "environment.json").read_text())["ranks"] == 2
    check_same(folder, whole)
    assert within(30, lambda: not left_of(environment))


def test_a_host_that_is_gone_ends_the_run_and_it_goes_on(hosts, whole, environment, tmp_path):
    """By a kill of all that runs there, and by its cable."""
    folder = tmp_path / "run"
    limits = ["--grace", "5", "timeout_minutes=0.5"]
    first, second = start_both(hosts, folder, environment, *limits)
    first.is_training()
    for one in (inner(second.process), *inner(second.process).children(recursive=True)):
        one.kill()
    assert "the run stopped: rank " in first.end(1, seconds=180)
    second.process.wait(30)
    assert within(60, lambda: not left_of(environment))

    # Large frames are lost on the way: both ranks are alive, and wait for each other.
    first, second = start_both(hosts, folder, environment, *limits)
    first.is_training()
    hosts.cable_of_b(Way(largest=700), Way(largest=700))
    output = first.end(1, seconds=240)
    assert "no rank has gone on for 30 seconds" in output, output
    hosts.cable_of_b()
    second.process.wait(240)
    assert within(60, lambda: not left_of(environment))
    for run in start_both(hosts, folder, environment, *limits):
        run.end(0)
    check_same(folder, whole)


def test_deepspeeds_runner_on_two_hosts(hosts, whole, environment, tmp_path):
    """By pdsh. Nothing of the recipe passes its shells."""
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh here (Debian: apt-get install pdsh)")
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=2\n")
    folder = tmp_path / "run"
    session = {name: environment[name] for name in SESSION if name in environment}
    session |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    session |= {name: environment[name] for name in marked()}
    options = ["--hostfile", "hosts", "--include", "node-a@node-b:1"]
    with ExitStack() as running:
        for name in ("node-a", "node-b"):
            running.enter_context(hosts.sshd(name, 22, session))
        first = Run(hosts, folder, environment, *options)
        first.is_training()
        first.terminate()
        output = first.end(75, seconds=120)
        assert output.splitlines()[-1].startswith("ds-distill: stopped by SIGTERM.")
        assert within(30, partial(only_sshd, environment))
        second = Run(hosts, folder, environment, *options, "--resume")
        second.is_training()
        rank(environment, 1).kill()
        assert "the run stopped: rank 1 on node-b: it " in second.end(1, seconds=180)
        assert within(60, partial(only_sshd, environment))
        Run(hosts, folder, environment, *options, "--resume").end(0)
    assert json.loads((folder / "environment.json").read_text())["ranks"] == 2
    check_same(folder, whole)
    assert not list(tmp_path.rglob("canary"))


def only_sshd(environment):
    return all(one.name() == "sshd" for one in left_of(environment))
