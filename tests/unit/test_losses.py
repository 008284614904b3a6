"""Loss terms, also of inner layers, with divergences and tolerances, against slow
transcriptions of their equations in float64, gradients too; and the bundle that adds them up."""

import math
from itertools import pairwise

import pytest
import torch
from cases import CASES
from families import VOCABULARY, built
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from ds_distill.losses import CrossEntropy, Seen, Term, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.encoder import read_signals
from ds_distill.reads import Reads
from ds_distill.recipe.terms import HiddenMSELoss, losses_of
from ds_distill.routing import Router, Target
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

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


def term_of(name, section, **widths):
    """Of a student of two layers, and teachers of four."""
    torch.manual_seed(0)  # projections
    inputs = TermInputs(widths.pop("student", 5), widths, 2, dict.fromkeys(widths, 4))
    return build_terms(losses_of({name: section}), inputs)[name]


def divergence(teacher, student, temperature):
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), summand by summand."""
    p, q = (torch.softmax(z.double() / temperature, dim=-1) for z in (teacher, student))
    return temperature**2 * (p * (p.log() - q.log())).sum(dim=-1)


def check_term(term, wanted, student, batch, teachers=None, target=None, *, states=False):
    """Values and gradients of the student's logits, or states, of rows that are weighted unlike."""
    given = student.clone().requires_grad_()
    own = Signals(randn(ROWS, CLASSES), {-1: given}) if states else Signals(given)
    rows = term(Seen(own, batch, teachers or {}, target=target))
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


def taught(states):
    """A teacher's states; of another dtype, as in a cache."""
    return {"t": Signals(randn(ROWS, CLASSES), {-1: states})}


# --------------------------------------------------------------------------------- terms


def test_cross_entropy_of_labelled_rows():
    term = term_of("cross_entropy", {"weight": 0.3})
    labelled = LABELS.clamp(min=0)

    def wanted(z):
        return -0.3 * torch.log_softmax(z, dim=-1)[torch.arange(ROWS), labelled]

    check_term(term, wanted, randn(ROWS, CLASSES), make_batch(dummy=[1]))


@given(
    st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=9),
    st.one_of(
        st.just("balanced"),
        st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 100), min_size=1),
    ),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_class_weights_have_mean_one_over_the_training_examples(labels, named, seed):
    """Each row's loss is its class's weight times its own, and the mean over rows that lose alike
    is as without weights."""
    counts = [labels.count(number) for number in range(CLASSES)]
    inputs = TermInputs(labels="abcd", class_counts=counts)
    term = CrossEntropy({"class_weights": named, "weight": 0.5}, inputs)
    if named == "balanced":
        weights = [1 / count if count else 0.0 for count in counts]
    else:
        weights = [named.get(name, 1.0) for name in "abcd"]
    mean = sum(w * count for w, count in zip(weights, counts, strict=True)) / len(labels)
    batch, student = make_batch(torch.tensor(labels)), randn(len(labels), CLASSES, seed=seed)

    def wanted(z):
        own = torch.tensor([weights[label] / mean for label in labels], dtype=torch.float64)
        return -0.5 * own * torch.log_softmax(z, dim=-1)[torch.arange(len(labels)), labels]

    check_term(term, wanted, student, batch)
    alike = term(Seen(Signals(torch.zeros(len(labels), CLASSES)), batch))
    assert alike.mean().item() == pytest.approx(0.5 * math.log(CLASSES), rel=1e-5)
    if named == "balanced":  # each class that occurs has the same part of the loss
        sums = torch.zeros(CLASSES).index_add(0, torch.tensor(labels), alike)
        assert sums[sums > 0].max().item() == pytest.approx(sums[sums > 0].min().item(), rel=1e-5)


def test_class_weights_without_counts_are_refused():
    with pytest.raises(ValueError, match="needs class_counts"):
        CrossEntropy({"class_weights": "balanced"})
    with pytest.raises(ValueError, match="class_weights of e: `labels` must name"):
        CrossEntropy({"class_weights": {"e": 2.0}}, TermInputs(labels="abcd", class_counts=[1] * 4))


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
    check_term(term, wanted, randn(ROWS, CLASSES), make_batch(), teachers, Target(None, weights))


