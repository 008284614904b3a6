"""Any number of labels per example: data, losses, routing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import write
from transformers import BertConfig, BertForSequenceClassification, BertModel

from ds_distill.data.batches import Examples
from ds_distill.data.open_source import open_source
from ds_distill.data.schedule import keep_share_of_others
from ds_distill.errors import UserError
from ds_distill.losses import Seen, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.recipe.policies import POLICIES
from ds_distill.recipe.tasks import Data, MultiLabel
from ds_distill.recipe.terms import losses_of
from ds_distill.routing import Router, Target
from ds_distill.routing.comparison import compare
from ds_distill.routing.multi_label import TWO, fit_by_label, load_fitted, of_label
from ds_distill.tasks.labelled import MultiLabelKind
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

ROWS: list[dict[str, Any]] = [
    {"text": "a b", "label": ["x", "y"]},
    {"text": "c", "label": []},
    {"text": "d", "label": ["z"]},
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "numbers"])
def test_lists_of_labels_are_read(tmp_path: Path, ending: str) -> None:
    """null is no label, and an empty list is none of them."""
    rows = ROWS
    if ending == "numbers":
        rows = [{**row, "label": ["xyz".index(name) for name in row["label"]]} for row in ROWS]
    write(tmp_path / ("train.parquet" if ending == "parquet" else "train.jsonl"), rows)
    write(tmp_path / "test.jsonl", [{**row, "label": None} for row in ROWS])
    task = MultiLabel(labels=["x", "y", "z"], data=Data(path=str(tmp_path)))
    source = open_source(task, tmp_path / "cache")
    found = Examples.of(source.read("train"))
    assert found.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]] and found.labelled.all()
    assert not Examples.of(source.read("test")).labelled.any()
    with pytest.raises(UserError, match="no labels"):
        source.read("test", need_labels=True)


def test_a_focus_takes_all_examples_with_one_of_its_labels() -> None:
    labels = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]])
    keys = torch.arange(8).view(4, 2)
    assert keep_share_of_others(labels, keys, [0], 0.0).tolist() == [0, 3]
    assert keep_share_of_others(labels, keys, [0, 2], 0.0).tolist() == [0, 1, 3]
    assert keep_share_of_others(labels, keys, [0], 1.0).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------ losses


def test_logit_mse_is_the_mean_over_labels() -> None:
    """Logits 1 and 2 against 0: (1 + 4) / 2. The logit of a label's absence is 0 in all models, and
    is none of theirs."""
    config = BertConfig(
        vocab_size=9,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=4,
        num_labels=2,
    )
    student = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        student.classifier.weight.zero_()
        student.classifier.bias.copy_(torch.tensor([1.0, 2.0]))
    ids = torch.ones(3, 4, dtype=torch.int64)
    view = PaddedView(ids, torch.ones_like(ids))
    terms = build_terms(losses_of({"logit_mse": {}, "hidden_mse": {}}), TermInputs(4, {"t": 4}))
    taught = Signals(torch.zeros(3, 2), {-1: torch.zeros(3, 4)})
    batch = Batch.from_views({"student": view}, torch.ones(3, 2).long(), signals={"t": taught})
    assert Bundle(student, {}, terms)(batch)["logit_mse"].item() == pytest.approx(2.5)
    # Of several teachers each label may follow another one.
    several = Signals(torch.tensor([[0.0, 2.0]] * 3)), Signals(torch.tensor([[1.0, 0.0]] * 3))
    weights = torch.tensor([[[1.0, 0.0]] * 3, [[0.0, 1.0]] * 3])
    own = Signals(torch.tensor([[1.0, 2.0]] * 3))
    seen = Seen(own, batch, dict(zip("ab", several, strict=True)), target=Target(None, weights))
    assert terms["logit_mse"](seen.by_label(two=False)).tolist() == [1.0, 4.0] * 3


@pytest.mark.parametrize("of_states", ["hidden_mse", "cosine", "activation_boundary"])
@pytest.mark.parametrize("of_labels", ["cross_entropy", "confidence_penalty"])
def test_a_live_teacher_that_no_term_asks_for_logits(of_labels: str, of_states: str) -> None:
    """Each term's share is that which it has alone."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=9,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=4,
        num_labels=3,
        hidden_dropout_prob=0.0,
        classifier_dropout=0.0,
        attention_probs_dropout_prob=0.0,
    )
    student, teacher = (BertForSequenceClassification(config).eval() for _ in range(2))
    ids = torch.randint(0, 9, (3, 4))
    view, labels = PaddedView(ids, torch.ones_like(ids)), torch.randint(0, 2, (3, 3))

    def shares(*names: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)  # of projections
        losses = losses_of({name: {} for name in names})
        bundle = Bundle(student, {"t": teacher}, build_terms(losses, TermInputs(4, {"t": 4})))
        return bundle(Batch.from_views({"student": view, "t": view}, labels))

    together = shares(of_labels, of_states)
    for name in (of_labels, of_states):
        assert together[name].equal(shares(name)[name])


