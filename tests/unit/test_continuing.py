"""A training that was stopped goes on with the weights and scores that belong together, and says
where."""

import contextlib
import copy
import io
import itertools
import os
import shutil
import signal

import pytest
from processes import events, python
from rich.console import Console
from runs import evaluation, loaded, logged, written
from safetensors.torch import load_file, save_file

from ds_distill import load_recipe, run_recipe
from ds_distill.errors import UserError
from ds_distill.files import new_folder, read_json
from ds_distill.process import signals as stopping
from ds_distill.process.signals import Stopped
from ds_distill.run.events import LOG_FILE_WIDTH, Bar, RunLog
from ds_distill.run.execute import execute
from ds_distill.run.folder import TRAINING_RECORD, RunFolder
from ds_distill.training import checkpoints
from ds_distill.training.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("in_this_process")

STOPPED_BY_A_KILL = """
import os, signal, sys
from ds_distill import load_recipe, run_recipe
from ds_distill.training.checkpoints import Checkpoints

save = Checkpoints.save

def killed(self, engine, step, progress):
    if step == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, engine, step, progress)

Checkpoints.save = killed
run_recipe(load_recipe(sys.argv[1]), sys.argv[2])
"""
"""Runs a recipe until the checkpoint of a step is to be written."""


@pytest.fixture
def recipe(toy_settings, tmp_path):
    """One training of three epochs of 13 steps, judged on the examples that choose its epoch."""
    settings = copy.deepcopy(toy_settings)
    settings["teachers"] = {}
    settings["training"] |= {"epochs": 3, "dropout": 0.0, "learning_rate": 3e-3}
    settings["phases"] = [
        {"fine-tune": {"models": "student"}},
        {"evaluate": {"split": "validation"}},
    ]
    return written(settings, tmp_path)


def stop_before(step, recipe, folder, environment):
    python(STOPPED_BY_A_KILL, recipe, folder, step, env=environment, code=-signal.SIGKILL)


def test_a_kill_between_the_best_weights_and_the_checkpoint(
    recipe, tmp_path, command_environment, capsys
):
    """The second epoch is better and its weights are kept; the run goes on from the first one's end
    so that none betters that."""
    folder = tmp_path / "run"
    stop_before(26, recipe, folder, command_environment)
    assert [path.name for path in folder.glob("checkpoints/*/step-*")] == ["step-00000013"]
    scores = [event["accuracy"] for event in logged(folder, "validation")]
    assert scores[1] > scores[0]
    resumed = load_recipe(recipe, ["training.learning_rate=1e-12"])
    run_recipe(resumed, folder, resume=True)
    said = capsys.readouterr().out
    assert "student: continues at step 13 of 39; it had come to step 26\n" in said
    shown = f"student: accuracy {scores[0]:.1%} on validation after epoch"
    assert f"{shown} 2\n" in said and f"{shown} 3\n" in said
    [record] = read_json(folder / "phases" / "00-fine-tune.json")["trained"]
    assert (record["choosing"]["epoch"], record["choosing"]["score"]) == (0, scores[0])
    assert evaluation(folder)["models"]["student"]["accuracy"] == scores[0]
    assert not (folder / "checkpoints").exists()


def test_checkpoints_come_by_time_and_a_stop_is_saved_at_its_step(recipe, tmp_path, monkeypatch):
    """It was at the next report, and checkpoints at an epoch's end alone."""
    monkeypatch.setattr(stopping, "_requested", None)
    minutes, saved, save = itertools.count(), list[int](), Checkpoints.save
    monkeypatch.setattr(checkpoints, "clock", lambda: 60.0 * next(minutes))

    def noted(*given):
        saved.append(given[2])
        save(*given)
        if saved[-1] == 8:
            assert stopping._request_stop(signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "save", noted)
    overrides = ["training.save_minutes=4", "logging.every=1000"]
    with pytest.raises(Stopped, match=r"with a checkpoint of student at step 9$"):
        run_recipe(load_recipe(recipe, overrides), tmp_path / "run")
    assert saved == [4, 8, 9]


def test_a_request_after_the_last_step_of_a_training(recipe, tmp_path, monkeypatch):
    """The phases after it would not look for one."""
    monkeypatch.setattr(stopping, "_requested", None)
    publish = RunFolder.publish_models

    def asked(*given):
        assert stopping._request_stop(signal.SIGINT)
        publish(*given)

    monkeypatch.setattr(RunFolder, "publish_models", asked)
    with pytest.raises(Stopped, match=r"^stopped by Ctrl-C, with student trained$") as stopped:
        run_recipe(load_recipe(recipe, ["training.epochs=1"]), tmp_path / "run")
    assert stopped.value.exit_code == 130
    assert RunFolder(tmp_path / "run").finished_training(0, "student", ["student"])


def record_of(output):
    return {"output": output, "split": "train", "examples": 1, "steps": 1, "choosing": None}


def keep(folder, epoch, *outputs):
    for output in outputs:
        with new_folder(folder.kept(0, "both", epoch) / output) as aside:
            (aside / "weights").write_text(f"{output} {epoch}")