@pytest.mark.parametrize("partial", [False, True])
def test_teacher_cross_entropy_is_the_mean_over_teachers_without_a_gradient(partial):
    """Row by row. Of teachers that know some of the classes, over those that know the label."""
    classes = {"one": [0, 1, 2, 3], "other": [1, 3]} if partial else dict.fromkeys("abc", range(4))
    outputs = {name: randn(ROWS, len(c), seed=7 + n) for n, (name, c) in enumerate(classes.items())}
    teachers = {
        name: Signals(outputs[name], classes=torch.tensor(known) if partial else None)
        for name, known in classes.items()
    }
    student = randn(ROWS, CLASSES).requires_grad_()
    batch = make_batch(dummy=(3,))
    found = term_of("teacher_cross_entropy", {"weight": 0.5})(
        Seen(Signals(student), batch, teachers)
    )
    wanted = []
    for row in (0, 1, 5):  # the labelled ones that count
        label, of_teachers = int(LABELS[row]), []
        for name, known in classes.items():
            if label in known:
                p = torch.softmax(outputs[name][row].double(), dim=0)
                of_teachers.append(-math.log(p[list(known).index(label)]))
        wanted.append(0.5 * sum(of_teachers) / len(of_teachers))
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)
    assert found.dtype == torch.float32 and not found.requires_grad


def test_confidence_penalty_is_the_negative_entropy():
    term = term_of("confidence_penalty", {"weight": 0.3})

    def wanted(z):
        p = torch.softmax(z, dim=-1)
        return -0.3 * -(p * p.log()).sum(dim=-1)

    check_term(term, wanted, 3 * randn(ROWS, CLASSES), make_batch(dummy=[1]))


