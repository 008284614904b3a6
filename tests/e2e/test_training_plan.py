"""How long a training lasts, and what it runs on the way: optimizer steps, patience, a switch of
terms with a cache; each also where it is interrupted and resumed."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_distill import load_recipe, run_recipe
from ds_distill.cache.reader import CacheReader
from ds_distill.engine.engine import Engine

STEPS_PER_EPOCH = 13
"""200 examples in batches of 16."""


class Interrupted(Exception):
    pass


@pytest.fixture
def run(
    toy_settings: dict[str, Any],
    in_this_process: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., Path]:
    """Runs phases of the toy task; with `stop`, interrupted before that optimizer step and
    resumed."""
    step = Engine.train_step

    def made(
        name: str, *phases: dict[str, Any], stop: int | None = None, resume: bool = False
    ) -> Path:
        settings = copy.deepcopy(toy_settings)
        del settings["teachers"]["second"]
        settings |= {"phases": list(phases), "logging": {"every": 1}}
        (tmp_path / "toy.yaml").write_text(yaml.safe_dump(settings))
        recipe, folder = load_recipe(tmp_path / "toy.yaml"), tmp_path / name
        if stop is not None:
            calls: list[Any] = []

            def interrupted(engine: Engine, batches: Any, *others: Any) -> Any:
                calls.append(batches)
                if len(calls) > stop:
                    raise Interrupted
                return step(engine, batches, *others)

            monkeypatch.setattr(Engine, "train_step", interrupted)
            with pytest.raises(Interrupted):
                run_recipe(recipe, folder)
            monkeypatch.setattr(Engine, "train_step", step)
        run_recipe(recipe, folder, resume=resume or stop is not None)
        return folder

    return made


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def trained(folder: Path) -> dict[str, Any]:
    """The record of the last phase that trained."""
    records = [json.loads(path.read_text()) for path in sorted((folder / "phases").glob("*.json"))]
    [record] = [record for record in records if "trained" in record][-1]["trained"]
    return dict(record)


def test_adamw_and_the_rate_are_as_the_recipe_says(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = Engine.train_step, []

    def looked_at(engine: Engine, *given: Any) -> Any:
        seen.extend(engine._engine.optimizer.param_groups)
        return step(engine, *given)

    monkeypatch.setattr(Engine, "train_step", looked_at)
    own = {"adam_beta2": 0.5, "adam_epsilon": 1e-4, "keep": "last"}
    rate = {"steps": 4, "warmup": 0.25, "schedule": "cosine"}
    folder = run("own", {"fine-tune": {"models": "student", **own, **rate}})
    assert {(group["betas"], group["eps"]) for group in seen} == {((0.9, 0.5), 1e-4)}
    rates = [event["learning_rate"] for event in events(folder, "train")]
    # Of the 3 steps after the warm-up: (1 + cos(pi * k / 3)) / 2 of the highest.
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.25e-2, 0])


def weights(folder: Path) -> list[str]:
    files = sorted((folder / "models").rglob("*.safetensors"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_optimizer_steps_in_place_of_epochs(run: Callable[..., Path]) -> None:
    phase = {"fine-tune": {"models": "student", "steps": 20, "save_every": 7}}
    folder = run("whole", phase)
    steps = events(folder, "train")
    assert [event["step"] for event in steps] == list(range(1, 21))
    assert [event["step"] for event in events(folder, "validation")] == [STEPS_PER_EPOCH, 20]
    assert [event["epoch"] for event in events(folder, "epoch")] == [0, 1]
    # The rate rises over a tenth of the 20 steps, and falls to 0 after the last.
    rates = [event["learning_rate"] for event in steps]
    assert max(rates) == rates[1] == pytest.approx(1e-2) and rates[-1] == 0
    assert trained(folder)["steps"] == 20
    resumed = run("resumed", phase, stop=18)  # in the part of an epoch, after a checkpoint at 14
    assert weights(resumed) == weights(folder)
    assert [e["loss"] for e in events(resumed, "train")] == [e["loss"] for e in steps]


def test_patience_ends_a_training(run: Callable[..., Path]) -> None:
    """At this learning rate nothing changes, so that the first epoch stays the best."""
    phase = {"fine-tune": {"models": "student", "learning_rate": 1e-30, "patience": 2}}
    folder = run("whole", phase)
    last = 3 * STEPS_PER_EPOCH
    assert [event["step"] for event in events(folder, "train")][-1] == last
    assert [event["epoch"] for event in events(folder, "validation")] == [0, 1, 2]
    record = trained(folder)
    assert record["steps"] == last and record["choosing"]["epoch"] == 0
    resumed = run("resumed", phase, stop=2 * STEPS_PER_EPOCH + 3)
    assert trained(resumed) == record and weights(resumed) == weights(folder)


def test_patience_that_is_over_stays_over(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after the last epoch's checkpoint, before the model is published."""
    from ds_distill.training import loop as training

    finish, calls = training._Training.finish, []

    def once(self: Any) -> Any:
        calls.append(self.progress.step)
        if len(calls) == 1:
            raise Interrupted
        return finish(self)

    monkeypatch.setattr(training._Training, "finish", once)
    phase = {"fine-tune": {"models": "student", "learning_rate": 1e-30, "patience": 1}}
    with pytest.raises(Interrupted):
        run("run", phase)
    folder = run("run", phase, resume=True)
    assert calls == [2 * STEPS_PER_EPOCH] * 2
    assert trained(folder)["steps"] == 2 * STEPS_PER_EPOCH


SWITCH = [
    {"fine-tune": {"models": "first", "epochs": 1}},
    {"cache": {"splits": "train", "hidden": [-1]}},
    {
        "distil": {
            "teachers": "cached",
            "epochs": 2,
            "keep": "last",
            "save_every": 5,
            "losses": {
                "activation_boundary": {"weight": 0.01, "until": 0.6},
                "cross_entropy": {"from": 0.6},
                "confidence_penalty": {"weight": 0.3, "from": 0.6},
            },
        }
    },
]
"""DoKTra in small: the boundary alone, then labels and the penalty alone."""


def test_a_switch_of_terms_with_a_cache(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []
    read = CacheReader.read
    monkeypatch.setattr(
        CacheReader, "read", lambda *given, **named: reads.append(given) or read(*given, **named)
    )
    folder = run("whole", *SWITCH)
    steps = [event for event in events(folder, "train") if event["phase"] == "student"]
    assert len(steps) == 2 * STEPS_PER_EPOCH
    for number, event in enumerate(steps):
        first = number / len(steps) < 0.6
        terms = ["activation_boundary"] if first else ["cross_entropy", "confidence_penalty"]
        measured = ["activation_boundary.other_sign"] if first else []
        named = {name for name in event if name.partition(".")[0] in SWITCH[2]["distil"]["losses"]}
        assert named == {*terms, *measured}
        assert event["loss"] == pytest.approx(sum(event[term] for term in terms), rel=1e-5)
    assert len(reads) == 16  # of 26 steps, as the boundary has come to 0.6 of them
    shares = [e["activation_boundary.other_sign"] for e in steps[:16]]
    assert shares[-1] < shares[0]
    assert trained(folder)["measures"] == {"activation_boundary.other_sign": shares[-1]}
    # Resumed after the switch, from a checkpoint at step 20 or an epoch's end.
    resumed = run("resumed", *SWITCH, stop=STEPS_PER_EPOCH + 22)
    assert weights(resumed) == weights(folder) and trained(resumed) == trained(folder)
