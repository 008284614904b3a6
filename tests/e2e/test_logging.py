"""What a run leaves: metrics.jsonl, wandb, TensorBoard, what the console without a terminal shows,
and the rest of its folder."""

import html
import json
import os
import re
from collections import defaultdict

import pytest
from processes import events as every_event
from processes import python
from runs import command_line, evaluation, results, written

from ds_distill.recipe import load_recipe

SETTINGS = [
    "training.epochs=3",
    "logging.every=4",
    "phases.distil.split=train",
    "phases.cache.splits=train",
    "phases.distil.losses.cross_entropy.weight=0.5",
]

OFTEN = """
import ds_distill.run.events
from ds_distill.cli import main
ds_distill.run.events.PLAIN_LINE_SECONDS = 0.0
main()
"""
"""The command line, with a line of progress at every step."""

CANARY = "c4n4ry" * 7
"""Stands in variables of the run's environment that hold secrets."""


@pytest.fixture(scope="module")
def logged(tmp_path_factory, toy_settings, ds_distill):
    """A run with all logs in its usual place, not on a terminal: (its folder, the working folder,
    its output)."""
    here = tmp_path_factory.mktemp("here")
    written(toy_settings, here, "toy")
    logs = ["logging.wandb=toys", "logging.tensorboard=true"]
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_API_KEY": CANARY, "DB_PASSWORD": CANARY}
    done = python(OFTEN, "run", "toy.yaml", *SETTINGS, *logs, cwd=here, env=env)
    return here / "runs" / "toy", here, done.stdout + done.stderr


@pytest.fixture(scope="module")
def events(logged):
    found = defaultdict(list)
    for event in every_event(logged[0]):
        found[event["event"]].append(event)
    return found


@pytest.fixture(scope="module")
def finished(logged):
    return logged[0]


def test_a_password_in_the_environment_is_in_no_file_and_no_output(logged):
    folder, here, output = logged
    files = [file for root in (folder, here) for file in root.rglob("*") if file.is_file()]
    assert len(files) > 20
    assert not [file for file in files if CANARY.encode() in file.read_bytes()]
    assert CANARY not in output


def test_a_log_without_a_terminal_says_what_comes_and_in_every_line_loss_rate_and_speed(logged):
    lines = logged[2].splitlines()
    assert "Phases: teach-first, teach-second, expertise, cache, distil, evaluate." in lines
    progress = [re.fullmatch(r"  (\w+): (\d+)/(\d+)(.*) left", line) for line in lines]
    steps = [(one[1], int(one[2]), one[4]) for one in progress if one and "loss" in one[4]]
    assert {name for name, *_ in steps} == {"first", "second", "average", "expertise"}
    later = [rest for _, step, rest in steps if step > 20]
    assert later and all(re.search(r"loss \d\.\d+, lr \S+, [\d,]+ tokens/s", one) for one in later)


def test_training_events_hold_losses_rate_and_speed(events):
    for event in events["train"]:
        terms = {"kl", "cross_entropy"} if event["number"] == 4 else {"cross_entropy"}
        assert terms <= event.keys()
        assert event["loss"] == pytest.approx(sum(event[term] for term in terms), rel=1e-5)
        assert 0 <= event["learning_rate"] <= 1e-2
    later = [event for event in events["train"] if event["step"] > 12]
    assert later
    for event in later:
        assert event["examples_per_second"] > 0
        # Sentences of the toy task have 7 to 13 tokens.
        ratio = event["tokens_per_second"] / event["examples_per_second"]
        assert 6.99 <= ratio <= 13.01  # both rates are rounded
    rates = [event["learning_rate"] for event in events["train"] if event["phase"] == "average"]
    assert rates[-1] == pytest.approx(0, abs=1e-9) and max(rates) > 5e-3


def test_losses_fall(events):
    by_model = defaultdict(list)
    for event in events["train"]:
        by_model[event["phase"]].append(event["loss"])
    assert set(by_model) == {"first", "second", "average", "expertise"}
    for losses in by_model.values():
        assert losses[-1] < losses[0]


def test_epochs_tell_the_share_of_padding_and_validation_the_accuracy(events):
    trained = [("first", 3), ("second", 3), ("average", 3), ("expertise", 3)]
    for kind in ("epoch", "validation"):
        found = [(event["phase"], event["epoch"]) for event in events[kind]]
        assert found == [(model, epoch) for model, epochs in trained for epoch in range(epochs)]
    # Batches of like length: far below the 40% that random batches of 16 have here.
    assert all(0 <= event["padding_share"] < 0.15 for event in events["epoch"])
    assert all(0 <= event["accuracy"] <= 1 for event in events["validation"])