@pytest.mark.parametrize("dummy", [[], [1, 4], range(ROWS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cosine(dummy, dtype):
    term, teacher = term_of("cosine", {"weight": 0.7}, t=5), randn(ROWS, 5, seed=1).to(dtype)

    def wanted(s):
        t = teacher.double()
        dot = (s * t).sum(dim=-1)
        return 0.7 * (1 - dot / (s.pow(2).sum(dim=-1).sqrt() * t.pow(2).sum(dim=-1).sqrt()))

    batch = make_batch(dummy=dummy)
    check_term(term, wanted, randn(ROWS, 5), batch, taught(teacher), states=True)


def boundary(s, t, margin):
    """DoKTra's equation 5, neuron by neuron."""
    rows = []
    for own, other in zip(s, t, strict=True):
        total = 0.0
        for x, y in zip(own, other, strict=True):
            rho = 1.0 if y > 0 else 0.0
            part = rho * (margin - x).clamp(min=0) + (1 - rho) * (margin + x).clamp(min=0)
            total = total + part**2
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("margin", [1.0, 0.25])
@pytest.mark.parametrize(("width", "dummy"), [(5, []), (5, [1, 4]), (8, []), (8, [0])])
def test_activation_boundary(margin, width, dummy):
    term = term_of("activation_boundary", {"weight": 0.5, "margin": margin}, t=width)
    student, teacher = randn(ROWS, 5), randn(ROWS, width, seed=1)
    student[0, 0] = 0.0
    if width == 5:
        teacher[2, 1] = 0.0  # rho(0) is 0
        assert term.map is None

    def wanted(s):
        mapped = teacher.double() if term.map is None else teacher.double() @ term.map.double().T
        return 0.5 * boundary(s, mapped, margin)

    check_term(term, wanted, student, make_batch(dummy=dummy), taught(teacher), states=True)


MAP = [-0.431641, 0.114124, -0.160634]


def test_the_map_between_widths_is_drawn_from_the_seed_and_not_trained():
    section = losses_of({"activation_boundary": {}})

    def made(seed, drawn_before):
        torch.randn(drawn_before)
        inputs = TermInputs(5, {"t": 8}, seed=seed)
        return build_terms(section, inputs)["activation_boundary"]

    first, again, other = made(1, 0), made(1, 3), made(2, 0)
    assert first.map.shape == (5, 8) and torch.equal(first.map, again.map)
    assert not torch.equal(first.map, other.map)
    # The same in each version: a resumed training would go on with another map.
    assert first.map[0, :3].tolist() == pytest.approx(MAP, abs=1e-6)
    assert list(first.parameters()) == [] and list(first.state_dict()) == ["map"]


@given(st.integers(0, 99), st.floats(0.01, 3))
@settings(max_examples=40, deadline=None)
def test_neurons_on_the_other_side(seed, margin):
    """The share that is measured is that of the signs that differ, and 0 where the loss is."""
    term = term_of("activation_boundary", {"margin": margin}, t=5)
    student, teacher = randn(ROWS, 5, seed=seed), randn(ROWS, 5, seed=seed + 1000)
    batch = make_batch(dummy=[seed % ROWS])
    counted = batch.row_sets["all"]

    def both(state):
        one, other = (Signals(randn(ROWS, CLASSES), {-1: of}) for of in (state, teacher))
        seen = Seen(one, batch, {"t": other})
        return term(seen), term.measures(seen)["other_sign"]

    _, share = both(student)
    count = [
        [(x > 0) != (y > 0) for x, y in zip(*rows, strict=True)]
        for rows in zip(student[counted].tolist(), teacher[counted].tolist(), strict=True)
    ]
    assert share.tolist() == pytest.approx([sum(row) / 5 for row in count])
    losses, share = both(torch.where(teacher > 0, margin, -margin))
    assert not losses.any() and not share.any()


def test_what_terms_measure_adds_up_over_micro_batches():
    bundle, _ = make_bundle(losses=losses_of({"activation_boundary": {}}), teachers=1)
    bundle.eval()
    batch = classifier_batch()
    whole = bundle(batch)
    assert list(whole) == ["loss", "activation_boundary", "activation_boundary.other_sign"]
    assert whole["loss"].item() == whole["activation_boundary"].item()
    parts = [bundle(part_of(batch, 0, 2)), bundle(part_of(batch, 2, ROWS))]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value, rtol=1e-5, atol=1e-6)
    assert 0 < whole["activation_boundary.other_sign"].item() < 1


def test_a_bf16_student_meets_the_whole_target():
    # A target rounded to bf16 would be off by up to 0.4% of each logit.
    teacher, student = 20 * randn(ROWS, 50), (20 * randn(ROWS, 50)).bfloat16()
    target = Target(teacher, torch.ones(1, ROWS))
    rows = term_of("kl", {})(Seen(Signals(student), make_batch(), {}, target=target))
    torch.testing.assert_close(
        rows.double(), divergence(teacher, student, 1.0), rtol=1e-4, atol=1e-5
    )


# -------------------------------------------------------------------------------- bundle

LENGTH = 7
ALL_TERMS = losses_of(
    {
        "cross_entropy": {"weight": 0.5},
        "kl": {"temperature": 2.0, "weight": 1.5},
        "logit_mse": {"weight": 0.1},
        "hidden_mse": {"weight": 0.2},
    }
)


def tiny(kind, seed, width=16, layers=1, **more):
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2}
    sizes["num_labels"] = CLASSES
    return built("bert", kind, seed=seed, **{**sizes, **more})


CLASSIFIER = AutoModelForSequenceClassification


def make_bundle(kind=CLASSIFIER, losses=ALL_TERMS, policy="average", live=True, teachers=2):
    student = tiny(kind, 0)
    widths = dict([("first", 24), ("second", 8)][:teachers])
    teachers = {"first": tiny(kind, 1, 24, 2), "second": tiny(kind, 2, 8)}
    teachers = {name: teachers[name] for name in widths}
    torch.manual_seed(3)
    terms = build_terms(losses, TermInputs(16, widths))
    router = Router(policy, temperature=2.0)
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


def test_a_batch_without_labels_has_no_cross_entropy():
    bundle, _ = make_bundle(losses=losses_of({"cross_entropy": {}, "kl": {}}))
    batch = classifier_batch()
    labels = torch.full_like(batch.labels, -100)
    batch = make_batch(labels, views=batch.views)
    result = bundle(batch)
    assert result["cross_entropy"].item() == 0.0
    assert result["loss"].item() == result["kl"].item() > 0


@pytest.mark.parametrize("policy", ["average", "random", "ca-mkd", "mt-bert"])
def test_cached_signals_give_the_loss_of_live_teachers(policy):
    live, teachers = make_bundle(policy=policy)
    cached, _ = make_bundle(policy=policy, live=False)
    batch = classifier_batch()
    with torch.no_grad():
        signals = {
            name: read_signals(teacher, batch.views[name], Reads({-1}))
            for name, teacher in teachers.items()
        }
    own = {"student": batch.views["student"]}
    answers = []
    for bundle, each in ((live, batch), (cached, make_batch(views=own, signals=signals))):
        bundle.eval()
        result = bundle(each)
        result["loss"].backward()
        answers.append((result, gradients(bundle)))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)


def test_masked_lm_rows_go_through_the_same_bundle():
    bundle, teachers = make_bundle(AutoModelForMaskedLM)
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


class Unlike(Term):
    """Reads a layer of the student and others of the teachers, and no logits."""

    reads = Reads({1}, logits=False)
    label_rows = None

    def teacher_reads(self, teacher):
        return Reads({"deep": {4}, "shallow": {0, 2}}[teacher], logits=False)

    def forward(self, seen):
        models = {"student": seen.student, **seen.teachers}
        self.seen = {name: set(signals.hidden) for name, signals in models.items()}
        return seen.at(self.rows).student.hidden[1].float().square().sum(dim=-1)


