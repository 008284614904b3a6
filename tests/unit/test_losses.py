"""Loss terms against their equations in float64, and the bundle that adds them up."""

import copy

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from ds_distill.losses import build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.encoder import read_signals
from ds_distill.parts.policies import routing_of
from ds_distill.parts.terms import TERMS, losses_of
from ds_distill.routing import Router, Target
from ds_distill.types import Batch, PaddedView, Signals, TopK

ROWS, CLASSES = 6, 4
LABELS = torch.tensor([0, 3, -100, 1, -100, 2])


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(labels=LABELS, dummy=(), **given):
    counted = [row for row in range(len(labels)) if row not in dummy]
    labelled = [row for row in counted if labels[row] >= 0]
    row_sets = {
        name: torch.tensor(rows, dtype=torch.int64)
        for name, rows in (("all", counted), ("labelled", labelled))
    }
    counts = {name: torch.tensor(float(len(rows))) for name, rows in row_sets.items()}
    keys = torch.arange(2 * len(labels)).view(-1, 2)
    return Batch(keys, labels=labels, row_sets=row_sets, counts=counts, **{"views": {}, **given})


def term_of(name, settings, **widths):
    torch.manual_seed(0)  # projections
    return build_terms(losses_of({name: settings}), widths.pop("student", 5), widths)[name]


