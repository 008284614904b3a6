"""Terms that compare layers of the student with layers of the teachers, divergences and tolerances:
against slow transcriptions of their equations in float64, gradients too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from families import NO_DROPOUT, built
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from ds_distill.losses import Seen, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.reads import Reads
from ds_distill.recipe.terms import HiddenMSELoss, losses_of
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

ROWS, CLASSES = 6, 4


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(dummy: Sequence[int] = ()) -> Batch:
    counted = torch.tensor([row for row in range(ROWS) if row not in dummy]).long()
    keys = torch.arange(2 * ROWS).view(-1, 2)
    return Batch(keys, {}, torch.zeros(ROWS).long(), {"all": counted, "labelled": counted})


MAPS: list[Any] = ["last", "uniform", {0: 0}, {1: 2, 2: 3}, {2: 4, 1: 4}]
PAIRS = [[(-1, -1)], [(1, 2), (2, 4)], [(0, 0)], [(1, 2), (2, 3)], [(2, 4), (1, 4)]]


def made(name: str, section: dict[str, Any], widths: dict[str, int], student: int = 5) -> Any:
    torch.manual_seed(0)  # projections
    inputs = TermInputs(student, widths, 2, dict.fromkeys(widths, 4))
    return build_terms(losses_of({name: section}), inputs)[name]


def states(layers: list[int], width: int, seed: int) -> dict[int, torch.Tensor]:
    return {layer: randn(ROWS, width, seed=seed + layer + 1) for layer in dict.fromkeys(layers)}


def close(ours: torch.Tensor | None, exact: torch.Tensor | None) -> None:
    assert ours is not None and exact is not None
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


def squares(image: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Rohanian et al. 2022, equation 12: the MSE of a pair of states, neuron by neuron."""
    return sum((x - y) ** 2 for x, y in zip(image, taught, strict=True)) / len(taught)