@pytest.mark.parametrize("labels", [torch.zeros(2, dtype=torch.int64), torch.ones(2, 3).long()])
def test_a_term_reads_other_layers_of_each_teacher(labels):
    """Of teachers of unlike depths none is asked for a layer that it does not have; and rows of a
    term on states are examples, however many labels they have."""
    depths = {"student": 1, "deep": 4, "shallow": 2}
    models = {
        name: tiny(CLASSIFIER, 0, layers=depth, num_labels=3) for name, depth in depths.items()
    }
    ids = torch.randint(5, 20, (2, 6))
    view = PaddedView(ids, torch.ones_like(ids))
    batch = Batch.from_views(dict.fromkeys(models, view), labels)
    term = Unlike({})
    router = Router("average")
    student = models.pop("student")
    Bundle(student, models, {"unlike": term}, router)(batch)["loss"].backward()
    assert term.seen == {"student": {1}, "deep": {4}, "shallow": {0, 2}}
    assert not student.classifier.weight.grad.any(), "no term reads logits: the head rests"


@pytest.mark.parametrize(
    ("layer", "which"), [(-1, "the last layer's states"), (1, "the states of layer 1")]
)
def test_states_that_were_not_cached_are_named(layer, which):
    settings = {"hidden_mse": {} if layer == -1 else {"layers": {layer: layer}}}
    term = build_terms(losses_of(settings), TermInputs(4, {"t": 4}, 2, {"t": 2}))["hidden_mse"]
    states = dict.fromkeys((-1, 0, 1, 2), randn(ROWS, 4))
    student, teacher = (Signals(randn(ROWS, 4), hidden) for hidden in (states, {0: states[0]}))
    with pytest.raises(ValueError, match=which):
        term(Seen(student, make_batch(), {"t": teacher}))


MAPS = ["last", "uniform", {0: 0}, {1: 2, 2: 3}, {2: 4, 1: 4}]
PAIRS = [[(-1, -1)], [(1, 2), (2, 4)], [(0, 0)], [(1, 2), (2, 3)], [(2, 4), (1, 4)]]


def states(layers, width, seed):
    return {layer: randn(ROWS, width, seed=seed + layer + 1) for layer in dict.fromkeys(layers)}


def close(ours, exact):
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


def squares(image, taught):
    """Rohanian et al. 2022, equation 12: the MSE of a pair of states, neuron by neuron."""
    return sum((x - y) ** 2 for x, y in zip(image, taught, strict=True)) / len(taught)


def unit_vectors(image, taught):
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
def test_teachers_and_pairs_are_summed(name, section, widths, distance, layers, pairs, dummy):
    """Of the student's states, or of their image by a trained map for each teacher and pair."""
    term = term_of(name, {"weight": 0.7, "layers": layers, **section}, **widths)
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


DIVERGENCES = {
    case.name: case.rows for case in CASES if case.name in ("kl", "reverse_kl", "js", "tv")
}


@pytest.mark.parametrize("on", ["row", "mean"])
@pytest.mark.parametrize("open_", [True, False])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_with_a_tolerance(name, open_, on):
    batch = make_batch(dummy=[2])
    counted = batch.row_sets["all"]
    student, teacher = randn(ROWS, CLASSES), randn(ROWS, CLASSES, seed=1)
    exact = student.double().requires_grad_()
    losses = 0.7 * DIVERGENCES[name]([exact], [teacher.double()], 2.0)[counted]
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
    rows = term_of("kl", {**section, **hinge}, t=5)(Seen(Signals(given_logits), batch, taught))
    assert rows.shape == counted.shape
    close(rows.sum(), wanted)
    rows.sum().backward()
    wanted.backward()
    torch.testing.assert_close(given_logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert bool(given_logits.grad.any()) == (open_ or on == "row")


@pytest.mark.parametrize("name", ["logit_mse", "hidden_mse", "cosine", "activation_boundary"])
@pytest.mark.parametrize("on", ["row", "mean"])
def test_every_distillation_term_has_a_tolerance(name, on):
    student = Signals(randn(ROWS, CLASSES), {-1: randn(ROWS, 5)})
    teacher = {"t": Signals(randn(ROWS, CLASSES, seed=1), {-1: randn(ROWS, 5, seed=2)})}
    batch = make_batch()
    plain = term_of(name, {"weight": 0.7}, t=5)(Seen(student, batch, teacher))
    middle = plain.mean().item()
    for tolerance in (0.9 * middle, 1.1 * middle):
        term = term_of(name, {"weight": 0.7, "tolerance": tolerance, "tolerance_on": on}, t=5)
        rows = term(Seen(student, batch, teacher))
        if on == "row":
            wanted = sum(max(loss - tolerance, 0.0) for loss in plain.tolist())
        else:
            wanted = ROWS * max(middle - tolerance, 0.0)
        assert rows.sum().item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@given(st.integers(1, 24), st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_uniform_ends_at_the_last_layer(student, teacher):
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
