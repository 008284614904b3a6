"""Sweeps whose runs are launches of two ranks each: they train as one process does; stopped or
killed no rank goes on, and the same command continues; a launch that fails is named while the
others' results stand."""

import signal
import subprocess
import sys

import pytest
from ci.test_sweep import recipe  # noqa: F401
from processes import left_of, marked, prepare, within
from runs import losses, results

RATES = ["1e-2", "1e30"]
"""Under the second one the loss is not finite."""


def test_launched_seeds_have_the_losses_of_one_process(recipe, tmp_path, ds_distill):
    one, two = tmp_path / "one", tmp_path / "two"
    done = ds_distill("sweep", recipe, "seed=1,2", "--folder", one, timeout=600)
    command = ["sweep", recipe, "seed=1,2", "--num-gpus", "2", "--folder", two]
    done = ds_distill(*command, timeout=600)
    assert "Each has 2 ranks; at once: 1" in done.stdout
    for name in ("seed=1", "seed=2"):
        assert results(two / "runs" / name)["environment"]["ranks"] == 2
        for training in ("first", "student"):
            alone, launched = (losses(of / "runs" / name, training) for of in (one, two))
            assert len(alone) > 10 and launched == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_of_launches_ends_with_all_ranks_and_goes_on(
    recipe, how, tmp_path, ds_distill, command_environment
):
    environment, folder = {**command_environment, **marked()}, tmp_path / "sweep"
    rates = f"phases.distil.learning_rate={','.join(RATES)}"
    command = ["sweep", str(recipe), "seed=1,2", rates, "--num-gpus", "2", "--folder", str(folder)]
    with subprocess.Popen(
        [sys.executable, "-m", "ds_distill", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,  # it heeds SIGINT, also where the tests run in the background
        text=True,
    ) as stopped:
        within(240, lambda: list(folder.glob("shared/*/models/*")))
        assert len(left_of(environment)) > 3, "the sweep, a launch and two ranks"
        stopped.send_signal(how)
        stopped.communicate(timeout=60)
    assert stopped.returncode == (130 if how is signal.SIGINT else -how)
    assert within(30, lambda: not left_of(environment)), "ranks go on"

    done = ds_distill(*command, "--resume", timeout=1800, code=1)
    found = results(folder)
    good, bad = ([f"seed={seed},learning_rate={rate}" for seed in (1, 2)] for rate in RATES)
    assert found["missing"] == bad
    assert done.stdout.count("failed with exit code") == 2
    for name in good:
        assert results(folder / "runs" / name)["environment"]["ranks"] == 2