def divergence(teacher, student, temperature):
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), summand by summand."""
    p, q = (torch.softmax(z.double() / temperature, dim=-1) for z in (teacher, student))
    return temperature**2 * (p * (p.log() - q.log())).sum(dim=-1)


def check_term(term, wanted, student, teachers, target, batch):
    """Values and student gradients, rows weighted unlike."""
    given = student.clone().requires_grad_()
    rows = term(Signals(given), teachers, target, batch)
    counted = batch.row_sets[term.rows]
    assert rows.shape == counted.shape and rows.dtype == torch.float32
    upstream = torch.linspace(0.5, 2, len(rows))
    exact = student.double().requires_grad_()
    losses = wanted(exact)[counted]
    torch.testing.assert_close(rows.double(), losses, rtol=1e-5, atol=1e-6)
    [gradient] = torch.autograd.grad((upstream * rows).sum(), given)
    [exact_gradient] = torch.autograd.grad((upstream.double() * losses).sum(), exact)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-6)
    others = torch.ones(len(student), dtype=torch.bool).index_fill(0, counted, False)
    assert (gradient[others] == 0).all()


# --------------------------------------------------------------------------------- terms


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_against_the_top_of_a_distribution(temperature):
    """The entries that a cache keeps, and all others as one class."""
    whole = torch.softmax(3 * randn(ROWS, 9).double(), dim=-1)
    top, ids = whole.topk(3)
    tail = 1 - top.sum(dim=-1)
    signals = Signals(TopK(top.log().float(), ids, tail.log().float()))
    term = term_of("kl", {"weight": 2.0, "temperature": temperature})

    def wanted(z):
        q = torch.softmax(z / temperature, dim=-1).gather(1, ids)
        rest = tail * (tail.log() - (1 - q.sum(dim=-1)).log())
        return 2.0 * temperature**2 * ((top * (top.log() - q.log())).sum(dim=-1) + rest)

    check_term(term, wanted, randn(ROWS, 9, seed=1), {"only": signals}, None, make_batch())


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
@pytest.mark.parametrize(("weight", "tolerance"), [(1.0, 0.0), (2.5, 0.0), (2.0, "median")])
def test_kl(temperature, weight, tolerance):
    teacher, student = 3 * randn(ROWS, CLASSES), 3 * randn(ROWS, CLASSES, seed=1)
    losses = weight * divergence(teacher, student, temperature)
    if tolerance == "median":  # the hinge is open for half of the rows
        tolerance = losses.quantile(0.5).item()
    term = term_of("kl", {"weight": weight, "temperature": temperature, "tolerance": tolerance})

    def wanted(z):
        return (weight * divergence(teacher, z, temperature) - tolerance).clamp(min=0)

    check_term(term, wanted, student, {}, Target(teacher, torch.ones(1, ROWS)), make_batch())


def test_cross_entropy_of_labelled_rows():
    term = term_of("cross_entropy", {"weight": 0.3})
    labelled = LABELS.clamp(min=0)

    def wanted(z):
        return -0.3 * torch.log_softmax(z, dim=-1)[torch.arange(ROWS), labelled]

    check_term(term, wanted, randn(ROWS, CLASSES), {}, None, make_batch(dummy=[1]))


def test_logit_mse():
    teacher = randn(ROWS, CLASSES, seed=1)
    check_term(
        term_of("logit_mse", {"weight": 2.0}),
        lambda z: 2.0 * (teacher.double() - z).pow(2).sum(dim=-1) / CLASSES,
        randn(ROWS, CLASSES),
        {},
        Target(teacher, torch.ones(1, ROWS)),
        make_batch(),
    )


@pytest.mark.parametrize("name", ["kl", "logit_mse"])
def test_mixed_losses_are_the_weighted_sum_over_teachers(name):
    teachers = {
        mark: Signals(randn(ROWS, CLASSES, seed=seed)) for mark, seed in (("a", 1), ("b", 2))
    }
    weights = randn(2, ROWS, seed=3).abs()

    def one(target, z):
        if name == "kl":
            return divergence(target, z, 2.0)
        return (target.double() - z).pow(2).mean(dim=-1)

    def wanted(z):
        losses = [one(signals.logits, z) for signals in teachers.values()]
        return sum(w * loss for w, loss in zip(weights.double(), losses, strict=True))

    term = term_of(name, {"temperature": 2.0} if name == "kl" else {})
    check_term(term, wanted, randn(ROWS, CLASSES), teachers, Target(None, weights), make_batch())


def test_hidden_mse_projects_the_student_to_each_teacher():
    widths = {"small": 3, "large": 8}
    term = term_of("hidden_mse", {"weight": 0.7}, student=5, **widths)
    assert {name: p.weight.shape for name, p in term.projections.items()} == {
        "small": (3, 5),
        "large": (8, 5),
    }
    hidden = randn(ROWS, 5).requires_grad_()
    targets = {name: randn(ROWS, width, seed=width) for name, width in widths.items()}
    teachers = {n: Signals(randn(ROWS, CLASSES), {-1: target}) for n, target in targets.items()}
    rows = term(Signals(randn(ROWS, CLASSES), {-1: hidden}), teachers, None, make_batch())
    exact = hidden.detach().double().requires_grad_()
    maps = {n: p.weight.detach().double().requires_grad_() for n, p in term.projections.items()}
    wanted = 0.7 * sum(
        (targets[name].double() - exact @ maps[name].T).pow(2).sum(dim=-1) / width
        for name, width in widths.items()
    )
    torch.testing.assert_close(rows.double(), wanted, rtol=1e-5, atol=1e-6)
    rows.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    for name, projection in term.projections.items():
        gradient = projection.weight.grad.double()
        torch.testing.assert_close(gradient, maps[name].grad, rtol=1e-5, atol=1e-6)


def test_a_bf16_student_meets_the_whole_target():
    # A target rounded to bf16 would be off by up to 0.4% of each logit.
    teacher, student = 20 * randn(ROWS, 50), (20 * randn(ROWS, 50)).bfloat16()
    target = Target(teacher, torch.ones(1, ROWS))
    rows = term_of("kl", {})(Signals(student), {}, target, make_batch())
    torch.testing.assert_close(
        rows.double(), divergence(teacher, student, 1.0), rtol=1e-4, atol=1e-5
    )


# -------------------------------------------------------------------------------- bundle

VOCABULARY, LENGTH = 40, 7
ALL_TERMS = losses_of(
    {
        "cross_entropy": {"weight": 0.5},
        "kl": {"temperature": 2.0, "weight": 1.5},
        "logit_mse": {"weight": 0.1},
        "hidden_mse": {"weight": 0.2},
    }
)


def tiny(kind, seed, width=16, layers=1):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=16,
        num_labels=CLASSES,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    return kind(config)


def make_bundle(kind=BertForSequenceClassification, losses=ALL_TERMS, policy="average", live=True):
    student = tiny(kind, 0)
    teachers = {"first": tiny(kind, 1, 24, 2), "second": tiny(kind, 2, 8)}
    torch.manual_seed(3)
    terms = build_terms(losses, 16, {"first": 24, "second": 8})
    router = Router(routing_of(policy=policy), temperature=2.0)
    return Bundle(student, teachers if live else {}, terms, router), teachers


def classifier_batch(rows=ROWS):
    ids = torch.randint(5, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    view = PaddedView(ids, mask, torch.zeros_like(ids))
    return make_batch(LABELS[:rows], views=dict.fromkeys(("student", "first", "second"), view))


def part_of(batch, start, stop):
    """Examples [start, stop), with the whole batch's counts."""
    views = {
        name: PaddedView(*(tensor[start:stop] for tensor in view.model_inputs().values()))
        for name, view in batch.views.items()
    }
    sets = {
        name: rows[(rows >= start) & (rows < stop)] - start for name, rows in batch.row_sets.items()
    }
    return Batch(batch.keys[start:stop], views, batch.labels[start:stop], sets, counts=batch.counts)


def gradients(bundle):
    return {n: p.grad.clone() for n, p in bundle.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("policy", ["average", "random", "ca-mkd", "mt-bert"])
def test_micro_batches_add_up_to_the_batch(cut, policy):
    bundle, _ = make_bundle(policy=policy)
    bundle.eval()
    batch = classifier_batch()
    whole = bundle(batch)
    whole["loss"].backward()
    wanted = gradients(bundle)
    bundle.zero_grad()
    parts = [bundle(part_of(batch, 0, cut)), bundle(part_of(batch, cut, ROWS))]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value, rtol=1e-5, atol=1e-6)
    sum(part["loss"] for part in parts).backward()
    torch.testing.assert_close(gradients(bundle), wanted, rtol=1e-4, atol=1e-6)
    shares = sum(value for name, value in whole.items() if name != "loss")
    torch.testing.assert_close(whole["loss"].detach(), shares)


