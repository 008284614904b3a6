"""Checkpoints of a training engine in this process: which ones stay, which are complete, and what
they contain of the training."""

import random
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from engines import DECAY, RATE, make_batch, make_engine

from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.losses import TermInputs, build_terms
from ds_distill.recipe.terms import losses_of
from ds_distill.training.checkpoints import Checkpoints
from ds_distill.training.progress import Progress
from ds_distill.types import Signals


@pytest.fixture
def engine(world):
    made = make_engine(world, "zero0_fp32")
    yield made
    made.close()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_a_training_goes_on_from_the_newest_whole_checkpoint(engine, world, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, world)
    assert checkpoints.load(engine, dict) is None
    weights = {}
    for step in range(1, 6):
        engine.train_step([make_batch()])
        if step <= 4:
            checkpoints.save(engine, step, {"step": step})
        weights[step] = engine.student_weights()
    # The newest two.
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]

    assert checkpoints.load(engine, dict) == {"step": 4}
    assert equal(engine.student_weights(), weights[4])
    # Optimizer, schedule and generators too: the same next step, dropout and all.
    engine.train_step([make_batch()])
    assert equal(engine.student_weights(), weights[5])

    # What is not whole is not there: a file too short, one that is missing, a name like one.
    newest = folder / "step-00000004"
    shutil.copytree(newest, folder / "step-00000009.copy")
    [random] = newest.glob("random-*")
    whole = random.read_bytes()
    for damage in (whole[:-1], None):
        random.unlink() if damage is None else random.write_bytes(damage)
        assert checkpoints.load(engine, dict) == {"step": 3}
        assert equal(engine.student_weights(), weights[3])
    random.write_bytes(whole)
    assert checkpoints.load(engine, dict) == {"step": 4}

    # Of what rank 0 sees, and this rank does not.
    monkeypatch.setattr("ds_distill.training.checkpoints.SEEN_WITHIN", 0.1)
    monkeypatch.setattr(World, "from_main", lambda self, work: "step-00000005")
    with pytest.raises(UserError, match=r"step-00000005: rank 0 on .* does not see all of it"):
        checkpoints.load(engine, dict)


@pytest.mark.parametrize("config", ["zero0_fp32", "zero1_bf16", "zero2_fp32", "zero3_bf16"])
def test_another_process_goes_on_bit_by_bit(config, world, tmp_path):
    check_goes_on(config, world, tmp_path)


def check_goes_on(config, world, tmp_path):
    """Dropout included."""
    made = make_engine(world, config)
    for _ in range(3):
        made.train_step([make_batch()])
    made.save(tmp_path)
    losses = [made.train_step([make_batch()])["loss"] for _ in range(3)]
    weights = made.student_weights()
    made.close()
    other = make_engine(world, config)
    for _ in range(2):  # what it was does not matter
        other.train_step([make_batch()])
    other.load(tmp_path)
    assert [other.train_step([make_batch()])["loss"] for _ in range(3)] == losses
    assert equal(other.student_weights(), weights)
    other.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [("zero3_fp32", "zero1_fp32"), ("zero0_fp32", "zero2_fp32"), ("zero0_bf16", "zero3_bf16")],
)
def test_a_training_goes_on_at_another_stage(one, other, world, tmp_path):
    check_goes_on_at_another_stage(one, other, world, tmp_path)


def check_goes_on_at_another_stage(one, other, world, tmp_path):
    made = make_engine(world, one, dropout=0.0)
    for _ in range(3):
        made.train_step([make_batch()])
    made.save(tmp_path)
    losses = [float(made.train_step([make_batch()])["loss"]) for _ in range(3)]
    made.close()
    resumed = make_engine(world, other, dropout=0.0, student_resident=False)
    resumed.load(tmp_path)
    again = [float(resumed.train_step([make_batch()])["loss"]) for _ in range(3)]
    resumed.close()
    assert again == pytest.approx(losses, rel=1e-5 if one.endswith("fp32") else 1e-2)


