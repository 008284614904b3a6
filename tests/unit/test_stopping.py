"""Signals to processes that a run has forked are not signals to the run; what a run's exit code
says after one."""

import copy
import os
import signal

import pytest
from processes import python

from ds_distill.recipe import Recipe
from ds_distill.run.folder import RunFolder

PROGRAM = """
import multiprocessing, os, signal, sys, time
from ds_distill.process.signals import end_as_rank, exit_on_signal

if "RANK" in os.environ:
    end_as_rank()
with exit_on_signal(lambda: "the run's line"):
    for _ in range(20):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]  # leaving the block sends SIGTERM to both
    time.sleep(0.5)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
"""


@pytest.mark.parametrize("rank", [{}, {"RANK": "0"}], ids=["a lone process", "a rank"])
def test_ending_a_pool_does_not_end_the_run(rank):
    inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = python(PROGRAM, env={**inherited, **rank}, code=128 + signal.SIGTERM)
    assert done.stdout == "goes on\n", done
    line = "ds-distill: stopped by SIGTERM. the run's line\n"
    assert done.stderr == ("" if rank else line)  # of a rank it is the launcher's


STOPPED_AFTER = """
import os, signal, sys, time
from pathlib import Path
from ds_distill.process.signals import exit_on_signal
from ds_distill.recipe import load_recipe
from ds_distill.run.folder import RunFolder

recipe, path, written = sys.argv[1:]
progress = RunFolder(Path(path)).progress(load_recipe(recipe))
with exit_on_signal(lambda: "the run's line", has_saved=progress):
    if written:
        Path(path, written).parent.mkdir(parents=True, exist_ok=True)
        Path(path, written).write_text("{}")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
"""


def test_the_exit_code_says_whether_a_start_has_saved_work(toy_recipe, tmp_path):
    """Outside a training it was always 143, with which a Slurm job is not queued again. It still is
    for a start that has saved nothing, and would begin the same again."""
    inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
    folder = tmp_path / "run"
    for written, code in (
        ("metrics.jsonl", 143),
        ("phases/00-teach-first.json", 75),
        ("phases/00-teach-first.json", 143),  # an earlier start's
        ("models/01-second/training.json", 75),
        ("", 143),
    ):
        done = python(STOPPED_AFTER, toy_recipe, folder, written, env=inherited, code=code)
        assert done.stderr == "ds-distill: stopped by SIGTERM. the run's line\n", written


def test_blocks_of_a_cache_are_work_that_is_saved(toy_settings, tmp_path):
    """Also of one outside the run's folder, and when the build has ended."""
    settings = copy.deepcopy(toy_settings)
    [cache] = [phase["cache"] for phase in settings["phases"] if "cache" in phase]
    cache["folder"] = str(tmp_path / "shared")
    recipe, run = Recipe.model_validate(settings), RunFolder(tmp_path / "run")
    block = tmp_path / "shared" / "first" / "shard-00000000.arrow"
    has_saved = run.progress(recipe)
    block.parent.mkdir(parents=True)
    assert not has_saved()
    block.touch()
    assert has_saved()
    has_saved = run.progress(recipe)
    assert not has_saved()
    (tmp_path / "shared" / "manifest.json").touch()
    assert has_saved()