def unit_vectors(image: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Half of Patient KD's loss (Sun et al. 2019, equation 7), which is 1 - cos, as of VE-KD
    (appendix D)."""
    a, b = (sum(x * x for x in vector) ** 0.5 for vector in (image, taught))
    return sum((x / a - y / b) ** 2 for x, y in zip(image, taught, strict=True)) / 2


@pytest.mark.parametrize(("layers", "pairs"), [*zip(MAPS, PAIRS, strict=True)])
@pytest.mark.parametrize("dummy", [[1, 4], range(ROWS)])
@pytest.mark.parametrize(
    ("name", "section", "widths", "distance"),
    [
        ("hidden_mse", {}, {"a": 3, "half": 8}, squares),
        ("hidden_mse", {"map": False}, {"t": 5}, squares),
        ("cosine", {}, {"t": 5}, unit_vectors),
        ("cosine", {}, {"t": 7}, unit_vectors),
    ],
)
def test_teachers_and_pairs_are_summed(
    name: str,
    section: dict[str, Any],
    widths: dict[str, int],
    distance: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    layers: Any,
    pairs: Any,
    dummy: Any,
) -> None:
    """Of the student's states, or of their image by a trained map for each teacher and pair."""
    term = made(name, {"weight": 0.7, "layers": layers, **section}, widths)
    own = {n: s.requires_grad_() for n, s in states([i for i, _ in pairs], 5, 0).items()}
    taught = {t: states([j for _, j in pairs], width, 20 * width) for t, width in widths.items()}
    assert term.reads == Reads(set(own), logits=False)
    for teacher, found in taught.items():
        assert term.teacher_reads(teacher) == Reads(set(found), logits=False)
    signals = {teacher: Signals(randn(ROWS, CLASSES), found) for teacher, found in taught.items()}
    batch = make_batch(dummy=dummy)
    rows = term(Seen(Signals(randn(ROWS, CLASSES), own), batch, signals))
    exact = {n: s.detach().double().requires_grad_() for n, s in own.items()}
    maps = [weight.detach().double().requires_grad_() for weight in term.parameters()]
    assert len(maps) == (0 if widths == {"t": 5} else len(widths) * len(pairs))
    compared = [(teacher, i, j) for teacher in widths for i, j in pairs]
    wanted = []
    for row in batch.row_sets["all"].tolist():
        total = torch.zeros((), dtype=torch.float64)
        for number, (teacher, i, j) in enumerate(compared):
            image = maps[number] @ exact[i][row] if maps else exact[i][row]
            total = total + distance(image, taught[teacher][j][row].double())
        wanted.append(0.7 * total)
    assert rows.shape == (len(wanted),)
    if not wanted:
        no_rows = Signals(randn(0, CLASSES), {n: s[:0] for n, s in own.items()})
        loss = rows.sum() + term.idle(no_rows)
        loss.backward()
        assert loss == 0 and not any(weight.grad.any() for weight in term.parameters())
        return
    close(rows, torch.stack(wanted))
    factors = torch.linspace(0.5, 2, len(rows))
    (factors * rows).sum().backward()
    (factors.double() * torch.stack(wanted)).sum().backward()
    trained = [(own[n], exact[n]) for n in own] + [*zip(term.parameters(), maps, strict=True)]
    for ours, slow in trained:
        torch.testing.assert_close(ours.grad.double(), slow.grad, rtol=1e-4, atol=1e-5)


def one_divergence(name: str, p: list[torch.Tensor], q: list[torch.Tensor]) -> torch.Tensor:
    def kl(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([x * (x / y).log() for x, y in zip(a, b, strict=True)]).sum()

    if name == "kl":
        return kl(p, q)
    if name == "reverse_kl":
        return kl(q, p)
    if name == "js":
        m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
        return (kl(p, m) + kl(q, m)) / 2
    return torch.stack([(x - y).abs() for x, y in zip(p, q, strict=True)]).sum() / 2


@pytest.mark.parametrize("on", ["row", "mean"])
@pytest.mark.parametrize("open_", [True, False])
@pytest.mark.parametrize("name", ["kl", "reverse_kl", "js", "tv"])
def test_divergences_with_a_tolerance(name: str, open_: bool, on: str) -> None:
    batch = make_batch(dummy=[2])
    counted = batch.row_sets["all"]
    student, teacher = randn(ROWS, CLASSES), randn(ROWS, CLASSES, seed=1)
    exact = student.double().requires_grad_()
    plain = []
    for row in counted.tolist():
        p, q = (torch.softmax(z[row].double() / 2, -1) for z in (teacher, exact))
        plain.append(0.7 * 4 * one_divergence(name, list(p), list(q)))
    losses = torch.stack(plain)
    middle = losses.mean().item()
    tolerance = middle * (0.9 if open_ else 1.1)
    if on == "row":
        wanted = (losses - tolerance).clamp(min=0).sum()
    else:
        wanted = len(losses) * (losses.mean() - tolerance).clamp(min=0)
    section = {"weight": 0.7, "temperature": 2.0, "divergence": name}
    hinge = {"tolerance": tolerance, "tolerance_on": on}
    given_logits = student.clone().requires_grad_()
    taught = {"t": Signals(teacher)}
    rows = made("kl", {**section, **hinge}, {"t": 5})(Seen(Signals(given_logits), batch, taught))
    assert rows.shape == counted.shape
    close(rows.sum(), wanted)
    rows.sum().backward()
    wanted.backward()
    torch.testing.assert_close(given_logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert bool(given_logits.grad.any()) == (open_ or on == "row")


@pytest.mark.parametrize("name", ["logit_mse", "hidden_mse", "cosine", "activation_boundary"])
@pytest.mark.parametrize("on", ["row", "mean"])
def test_every_distillation_term_has_a_tolerance(name: str, on: str) -> None:
    student = Signals(randn(ROWS, CLASSES), {-1: randn(ROWS, 5)})
    teacher = {"t": Signals(randn(ROWS, CLASSES, seed=1), {-1: randn(ROWS, 5, seed=2)})}
    batch = make_batch()
    plain = made(name, {"weight": 0.7}, {"t": 5})(Seen(student, batch, teacher))
    middle = plain.mean().item()
    for tolerance in (0.9 * middle, 1.1 * middle):
        term = made(name, {"weight": 0.7, "tolerance": tolerance, "tolerance_on": on}, {"t": 5})
        rows = term(Seen(student, batch, teacher))
        if on == "row":
            wanted = sum(max(loss - tolerance, 0.0) for loss in plain.tolist())
        else:
            wanted = ROWS * max(middle - tolerance, 0.0)
        assert rows.sum().item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@given(st.integers(1, 24), st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_uniform_ends_at_the_last_layer(student: int, teacher: int) -> None:
    uniform = HiddenMSELoss(layers="uniform")
    if teacher % student:
        with pytest.raises(ValueError, match="no multiple"):
            uniform.pairs(student, teacher)
        return
    pairs = uniform.pairs(student, teacher)
    assert pairs[-1] == (student, teacher) and [own for own, _ in pairs] == [*range(1, student + 1)]
    assert len({b - a for (_, a), (_, b) in pairwise(pairs)}) <= 1
    if student == teacher:
        assert HiddenMSELoss(layers="every").pairs(student, teacher) == pairs
    else:
        with pytest.raises(ValueError, match="layers and the teacher"):
            HiddenMSELoss(layers="every").pairs(student, teacher)


def bert(depth: int, width: int) -> Any:
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "num_labels": CLASSES}
    return built("bert", AutoModelForSequenceClassification, seed=depth, **sizes, **NO_DROPOUT)


def test_layers_are_those_of_the_models_and_others_matter_to_nothing() -> None:
    """In a bundle, of a real student and teacher: `Signals.hidden` is transformers' numbering; what
    a layer that is not asked for says, NaN even, changes neither loss nor gradient."""
    student, teacher = bert(2, 8), bert(4, 12)
    section = {"hidden_mse": {"layers": {0: 0, 1: 2}}}
    torch.manual_seed(0)
    terms = build_terms(losses_of(section), TermInputs(8, {"t": 12}, 2, {"t": 4}))
    ids = torch.randint(5, 30, (3, 6))
    view = PaddedView(ids, torch.ones_like(ids))
    batch = Batch.from_views({"student": view, "t": view}, torch.zeros(3, dtype=torch.int64))
    bundle = Bundle(student, {"t": teacher}, terms)
    loss = bundle(batch)["loss"]
    loss.backward()
    said = {
        name: model(**view.model_inputs(), output_hidden_states=True).hidden_states
        for name, model in {"student": student, "t": teacher}.items()
    }
    wanted = 0.0
    for map_, (i, j) in zip(
        terms["hidden_mse"].projections.values(), ((0, 0), (1, 2)), strict=True
    ):
        wanted += (map_(said["student"][i][:, 0]) - said["t"][j][:, 0]).square().mean()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    first = {name: p.grad.clone() for name, p in student.named_parameters()}
    bundle.zero_grad()
    with torch.no_grad():
        teacher.bert.encoder.layer[3].output.dense.weight.fill_(math.nan)
        student.bert.encoder.layer[1].output.dense.weight.fill_(1e3)
    again = bundle(batch)["loss"]
    again.backward()
    assert again.item() == loss.item()
    for name, weight in student.named_parameters():
        assert torch.equal(weight.grad, first[name]), name
    assert not student.bert.encoder.layer[1].output.dense.weight.grad.any()