def test_phases_and_evaluation_are_logged(events, logged):
    assert [event["phase"] for event in events["phase"]] == [
        *("teach-first", "teach-second", "expertise", "cache", "distil", "evaluate")
    ]
    assert all(event["seconds"] > 0 for event in events["phase"])
    logged_accuracy = {event["model"]: event["accuracy"] for event in events["evaluation"]}
    models = evaluation(logged[0])["models"]
    assert logged_accuracy == {name: model["accuracy"] for name, model in models.items()}


def test_wandb_keeps_its_files_in_the_run(logged):
    folder, here, _ = logged
    assert sorted(path.name for path in here.iterdir()) == ["runs", "toy.yaml"]
    assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def test_tensorboard_files_can_be_read(logged, events):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(logged[0] / "tensorboard"))
    board.Reload()
    losses = [event["loss"] for event in events["train"] if event["phase"] == "average"]
    read = [scalar.value for scalar in board.Scalars("04-average/train/loss")]
    assert read == pytest.approx(losses)
    assert "00-first/validation/accuracy" in board.Tags()["scalars"]


CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f]")


def test_without_a_terminal_there_are_plain_lines_only(logged):
    _, _, output = logged
    lines = [line for line in output.splitlines() if not line.startswith("wandb:")]
    ours = [line for line in lines if not line.endswith(" left")]
    assert not CONTROL.search("\n".join(lines))
    assert "━" not in output
    assert len(ours) < 65, "\n".join(ours)
    for model in ("first", "second", "average", "expertise"):
        scores = [line for line in ours if re.match(rf"  {model}: accuracy \d+\.\d% on val", line)]
        assert [line.partition("epoch ")[2][0] for line in scores] == ["1", "2", "3"]
    for number, phase in enumerate(["teach-first", "teach-second", "expertise", "cache"], 1):
        assert f"[{number}/6] {phase}" in ours
    assert ours[-3].startswith("Report   ") and ours[-1].endswith("/student")


# ------------------------------------------------------------------------ what else a run leaves


def test_a_run_leaves_what_is_promised(finished, toy_settings):
    for name in ("recipe.yaml", "environment.json", "metrics.jsonl", "results.json", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    assert not (finished / "checkpoints").exists()
    own = [path for path in finished.rglob("*") if "wandb" not in path.parts]
    odd = [path for path in own if path.name.startswith((".", "tmp"))]
    assert {path.name for path in odd} <= {".lock"}, "of the cache: builds begin and end under it"
    [cached] = (finished / "cache").iterdir()
    command_line("cache", "verify", cached)
    resolved = load_recipe(str(finished / "recipe.yaml"))
    assert resolved.task.data.path == toy_settings["task"]["data"]["path"]
    environment = json.loads((finished / "environment.json").read_text())
    assert {"ds_distill", "commit", "python", "packages", "gpus", "ranks"} <= environment.keys()
    page = (finished / "report.html").read_text(encoding="utf-8")
    shown = html.unescape(re.sub("<[^>]+>", "", page))
    assert results(finished)["verdict"].replace("`", "") in shown
    assert page.count("<figure") >= 2
    tokenizer = json.loads((finished / "student" / "tokenizer.json").read_text())
    assert tokenizer["truncation"] is tokenizer["padding"] is None, "as the model came with it"


def test_the_models_of_a_finished_run_are_profiled(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("ds_distill.profiling.models.SECONDS", 0.02)
    files = [tmp_path / "profile.json", tmp_path / "quality.svg"]
    done = command_line("profile", finished, "--json", files[0], "--figure", files[1])
    found = json.loads(files[0].read_text())["models"]
    evaluated = evaluation(finished)["models"]
    assert [model["name"] for model in found] == list(evaluated)
    for model in found:
        assert model["score"] == evaluated[model["name"]]["accuracy"]
        assert [(case["batch"], case["length"]) for case in model["cases"]] == [(1, 32), (32, 32)]
        for case in model["cases"]:
            assert len(case["seconds"]) >= 5 and case["peak"] is None
            p50, p90, p99 = case["percentiles"]
            assert min(case["seconds"]) <= p50
            assert [p90 is None, p99 is None] == [len(case["seconds"]) < n for n in (10, 100)]
        assert f"{model['parameters'] / 1e6:.1f} M" in done.output
        assert model["name"].encode() in files[1].read_bytes()
    students = [model for model in found if model["role"] == "student"]
    largest = max(found, key=lambda model: model["parameters"])
    assert students and all(model["parameters"] < largest["parameters"] for model in students)


def test_the_better_student_is_shipped(finished):
    distilled = {model["output"]: model for model in results(finished)["phases"][4]["trained"]}
    best = max(distilled.values(), key=lambda model: model["choosing"]["score"])
    assert results(finished)["student"] == best["output"]