def test_models_that_no_checkpoint_names_go(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for epoch in range(4):
        keep(folder, epoch, "student")
    folder.forget_models(0, "both", [0, 2])
    kept = folder.checkpoints(0, "both") / "kept"
    assert sorted(path.name for path in kept.iterdir()) == ["epoch-0001", "epoch-0003"]


@pytest.mark.parametrize("renames", range(3))
def test_a_kill_while_models_are_published(renames, tmp_path, monkeypatch):
    """Before the last rename the training has not ended: it goes on from its checkpoint."""
    path, both = tmp_path / "run", ("one", "other")
    folder = RunFolder(path)
    path.mkdir()
    keep(folder, 0, *both)
    keep(folder, 1, *both)
    rename, left = os.rename, [renames]

    def killed(*given):
        if not left[0]:
            raise InterruptedError
        left[0] -= 1
        rename(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with contextlib.suppress(InterruptedError):
            folder.publish_models(0, "both", 0, {output: record_of(output) for output in both})
    if renames < 2:
        assert folder.finished_training(0, "both", both) is None
        keep(folder, 1, *both)
        folder.publish_models(0, "both", 1, {output: record_of(output) for output in both})
    assert folder.finished_training(0, "both", both) == [record_of(output) for output in both]
    for output in both:
        weights = (folder.model(0, output) / "weights").read_text()
        assert weights == f"{output} {0 if renames > both.index(output) else 1}"
    assert sorted(file.name for file in path.iterdir()) == ["models"]
    (folder.model(0, "other") / TRAINING_RECORD).unlink()
    assert folder.finished_training(0, "both", both) is None, "that one is to be trained again"


def test_a_phase_takes_the_seconds_of_all_its_starts(recipe, tmp_path, monkeypatch):
    now, loaded = [1000.0], load_recipe(recipe)
    monkeypatch.setattr("ds_distill.run.events.time.time", lambda: now[0])

    def start(*seconds, resumed=True):
        """Of phase 1, with a step after each of these seconds, and as long again until a kill."""
        now[0] += 500.0
        log = RunLog(tmp_path, loaded, enabled=True, resumed=resumed)
        before = log.start_phase(1, "fine-tune")
        for step, passed in enumerate(seconds):
            now[0] += passed
            log.event("train", phase="student", step=step)
        now[0] += sum(seconds)
        return before

    RunLog(tmp_path, loaded, enabled=True, resumed=False).event("phase", phase="an earlier one")
    assert start(10.0, 20.0, resumed=False) == 0.0
    assert start() == 30.0
    assert start(5.0) == 30.0
    assert start() == 35.0
    names = [event["event"] for event in events(tmp_path)]
    assert names == ["phase", "train", "train", "train", "start"]


def test_a_log_file_has_loss_rate_and_time_left(monkeypatch):
    """What a report said stands in the lines of the steps after it; a resumed training's speed is
    that of its own steps."""
    now, file = [100.0], io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bar = Bar(Console(file=file, width=LOG_FILE_WIDTH), "student", 100, None, done=40)
    for step in range(41, 51):
        now[0] += 8.0
        bar.advance()
        bar.advance(0, "loss 0.5000, lr 0.001" if step == 43 else "")
    assert file.getvalue().splitlines() == [
        "  student: 44/100, loss 0.5000, lr 0.001, 7:28 left",
        "  student: 48/100, loss 0.5000, lr 0.001, 6:56 left",
    ]


def test_what_a_run_reads_may_have_changed_before_it_goes_on(toy_settings, tmp_path, capsys):
    """Labels have numbers in what is done: a class of another name would move the others. A model
    that is another one is told."""
    settings = copy.deepcopy(toy_settings)
    task, model = tmp_path / "task", tmp_path / "model"
    shutil.copytree(settings["task"]["data"]["path"], task)
    shutil.copytree(settings["student"]["model"], model)
    (task / "labels.json").unlink()
    settings["task"]["data"]["path"], settings["teachers"] = str(task), {}
    settings["student"]["model"] = str(model)
    settings["training"] |= {"epochs": 1}
    settings["phases"] = [{"fine-tune": {"models": "student"}}, {"evaluate": {"split": "test"}}]
    folder, recipe = tmp_path / "run", loaded(settings, tmp_path)
    execute(recipe, folder, first=1)

    def rename(before, after):
        for file in task.glob("*.jsonl"):
            file.write_text(file.read_text().replace(before, after))

    rename('"animal"', '"zoo"')
    with pytest.raises(UserError, match=r"task\.labels of the data are not those.*'zoo'.*'animal'"):
        run_recipe(recipe, folder, resume=True)
    assert not (folder / "results.json").exists()
    rename('"zoo"', '"animal"')
    weights = load_file(model / "model.safetensors")
    save_file({name: of + 1 for name, of in weights.items()}, model / "model.safetensors")
    capsys.readouterr()
    run_recipe(recipe, folder, resume=True)
    assert "Note: student.model: is not what the run began with" in capsys.readouterr().out


def test_a_cache_that_another_run_has_made_anew(masked_lm_settings, tmp_path):
    """In a folder that both name, after the first one's cache phase: of the same teacher, at
    another temperature."""
    task, runs = copy.deepcopy(masked_lm_settings["task"]), {}
    task.setdefault("masking", {})["variants"] = 1
    for temperature in (2.0, 8.0):
        codec = {"name": "compact", "temperature": temperature}
        phases = [
            {"fine-tune": {"models": "bert", "epochs": 1}},
            {"cache": {"splits": "train", "folder": str(tmp_path / "cache"), "codec": codec}},
            {"distil": {"teachers": "cached", "losses": {"kl": {"temperature": temperature}}}},
        ]
        made = {**masked_lm_settings, "task": task, "phases": phases}
        runs[temperature] = loaded(made, tmp_path)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        execute(runs[temperature], tmp_path / f"run-{temperature}", first=2)
    with pytest.raises(UserError, match=r"cached with temperature 8.0, and the run has 2.0"):
        run_recipe(runs[2.0], tmp_path / "run-2.0", resume=True)
    run_recipe(runs[8.0], tmp_path / "run-8.0", resume=True)