def make_batch(draw: np.random.Generator, n: int, many: int) -> Batch:
    ids = torch.from_numpy(draw.integers(5, 50, (n, 4)))
    labels = torch.from_numpy(draw.integers(0, 2, (n, many)))
    labels[draw.random(n) < 0.3] = -1
    return Batch.from_views({"student": PaddedView(ids, torch.ones_like(ids))}, labels)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(2, 5), st.sampled_from([1.0, 2.0]))
def test_losses_are_those_of_sigmoids(seed: int, n: int, many: int, temperature: float) -> None:
    """Against the equations in float64, with their gradients."""
    draw = np.random.default_rng(seed)
    batch = make_batch(draw, n, many)
    student = torch.from_numpy(draw.normal(0, 3, (n, many))).float().requires_grad_()
    teacher = torch.from_numpy(draw.normal(0, 3, (n, many))).float()
    losses = losses_of({"cross_entropy": {}, "kl": {"temperature": temperature}})
    terms = build_terms(losses, TermInputs(4, {"t": 4}))
    seen = Seen(Signals(student), batch, {"t": Signals(teacher)}).by_label()
    found = {name: term(seen).sum() for name, term in terms.items()}
    exact = student.detach().double().requires_grad_()
    known = batch.row_sets["labelled"]
    assert seen.batch.counts == {"labelled": len(known) * many, "all": n * many}
    p, q = torch.sigmoid(teacher.double() / temperature), torch.sigmoid(exact / temperature)
    kl = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum() * temperature**2
    ce = F.binary_cross_entropy_with_logits(
        exact[known], batch.labels[known].double(), reduction="sum"
    )
    for name, true in {"cross_entropy": ce, "kl": kl}.items():
        assert found[name].item() == pytest.approx(true.item(), rel=1e-4, abs=1e-5)
        [ours] = torch.autograd.grad(found[name], student, retain_graph=True)
        [theirs] = torch.autograd.grad(true, exact, retain_graph=True)
        assert torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-5), name