def test_a_checkpoint_of_another_model_is_refused(engine, world, tmp_path):
    engine.train_step([make_batch()])
    engine.save(tmp_path)
    terms = build_terms(losses_of({"hidden_mse": {}}), TermInputs(8, {"t": 4}))
    other = make_engine(world, "zero0_fp32", terms)
    with pytest.raises(RuntimeError, match="has other parameters"):
        other.load(tmp_path)
    other.close()


@pytest.mark.parametrize("config", ["zero0_fp32", "zero3_fp32"])
def test_a_map_that_is_not_trained_is_in_the_checkpoint(config, world, tmp_path):
    terms = build_terms(losses_of({"activation_boundary": {}}), TermInputs(8, {"t": 4}))
    engine = make_engine(world, config, terms)
    taught = Signals(torch.zeros(4, 3), {-1: torch.randn(4, 4)})
    rows = {"all": torch.arange(4)}
    engine.train_step([replace(make_batch(), signals={"t": taught}, row_sets=rows)])
    drawn = terms["activation_boundary"].get_buffer("map")
    before = drawn.clone()
    engine.save(tmp_path)
    drawn.zero_()
    engine.load(tmp_path)
    assert torch.equal(terms["activation_boundary"].get_buffer("map"), before)
    engine.close()


@pytest.mark.parametrize("config", ["zero0_fp32", "zero1_fp32", "zero2_bf16", "zero3_fp32"])
def test_a_training_goes_on_with_another_learning_rate(config, world, tmp_path):
    made = make_engine(world, config)
    for _ in range(3):
        made.train_step([make_batch()])
    made.save(tmp_path)
    before = made.learning_rate
    made.close()
    other = make_engine(world, config, rate=RATE / 10)
    other.load(tmp_path)
    assert other.learning_rate == pytest.approx(before / 10, rel=1e-6)
    other.train_step([make_batch()])
    assert other.learning_rate == pytest.approx(RATE / 10 * 6 / 8, rel=1e-6)
    other.close()


def test_a_strangers_checkpoint_can_do_no_more_than_fail(engine, world, tmp_path):
    """Nothing in it is unpickled."""
    engine.train_step([make_batch()])
    whole = tmp_path / "whole"
    progress = Progress(1, {"student": 0.5}, 0, {"a": 1.0})
    Checkpoints(whole, world).save(engine, 1, asdict(progress))
    assert Checkpoints(whole, world).load(engine, Progress) == progress
    refused = 0
    for seed in range(60):
        draw, folder = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(whole, folder)
        file = draw.choice(sorted((folder / "step-00000001").iterdir()))
        content = bytearray(file.read_bytes())
        for _ in range(draw.randint(1, 4)):  # where names, shapes and numbers are
            content[draw.randrange(min(len(content), 3000))] = draw.choice(b'\x00"{}[]:,19azN\xff')
        file.write_bytes(content)
        try:
            found = Checkpoints(folder, world).load(engine, Progress)
        except UserError as error:
            assert "Remove that folder" in str(error)
            refused += 1
        else:
            assert found is None or isinstance(found.step, int)
    assert refused > 10


def test_leftovers_of_a_kill_are_removed_and_replaced(engine, world, tmp_path):
    folder = tmp_path / "checkpoints"
    aside = folder / ".step-00000001.tmp"
    aside.mkdir(parents=True)
    (aside / "half").write_text("a")
    assert Checkpoints(folder, world).load(engine, dict) is None
    assert not aside.exists()
    aside.mkdir()
    (aside / "half").write_text("a")
    Checkpoints(folder, world).save(engine, 1, {})
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert not (folder / "step-00000001" / "half").exists()


def test_matrices_alone_decay(engine):
    """One AdamW step from a gradient of 0, at the first warm-up step's rate after 0."""
    before = engine.student_weights()
    nothing = make_batch()
    nothing.row_sets["labelled"] = torch.zeros(0, dtype=torch.int64)
    for _ in range(2):  # the first step's rate is 0
        engine.train_step([nothing])
    rate = RATE / 2
    after = engine.student_weights()
    for name, value in before.items():
        kept = 1 - rate * DECAY if value.ndim > 1 else 1.0
        torch.testing.assert_close(after[name], kept * value, rtol=1e-6, atol=0, msg=name)
