"""How long a training lasts, and what it runs on the way: optimizer steps, patience, a switch of
terms with a cache; each also where it is interrupted and resumed."""

import pytest
from runs import after_calls, digests, interrupted, loaded, logged, results
from toys import recipe_of

from ds_distill import run_recipe
from ds_distill.cache.reader import CacheReader
from ds_distill.engine.engine import Engine
from ds_distill.training.loop import _Training

STEPS_PER_EPOCH = 13
"""200 examples in batches of 16."""


@pytest.fixture
def run(toy_settings, in_this_process, tmp_path):
    """Runs phases of the toy task; with `stop`, interrupted before that optimizer step and
    resumed."""

    def made(name, *phases, stop=None):
        settings = {**toy_settings, "teachers": {"first": toy_settings["teachers"]["first"]}}
        settings |= {"phases": list(phases), "logging": {"every": 1}}
        recipe, folder = loaded(settings, tmp_path), tmp_path / name
        if stop is not None:
            with interrupted(Engine, "train_step", after_calls(stop)):
                run_recipe(recipe, folder)
        run_recipe(recipe, folder, resume=folder.exists())
        return folder

    return made


def trained(folder):
    """The record of the last phase that trained."""
    [record] = [one for one in results(folder)["phases"] if "trained" in one][-1]["trained"]
    return dict(record)


def test_adamw_and_the_rate_are_as_the_recipe_says(run, monkeypatch):
    step, seen = Engine.train_step, []

    def looked_at(engine, *given):
        seen.extend(engine._engine.optimizer.param_groups)
        return step(engine, *given)

    monkeypatch.setattr(Engine, "train_step", looked_at)
    own = {"adam_beta2": 0.5, "adam_epsilon": 1e-4, "keep": "last"}
    rate = {"steps": 4, "warmup": 0.25, "schedule": "cosine"}
    folder = run("own", {"fine-tune": {"models": "student", **own, **rate}})
    assert {(group["betas"], group["eps"]) for group in seen} == {((0.9, 0.5), 1e-4)}
    rates = [event["learning_rate"] for event in logged(folder, "train")]
    # Of the 3 steps after the warm-up: (1 + cos(pi * k / 3)) / 2 of the highest.
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.25e-2, 0])


def test_optimizer_steps_in_place_of_epochs(run):
    phase = {"fine-tune": {"models": "student", "steps": 20, "save_every": 7}}
    folder = run("whole", phase)
    steps = logged(folder, "train")
    assert [event["step"] for event in steps] == list(range(1, 21))
    assert [event["step"] for event in logged(folder, "validation")] == [STEPS_PER_EPOCH, 20]
    assert [event["epoch"] for event in logged(folder, "epoch")] == [0, 1]
    # The rate rises over a tenth of the 20 steps, and falls to 0 after the last.
    rates = [event["learning_rate"] for event in steps]
    assert max(rates) == rates[1] == pytest.approx(1e-2) and rates[-1] == 0
    assert trained(folder)["steps"] == 20
    resumed = run("resumed", phase, stop=18)  # in the part of an epoch, after a checkpoint at 14
    assert digests(resumed) == digests(folder)
    assert [e["loss"] for e in logged(resumed, "train")] == [e["loss"] for e in steps]


def test_patience_ends_a_training(run):
    """At this learning rate nothing changes, so that the first epoch stays the best."""
    phase = {"fine-tune": {"models": "student", "learning_rate": 1e-30, "patience": 2}}
    folder = run("whole", phase)
    last = 3 * STEPS_PER_EPOCH
    assert [event["step"] for event in logged(folder, "train")][-1] == last
    assert [event["epoch"] for event in logged(folder, "validation")] == [0, 1, 2]
    record = trained(folder)
    assert record["steps"] == last and record["choosing"]["epoch"] == 0
    resumed = run("resumed", phase, stop=2 * STEPS_PER_EPOCH + 3)
    assert trained(resumed) == record and digests(resumed) == digests(folder)


def test_patience_that_is_over_stays_over(run):
    """Interrupted after the last epoch's checkpoint, before the model is published."""
    phase = {"fine-tune": {"models": "student", "learning_rate": 1e-30, "patience": 1}}
    with interrupted(_Training, "finish"):
        run("run", phase)
    folder = run("run", phase)
    assert [e["step"] for e in logged(folder, "train")] == [*range(1, 2 * STEPS_PER_EPOCH + 1)]
    assert trained(folder)["steps"] == 2 * STEPS_PER_EPOCH


def test_a_switch_of_terms_with_a_cache(run, monkeypatch):
    reads = []
    read = CacheReader.read
    monkeypatch.setattr(
        CacheReader, "read", lambda *given, **named: reads.append(given) or read(*given, **named)
    )
    phases = recipe_of("switched")["phases"]
    folder = run("whole", *phases)
    steps = logged(folder, "train", "student")
    assert len(steps) == 2 * STEPS_PER_EPOCH
    for number, event in enumerate(steps):
        first = number / len(steps) < 0.6
        terms = ["activation_boundary"] if first else ["cross_entropy", "confidence_penalty"]
        measured = ["activation_boundary.other_sign"] if first else []
        named = {name for name in event if name.partition(".")[0] in phases[2]["distil"]["losses"]}
        assert named == {*terms, *measured}
        assert event["loss"] == pytest.approx(sum(event[term] for term in terms), rel=1e-5)
    assert len(reads) == 16  # of 26 steps, as the boundary has come to 0.6 of them
    shares = [e["activation_boundary.other_sign"] for e in steps[:16]]
    assert shares[-1] < shares[0]
    assert trained(folder)["measures"] == {"activation_boundary.other_sign": shares[-1]}
    # Resumed after the switch, from a checkpoint at step 20 or an epoch's end.
    resumed = run("resumed", *phases, stop=STEPS_PER_EPOCH + 22)
    assert digests(resumed) == digests(folder) and trained(resumed) == trained(folder)
