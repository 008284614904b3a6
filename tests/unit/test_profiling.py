"""What a profile counts, and how a recipe is made short for it."""

import pytest
import torch
from passes import model_of, of, real, run
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from ds_distill.cli import app
from ds_distill.errors import UserError
from ds_distill.profiling.models import _as_json, models_tables
from ds_distill.profiling.trainings import (
    flops_of,
    profile_trainings,
    shortening,
    trainings_tables,
)
from ds_distill.recipe import builtin_recipes, load_recipe
from ds_distill.recipe.load import small_form
from ds_distill.recipe.phases import TrainingPhase
from ds_distill.run.observer import Amount
from ds_distill.run.speed import Case
from ds_distill.training.meter import WARM_UP_STEPS

LENGTHS = [9, 40, 23]


def counted(planned, trains, rows):
    """By torch's counter: each example alone, so that there is no padding."""
    total = 0
    for length in LENGTHS:
        one = of(1, length, trains, rows=rows if planned.classes is None else None)
        model, view = real(planned, one)
        view.attention_mask.fill_(1)
        run(model, view, trains)  # the first pass looks how it can run
        with FlopCounterMode(display=False) as counter:
            run(model, view, trains)
        total += counter.get_total_flops()
    return total


@pytest.mark.parametrize("name", ["bert", "distilbert"])
@pytest.mark.parametrize("trains", [True, False])
def test_operations_are_those_of_real_tokens(name, trains):
    amount = Amount(len(LENGTHS), sum(LENGTHS), sum(n * n for n in LENGTHS), len(LENGTHS))
    planned = model_of(name)
    found = flops_of(planned, trains)(amount)
    assert found == pytest.approx(counted(planned, trains, 1), rel=1e-9)


@pytest.mark.parametrize("trains", [True, False])
def test_operations_of_deberta(trains):
    """It projects its relative positions once a batch, so they are counted in a batch of the size
    that the fit took."""
    planned, one = model_of("deberta"), of(100, 24, trains)
    with FlopCounterMode(display=False) as counter:
        run(*real(planned, one), trains)
    found = flops_of(planned, trains)(Amount(100, 2400, 100 * 24**2, 100))
    assert found == pytest.approx(counter.get_total_flops(), rel=1e-9)


@pytest.mark.parametrize("trains", [True, False])
def test_a_head_has_the_operations_of_its_rows(trains):
    planned, rows = model_of("bert", classes=None), 4
    amount = Amount(3, sum(LENGTHS), sum(n * n for n in LENGTHS), 3 * rows)
    found = flops_of(planned, trains)(amount)
    assert found == pytest.approx(counted(planned, trains, rows), rel=1e-9)


SHORT = [
    (name, small)
    for name, path in builtin_recipes().items()
    for small in (False, True)
    if not small or small_form(path).is_file()
]


@pytest.mark.parametrize(("name", "small"), SHORT)
def test_each_recipe_can_be_made_short(name, small):
    whole = load_recipe(name, [], small)
    splits = {
        task: ["validation", *(split for phase in whole.phases for split, _ in phase.reads)]
        for task in whole.tasks_by_name
    }
    short = load_recipe(name, shortening(whole, 25, splits), small)
    for task in short.tasks_by_name.values():
        assert task.data.limit["validation"] <= 128
    for phase, before in zip(short.phases, whole.phases, strict=True):
        if isinstance(phase, TrainingPhase) and isinstance(before, TrainingPhase):
            assert phase.steps == WARM_UP_STEPS + 25 and phase.patience is None
            assert phase.save_every is not None and phase.steps < 2 * phase.save_every
            limit = short.task_of(phase).data.limit[phase.split]
            limited = whole.task_of(phase).data.limit.get(phase.split, limit)
            assert limited >= limit >= min(phase.batch_size * phase.steps, limited)
            changed = {"steps", "patience", "save_every"}
            assert phase.model_dump(exclude=changed) == before.model_dump(exclude=changed)