def test_an_unlabelled_row_is_in_no_row_of_two() -> None:
    batch = make_batch(np.random.default_rng(0), 3, 4)
    batch.labels[1] = -100
    batch.row_sets["labelled"] = torch.tensor([0, 2])
    logits = torch.zeros(3, 4)
    rows = Seen(Signals(logits), batch).by_label().batch
    assert rows.row_sets["labelled"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert (rows.labels[rows.row_sets["labelled"]] >= 0).all()
    assert rows.keys[4:8].equal(batch.keys[1].expand(4, 2)), "each row is of its example"


# ----------------------------------------------------------------------------------- routing


def experts(n: int = 400) -> tuple[dict[str, Signals], np.ndarray, torch.Tensor]:
    """`a` knows the first label and `b` the others; what one does not know it never predicts."""
    draw = np.random.default_rng(3)
    truth = (draw.random((n, 3)) < 0.3).astype(np.int64)
    sure = np.where(truth == 1, 4.0, -4.0) + draw.normal(0, 1, truth.shape)
    blind = -6.0 + draw.normal(0, 0.5, truth.shape)
    knows = np.array([True, False, False])
    signals = {
        "a": Signals(torch.from_numpy(np.where(knows, sure, blind)).float()),
        "b": Signals(torch.from_numpy(np.where(knows, blind, sure)).float()),
    }
    keys = torch.from_numpy(draw.integers(0, 2**60, (n, 2)))
    return signals, truth, keys


def test_what_a_teacher_knows_is_known_of_each_label(tmp_path: Path) -> None:
    signals, truth, keys = experts()
    fitted = fit_by_label(signals, truth, keys, ["x", "y", "z"])
    assert fitted.experts == {"x": "a", "y": "b", "z": "b"}
    record = fitted.to_record()
    assert record["f1"]["a"]["x"] > 0.9 and record["f1"]["a"]["y"] < 0.2
    fitted.save(tmp_path / "routing.safetensors")
    again = load_fitted(tmp_path / "routing.safetensors")
    assert again.experts == fitted.experts and again.to_record() == record
    batch = Batch.from_views(
        {"student": PaddedView(torch.ones(400, 2).long(), torch.ones(400, 2).long())},
        torch.from_numpy(truth),
    )
    for policy in ("expertise", "gate", "calibrated"):
        target = Router(policy, fitted=tmp_path / "routing.safetensors")(signals, batch)
        assert target.logits is not None and target.logits.shape == (400, 3)
        assert target.weights.shape == (2, 400, 3)
        right = (target.logits.numpy() > 0) == (truth == 1)
        assert right.mean(axis=0).min() > 0.95, policy
    followed = Router("expertise", fitted=fitted)(signals, batch).weights
    there = torch.from_numpy(truth == 1)
    assert (followed[0, :, 0][there[:, 0]] == 1).all() and (
        followed[1, :, 1][there[:, 1]] == 1
    ).all()


def test_of_a_rare_label_the_expert_is_not_who_never_predicts_it() -> None:
    draw = np.random.default_rng(0)
    truth = (draw.random((500, 1)) < 0.05).astype(np.int64)
    finds = np.where(truth == 1, 2.0, np.where(draw.random((500, 1)) < 0.1, 1.0, -2.0))
    signals = {
        "finds": Signals(torch.from_numpy(finds).float()),
        "never": Signals(torch.full((500, 1), -3.0)),
    }
    keys = torch.from_numpy(draw.integers(0, 2**60, (500, 2)))
    fitted = fit_by_label(signals, truth, keys, ["rare"])
    assert (finds > 0).sum() > 2 * truth.sum(), "it is right less often than who never predicts it"
    view = PaddedView(torch.ones(500, 2).long(), torch.ones(500, 2).long())
    batch = Batch.from_views({"student": view}, torch.from_numpy(truth))
    for policy in ("expertise", "best"):
        weights = Router(policy, fitted=fitted)(signals, batch).weights
        assert (weights[0] == 1).all() and (weights[1] == 0).all(), policy


def test_the_target_of_a_label_does_not_depend_on_the_others() -> None:
    signals, truth, keys = experts(100)
    view = PaddedView(torch.ones(100, 2).long(), torch.ones(100, 2).long())
    for name, entry in POLICIES.items():
        if name == "chosen":
            continue
        fitted = fit_by_label(signals, truth, keys, ["x", "y", "z"])
        both = {n: Signals(s.logits.clone()) for n, s in signals.items()}
        for outputs in both.values():
            outputs.logits[:, 1:] *= -1
        needs = fitted if entry.needs.expertise else None
        named = [[*signals, None][row % (len(signals) + 1)] for row in range(100)]
        batch = Batch.from_views(
            {"student": view}, torch.from_numpy(truth), keys=keys, teacher_names=named
        )
        one, other = (Router(name, fitted=needs)(s, batch) for s in (signals, both))
        assert torch.equal(one.weights[:, :, 0], other.weights[:, :, 0]), name
        if one.logits is not None and other.logits is not None:
            assert torch.equal(one.logits[:, 0], other.logits[:, 0]), name


def test_a_label_is_two_classes() -> None:
    logits = torch.tensor([[1.0, -2.0]])
    [of] = of_label({"t": Signals(logits)}, 1).values()
    assert of.logits.tolist() == [[0.0, -2.0]] and len(TWO) == 2


def test_policies_are_compared_over_labels() -> None:
    signals, truth, keys = experts()
    found = compare(signals, truth, keys, ["x", "y", "z"])
    assert found.metric == "micro_f1" and found.examples == 400
    assert found.any_teacher.score > 0.95
    assert found.policies["gate"].score > found.policies["average"].score
    assert found.policies["gate"].interval[0] > 0
    assert set(found.policies["gate"].per_class) == {"x", "y", "z"}
    assert found.choice != "average"


@pytest.mark.parametrize("split", ["train", "other"])
def test_a_new_head_starts_at_the_log_odds_of_train(tmp_path: Path, split: str) -> None:
    """Of three labelled examples and one without; 0 where no split train is."""
    names = ["x", "y", "z"]
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    BertModel(config).save_pretrained(tmp_path)
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [-1, -1, -1]])
    data: Any = SimpleNamespace(
        has_split=lambda name: name == split,
        examples=lambda name: SimpleNamespace(labels=labels),
    )
    kind = MultiLabelKind(MultiLabel(labels=names, data=Data(path=str(tmp_path))), names)
    model: Any = kind.load(data, str(tmp_path), names, new_head=True)
    shares = (
        torch.tensor([2.5 / 4, 2.5 / 4, 0.5 / 4]) if split == "train" else torch.full((3,), 0.5)
    )
    torch.testing.assert_close(model.classifier.bias.sigmoid(), shares)