def test_a_batch_of_dummy_rows_is_counted_nowhere():
    bundle, _ = make_bundle()
    real, dummy = classifier_batch(), part_of(classifier_batch(), 0, 1)
    dummy.row_sets.update({name: rows[:0] for name, rows in dummy.row_sets.items()})
    bundle.eval()
    bundle(real)["loss"].backward()
    wanted = gradients(bundle)
    bundle.zero_grad()
    (bundle(real)["loss"] + bundle(dummy)["loss"]).backward()
    torch.testing.assert_close(gradients(bundle), wanted, rtol=0, atol=0)
    assert bundle(dummy)["loss"].item() == 0.0


def test_a_batch_without_labels_has_no_cross_entropy():
    bundle, _ = make_bundle(losses=losses_of({"cross_entropy": {}, "kl": {}}))
    batch = classifier_batch()
    labels = torch.full_like(batch.labels, -100)
    batch = make_batch(labels, views=batch.views)
    result = bundle(batch)
    assert result["cross_entropy"].item() == 0.0
    assert result["loss"].item() == result["kl"].item() > 0


def test_teachers_are_frozen_and_never_in_training_mode():
    bundle, teachers = make_bundle()
    before = copy.deepcopy({name: teacher.state_dict() for name, teacher in teachers.items()})
    bundle.train()
    assert bundle.student.training
    assert not any(m.training for teacher in teachers.values() for m in teacher.modules())
    bundle(classifier_batch())["loss"].backward()
    for teacher in teachers.values():
        assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    trained = [n for n, p in bundle.named_parameters() if p.grad is not None]
    assert {name.split(".")[0] for name in trained} == {"student", "terms"}
    assert {"terms.hidden_mse.projections.first.weight"} <= set(trained)
    for name, teacher in teachers.items():
        torch.testing.assert_close(teacher.state_dict(), before[name], rtol=0, atol=0)


def test_dropout_acts_on_the_student_alone():
    bundle, _ = make_bundle()
    bundle.train()
    batch = classifier_batch()
    outputs = [bundle(batch, predict=("student", "first", "second")) for _ in range(2)]
    answers = [{name: signals.logits for name, signals in each.items()} for each in outputs]
    assert torch.equal(answers[0]["first"], answers[1]["first"])
    assert torch.equal(answers[0]["second"], answers[1]["second"])
    assert not torch.equal(answers[0]["student"], answers[1]["student"])


@pytest.mark.parametrize("policy", ["average", "random", "ca-mkd", "mt-bert"])
def test_cached_signals_give_the_loss_of_live_teachers(policy):
    live, teachers = make_bundle(policy=policy)
    cached, _ = make_bundle(policy=policy, live=False)
    batch = classifier_batch()
    with torch.no_grad():
        signals = {
            name: read_signals(teacher, batch.views[name], [-1])
            for name, teacher in teachers.items()
        }
    own = {"student": batch.views["student"]}
    answers = []
    for bundle, given in ((live, batch), (cached, make_batch(views=own, signals=signals))):
        bundle.eval()
        result = bundle(given)
        result["loss"].backward()
        answers.append((result, gradients(bundle)))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)


def test_masked_lm_rows_go_through_the_same_bundle():
    bundle, teachers = make_bundle(BertForMaskedLM)
    bundle.eval()
    view = classifier_batch(2).views["student"]
    rows = torch.tensor([1, 3, LENGTH, LENGTH + 2])
    view = PaddedView(view.input_ids, view.attention_mask, view.token_type_ids, rows)
    labels = torch.tensor([5, -100, 17, 30])
    batch = make_batch(labels, views=dict.fromkeys(("student", *teachers), view))
    result = bundle(batch)

    def all_logits(model):
        return model(**view.model_inputs()).logits.flatten(0, 1)[rows].double()

    student = all_logits(bundle.student)
    target = sum(all_logits(teacher) for teacher in teachers.values()) / 2
    chosen = torch.log_softmax(student, dim=-1)[[0, 2, 3], labels[[0, 2, 3]]]
    wanted = {
        "cross_entropy": -0.5 * chosen.mean(),
        "kl": 1.5 * divergence(target, student, 2.0).mean(),
        "logit_mse": 0.1 * (target - student).pow(2).mean(),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(result[name].double(), value.detach(), rtol=1e-4, atol=1e-5)


def test_every_term_of_the_recipe_is_built():
    terms = build_terms(ALL_TERMS, 4, {"t": 4})
    assert list(terms) == list(TERMS) == list(ALL_TERMS)