PROFILED = {
    "phase": "distil",
    "model": "student",
    "steps": 25,
    "seconds": {
        "data": 0.001,
        "teacher a": 0.05,
        "student": 0.02,
        "backward": 0.04,
        "other": 0.002,
    },
    "quartiles": (0.11, 0.12),
    "beside": {"checkpoint": 0.5},
    "tokens": {"student": 1000.0, "a": 1100.0},
    "flops": {"student": 6e10, "a": 9e10},
    "peaks": {"student": 2**30, "backward": 2**31},
    "resident": None,
    "device_flops": 3e12,
    "step": 0.113,
    "utilisation": 15e10 / 0.113 / 3e12,
}


def shown(ranks, *trainings):
    return "\n".join(table.text() for table in trainings_tables(trainings, ranks))


def test_a_profile_says_time_speed_and_memory():
    seconds = {"student": 0.1, "optimizer": 0.0, "other": 0.0}
    other = {**PROFILED, "phase": "teach", "seconds": seconds}
    text = shown(2, other, PROFILED)
    assert "of rank 0 of 2, means of 25 steps" in text
    [header] = [line for line in text.splitlines() if "teacher a" in line]
    parts = ["data", "teacher", "a", "student", "backward", "optimizer", "other"]
    assert header.split() == ["phase:", "model", *parts, "step", "quartiles"]
    rows = [line.split() for line in text.splitlines() if line.startswith("distil: student")]
    assert rows[0][2:] == ["1.0", "50.0", "20.0", "40.0", "2.0", "113.0", "110.0-120.0"]
    assert rows[1][2:] == ["8,850", "150.0", "1.33", "44%", "500.0", "ms", "2.00"]
    assert rows[2][2:] == ["1.00", "2.00"]
    text = shown(1, {**PROFILED, "peaks": {}, "resident": 3 * 2**30})
    assert " 3.00" in text and "GiB allocated at most" not in text and "of rank" not in text


def test_models_that_are_trained_together_have_their_tokens_added():
    """As in `mt-bert`: after all that it had measured a profile ended in a traceback."""
    assert "8,850" in shown(1, {**PROFILED, "tokens": {"first": 600.0, "second": 400.0}})


def test_a_profile_says_what_it_is_when_it_begins(tmp_path, toy_recipe, monkeypatch):
    """It said so before it refused."""

    def trains(recipe, path, *, observer, **options):
        for number in range(2):
            observer.start((number, "student"), torch.device("cpu"))
        raise UserError("planted")

    monkeypatch.setattr("ds_distill.profiling.trainings.execute", trains)
    arguments = ["profile", str(toy_recipe), "--folder", str(tmp_path / "work")]
    assert CliRunner().invoke(app, arguments).output.count("A short run") == 1


def test_a_profile_that_fails_leaves_nothing_in_the_way(tmp_path, toy_recipe, monkeypatch):
    """A folder that was there stays."""
    recipe, work = load_recipe(toy_recipe), tmp_path / "profile"

    def fails(recipe, path, **options):
        path.mkdir()
        (path / "recipe.yaml").write_text("")
        raise ValueError("planted")

    monkeypatch.setattr("ds_distill.profiling.trainings.execute", fails)
    for _ in range(2):
        with pytest.raises(ValueError, match="planted"):
            profile_trainings(recipe, work)
        assert not work.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("")
    with pytest.raises(UserError, match=r"exists.* or name a new one"):
        profile_trainings(recipe, tmp_path / "mine")
    assert (tmp_path / "mine" / "recipe.yaml").exists()


@pytest.mark.parametrize(("batches", "known"), [(8, 1), (10, 2), (99, 2), (100, 3)])
def test_a_percentile_needs_batches_beyond_it(batches, known):
    case = Case(1, 32, [0.001 * (number + 1) for number in range(batches)])
    assert [value is not None for value in case.percentiles] == [True] * known + [False] * (
        3 - known
    )
    model = {"name": "a", "parameters": 10, "file_bytes": 40, "metric": "f1", "score": 0.5}
    assert case.median == pytest.approx(0.0005 * (batches + 1))
    _, table = models_tables([{**model, "cases": [_as_json(case)]}])
    [row] = [line for line in table.text().splitlines() if f" {batches} " in line]
    assert len(row.split()) == 4 + known
