"""Teachers that know some of the task's classes, or say nothing of some rows, whatever their
numbers are there: what moves, and what must not."""

import numpy as np
import pytest
import torch
import transformers as tr
from cache_files import make_keys, write_cache
from runs import loaded
from toys import make_tiny_bert, toy_vocabulary

from ds_distill.cache.reader import CacheReader
from ds_distill.cache.schema import SignalSchema
from ds_distill.check.labels import label_notes
from ds_distill.data.batches import Units
from ds_distill.keys import content_keys
from ds_distill.losses import Seen, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.labels import LabelMap
from ds_distill.recipe.policies import POLICIES, candidates
from ds_distill.recipe.tasks import SingleLabel
from ds_distill.recipe.terms import losses_of
from ds_distill.routing import Router, fit
from ds_distill.routing.calibration import log_probabilities
from ds_distill.routing.comparison import compare
from ds_distill.routing.multi_label import fit_by_label, load_fitted, of_label
from ds_distill.routing.partial_teachers import knowing_average
from ds_distill.tasks.labelled import SingleLabelKind
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

ROWS = 6
LABELS = ["a", "b", "c", "d"]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(rows=ROWS, labels=None):
    every = torch.arange(rows)
    return Batch(
        keys=torch.stack([every, every], 1),
        views={},
        labels=torch.zeros(rows, dtype=torch.int64) if labels is None else labels,
        row_sets={"all": every, "labelled": every},
        teacher_ids=torch.zeros_like(every),
    )


def term(name, **settings):
    [only] = build_terms(losses_of({name: settings}), TermInputs(8)).values()
    return only


# ------------------------------------------------------------------------------- signals


def test_classes_stay_with_the_signals():
    logits, classes = randn(ROWS, 2), torch.tensor([1, 3])
    signals = Signals(logits, {-1: randn(ROWS, 4)}, classes)
    for made in (signals.at(torch.tensor([0, 2])), signals.to("cpu"), signals.dummy()):
        assert torch.equal(made.classes, classes)
        assert made.logits.shape[1] == 2
    spread = signals.over_all(4)
    assert torch.equal(spread[:, [1, 3]], logits) and torch.isfinite(spread).all()
    assert set(spread.argmax(1).tolist()) <= {1, 3}
    assert torch.equal(torch.softmax(spread, 1)[:, [0, 2]], torch.zeros(ROWS, 2))
    with pytest.raises(ValueError, match=r"2 classes must be \[n, 2\]"):
        Signals(randn(ROWS, 4), classes=classes)


def test_a_cache_stores_the_known_classes_alone(tmp_path):
    keys = make_keys(12)
    schema = SignalSchema(dtype="float32", classes=2, known=(0, 3))
    write_cache(tmp_path / "cache", keys, {"t": schema})
    reader = CacheReader(tmp_path / "cache")
    found = reader.read("t", reader.indices(keys))
    assert found.logits.shape == (12, 2)
    assert found.classes.tolist() == [0, 3]


# --------------------------------------------------------------------------- the bundle


def classifier(classes, seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = tr.BertConfig(vocab_size=20, intermediate_size=8, num_labels=classes, **sizes)
    model = tr.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(50)
    return model


def views(*names):
    ids = torch.randint(1, 20, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    return dict.fromkeys(names, PaddedView(ids, torch.ones_like(ids)))


def test_several_outputs_of_a_label_add_their_probabilities():
    """And a class that is none of the task's is left out of the distribution."""
    model = classifier(5, 0)
    maps = {
        "many": LabelMap(((0, 2), (4,), (1, 3))),
        "without": LabelMap(((3,), (0, 1)), (0, 2)),
    }
    bundle = Bundle(None, {"raw": model, "many": model, "without": model}, label_maps=maps)
    found = bundle(Batch.from_views(views("raw", *maps)), predict=("raw", *maps))
    p = torch.softmax(found["raw"].logits, 1)
    sums = torch.stack([p[:, 0] + p[:, 2], p[:, 4], p[:, 1] + p[:, 3]], 1)
    torch.testing.assert_close(torch.softmax(found["many"].logits, 1), sums)
    assert found["many"].classes is None
    own = torch.stack([p[:, 3], p[:, 0] + p[:, 1]], 1)
    normalised = own / own.sum(1, keepdim=True)
    torch.testing.assert_close(torch.softmax(found["without"].logits, 1), normalised)
    assert found["without"].classes.tolist() == [0, 2]
    assert torch.equal(found["without"].logits[:, 0], found["raw"].logits[:, 3]), "one: as it is"


@pytest.mark.parametrize("name", ["kl", "logit_mse"])
def test_an_unknown_class_moves_nothing(name):
    """Neither signals nor loss nor gradients of the known classes, bit for bit: the task has two
    classes more, before and between those that the teacher knows."""
    teacher = {"t": classifier(3, 1)}
    small, large = classifier(3, 2), classifier(5, 3)
    places = [1, 2, 4]
    with torch.no_grad():
        large.bert.load_state_dict(small.bert.state_dict())
        large.classifier.weight[places] = small.classifier.weight
        large.classifier.bias[places] = small.classifier.bias
    settings = losses_of({name: {"temperature": 2.0} if name == "kl" else {}})
    found = []
    maps = LabelMap(((0,), (1,), (2,)), (1, 2, 4))
    for student, label_maps in ((small, None), (large, {"t": maps})):
        terms = build_terms(settings, TermInputs(8))
        bundle = Bundle(student, teacher, terms, label_maps=label_maps)
        batch = Batch.from_views(views("student", "t"))
        loss = bundle(batch)["loss"]
        loss.backward()
        signals = bundle(batch, predict=("t",))["t"].logits
        grads = [p.grad for p in student.bert.parameters() if p.grad is not None]
        head = student.classifier.weight.grad
        assert bool(head.abs().sum() > 0)
        found.append((loss, signals, head, grads))
    (one, known, head, grads), (other, again, wide, wide_grads) = found
    assert torch.equal(one, other) and torch.equal(known, again)
    torch.testing.assert_close(wide[places], head)
    assert not wide[[0, 3]].any(), "the student's other classes get no gradient"
    for one_grad, other_grad in zip(grads, wide_grads, strict=True):
        torch.testing.assert_close(other_grad, one_grad)


# ------------------------------------------------------------------------------- losses


def partial_pair():
    return {
        "first": Signals(randn(ROWS, 2, seed=1), classes=torch.tensor([0, 2])),
        "second": Signals(randn(ROWS, 3, seed=2), classes=torch.tensor([1, 2, 3])),
    }


def test_mixed_losses_are_each_over_the_classes_of_their_teacher():
    student, teachers = Signals(randn(ROWS, 4)), partial_pair()
    target = Router({"policy": "average", "mix": "losses"})(teachers, batch_of())
    found = term("kl", temperature=2.0)(Seen(student, batch_of(), teachers, target=target))
    wanted = torch.zeros(ROWS, dtype=torch.float64)
    for of in teachers.values():
        p = torch.softmax(of.logits.double() / 2, 1)
        q = torch.softmax(student.logits.double()[:, of.classes] / 2, 1)
        wanted += 4.0 * (p * (p / q).log()).sum(1) / 2
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    found = term("logit_mse")(Seen(student, batch_of(), teachers, target=target))
    of_each = [
        (student.logits[:, of.classes] - of.logits).square().mean(1) for of in teachers.values()
    ]
    torch.testing.assert_close(found, sum(of_each) / 2)


def test_with_many_labels_a_partial_teacher_is_refused():
    teachers = partial_pair()
    labels = torch.zeros(ROWS, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="any number of labels"):
        Seen(Signals(randn(ROWS, 4)), batch_of(labels=labels), teachers).by_label()
    with pytest.raises(ValueError, match="one label each"):
        of_label(teachers, 0)


# ------------------------------------------------------------------------------ policies


def specialists(count, seed=0):
    """Each knows two classes. On texts of the other's it is as sure of one of its own; its energy
    is then lower, which no average of probabilities sees."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(4, (count,), generator=generator)
    signals = {}
    for name, own in (("first", [0, 1]), ("second", [2, 3])):
        knows = (truth[:, None] == torch.tensor(own)).any(1)
        drawn = torch.randint(2, (count,), generator=generator)
        column = torch.where(knows, truth - own[0], drawn)
        logits = 0.5 * torch.randn(count, 2, generator=generator)
        logits[torch.arange(count), column] += 6.0
        logits += torch.where(knows, 3.0, -3.0)[:, None]
        signals[name] = Signals(logits, classes=torch.tensor(own))
    keys = torch.from_numpy(content_keys([f"text {number}" for number in range(count)]))
    return signals, truth.numpy(), keys


def test_the_gate_learns_whose_class_it_is():
    signals, truth, keys = specialists(400)
    found = compare(signals, truth, keys, LABELS)
    assert set(found.policies) == {"average, losses", "gate"} == set(candidates(partial=True))
    assert found.baseline == "average, losses" and found.choice == "gate"
    assert found.policies["gate"].score > 0.95
    assert found.policies["average, losses"].score < 0.7, "which of the two, is drawn by lot"
    assert found.policies["gate"].interval[0] > 0.2
    assert all(score.score < 0.6 for score in found.teachers.values())
    first = found.teachers["first"].per_class
    assert first["c"] == first["d"] == 0.0, "it never predicts what it lacks"


def test_rows_of_which_another_teacher_says_nothing():
    """The gate's target is over all classes there, or it is refused; never over those of a teacher
    of some, which a student's first ones would be compared with."""
    signals, truth, keys = specialists(400)
    full = Signals(torch.randn(400, 4) + 4 * torch.eye(4)[torch.from_numpy(truth)])
    says = torch.arange(8) % 2 == 0
    for some in ({"first": signals["first"]}, signals):
        teachers = {**some, "file": full}
        fitted = fit(teachers, truth, keys, LABELS)
        here = {name: of.at(torch.arange(8)) for name, of in teachers.items()}
        here["file"] = Signals(here["file"].logits, reported=says)
        router = Router("gate", fitted=fitted)
        if len(some) < 2:
            with pytest.raises(ValueError, match="must know all classes"):
                router(here, batch_of(8))
            continue
        target = router(here, batch_of(8))
        assert target.logits.shape == (8, 4)
        log_probs = {
            name: log_probabilities(of.logits[:8], fitted.temperatures[name])
            for name, of in some.items()
        }
        classes = {name: of.classes for name, of in some.items()}
        wanted = knowing_average(log_probs, classes, 4)
        torch.testing.assert_close(target.logits[~says], wanted[~says])
        assert not target.weights[2, ~says].any() and target.weights[2, says].all()


def test_the_average_is_over_the_teachers_that_know_a_class():
    p = {"x": torch.tensor([[0.2, 0.8]]), "y": torch.tensor([[0.6, 0.3, 0.1]])}
    classes = {"x": torch.tensor([0, 2])}
    found = knowing_average({name: of.log() for name, of in p.items()}, classes, 3).exp()
    wanted = torch.tensor([[(0.2 + 0.6) / 2, 0.3, (0.8 + 0.1) / 2]])
    torch.testing.assert_close(found, wanted / wanted.sum())


def test_what_is_fitted_of_partial_teachers(tmp_path):
    """A temperature is fitted on examples whose class a teacher knows; the table counts the others
    as wrong; the file keeps the classes, and other teachers are refused."""
    signals, truth, keys = specialists(200)
    fitted = fit(signals, truth, keys, LABELS)
    rows = torch.from_numpy(truth < 2)
    own = {"first": Signals(signals["first"].logits[rows])}
    alone = fit(own, truth[truth < 2], keys[rows], LABELS[:2])
    assert fitted.temperatures["first"] == alone.temperatures["first"]
    assert fitted.table.correct[0, 2:].tolist() == [0, 0]
    assert fitted.table.correct[0, :2].sum() == rows.sum()
    fitted.save(tmp_path / "routing.safetensors")
    again = load_fitted(tmp_path / "routing.safetensors")
    answers = [Router("gate", fitted=f)(signals, batch_of(200)) for f in (fitted, again)]
    assert torch.equal(answers[0].logits, answers[1].logits)
    assert torch.isfinite(answers[0].logits).all()
    assert answers[0].weights.sum(0).sub(1).abs().max() < 1e-5
    others = {
        name: Signals(of.logits, classes=torch.tensor([1, 2])) for name, of in signals.items()
    }
    with pytest.raises(ValueError, match="with the classes"):
        Router("gate", fitted=fitted)(others, batch_of(200))
    with pytest.raises(ValueError, match="no teacher knows e"):
        fit(signals, truth, keys, [*LABELS, "e"])


def test_policies_that_would_mix_unlike_distributions_are_refused():
    signals, truth, keys = specialists(60)
    fitted = fit(signals, truth, keys, LABELS)
    allowed = []
    for entry in POLICIES.values():
        for settings in ({}, {"mix": "probabilities"}, {"mix": "losses"}):
            try:
                routing = entry.model_validate(settings)
            except ValueError:
                continue
            if entry.runs is None:
                continue
            router = Router({"policy": entry.part_name, **settings}, fitted=fitted)
            if routing.allows_partial():
                allowed.append((entry.part_name, settings.get("mix")))
                router(signals, batch_of(60))
                continue
            with pytest.raises(ValueError, match=r"cannot be routed by .*gate"):
                router(signals, batch_of(60))
    assert allowed == [
        ("average", "losses"),
        ("gate", None),
        ("random", "losses"),
        ("column", "losses"),
    ]


# -------------------------------------------------------------------------------- doubt


def test_a_partial_teacher_is_in_doubt_of_its_own_classes_alone():
    """It takes the texts of a large class, which it lacks, for one of its own."""
    labels = np.repeat([0, 1, 2, -1], [20, 20, 200, 10])
    logits = np.full((250, 3), -1e30, dtype=np.float32)
    logits[:, :2] = np.eye(2)[np.where(labels == 1, 1, 0)]
    kind = SingleLabelKind(SingleLabel(type="single-label", data={"path": "x"}), ["a", "b", "c"])
    keys = torch.from_numpy(content_keys([str(number) for number in range(250)]))
    examples = Units.plain(keys, labels)
    assert kind.label_doubt(logits, examples) is not None
    assert kind.label_doubt(logits, examples, (0, 1)) is None
    swapped = kind.label_doubt(logits[:, [1, 0, 2]], examples, (0, 1))
    assert swapped.order == [1, 0]


# -------------------------------------------------------------------------------- notes


def test_a_note_where_no_loss_compares_the_labels_of_two_teachers(toy_settings, tmp_path):
    """Through a teacher that shares a label with both, all are compared; so are they by labels."""
    losses = {"kl": {}}
    average = {"policy": "average", "mix": "losses"}

    def notes(known, losses, routing):
        teachers = {
            name: {"model": "m", "labels": {label: label for label in of}}
            for name, of in known.items()
        }
        distil = {"split": "transfer", "losses": losses, "routing": routing}
        data = {**toy_settings, "teachers": teachers, "phases": [{"distil": distil}]}
        configs = {name: tr.BertConfig(id2label=dict(enumerate(of))) for name, of in known.items()}
        found = label_notes(loaded(data, tmp_path), "task", LABELS, configs)
        return [note for note in found if "leaves open" in note]

    apart = {"x": ["a", "b"], "y": ["c", "d"]}
    [note] = notes(apart, losses, ["chosen", average])
    assert "(average)" in note and "x, y share no label" in note
    assert "an expertise phase and the policy gate" in note, "there is none that fits a gate"
    assert notes({**apart, "z": ["b", "c"]}, losses, average) == []
    assert notes(apart, {**losses, "cross_entropy": {}}, average) == []
    assert notes(apart, losses, "gate") == []


ALL_NAMES, CLASSES, SOME = ("a", "b", "c"), 3, 5
READ = (
    {"cross_entropy": {}, "kl": {"temperature": 2.0}, "teacher_cross_entropy": {}},
    {"kl": {"divergence": "reverse_kl", "tolerance": 0.01}, "logit_mse": {}},
    {"kl": {"divergence": "js"}},
    {"kl": {"divergence": "tv"}},
)
SAYS = {
    "one is silent": "11111 10101 11111",
    "two are": "11111 10101 10001",
    "all are of two rows": "10101 10100 10001",
    "all are": "00000 00000 00000",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("silent")
    make_tiny_bert(folder, toy_vocabulary())
    model = tr.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=CLASSES)
    return model.eval()


@pytest.fixture(scope="module")
def fitted_teachers():
    """On some other rows; of one label each, and of any number."""
    words = {name: Signals(randn(60, CLASSES, seed=at)) for at, name in enumerate(ALL_NAMES)}
    truth, keys = np.arange(60) % CLASSES, torch.as_tensor(make_keys(60))
    labels = [*"xyz"]
    return {
        False: fit(words, truth, keys, labels),
        True: fit_by_label(words, np.eye(CLASSES, dtype=np.int64)[truth], keys, labels),
    }


def loss_of(model, router, terms, batch):
    """Loss, and the gradient of each of the student's weights."""
    model.zero_grad()
    bundle = Bundle(model, {}, build_terms(losses_of(terms), TermInputs()), router)
    loss = bundle.eval()(batch)["loss"]
    loss.backward()
    return [loss.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)]


@pytest.mark.parametrize("many", [False, True], ids=["", "many labels"])
@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
@pytest.mark.parametrize("policy", [None, *sorted(POLICIES.keys() - {"chosen"})])
def test_what_a_silent_teacher_holds_moves_nothing(policy, says, many, model, fitted_teachers):
    """NaN, -inf or any other number: the loss and its gradients are those of zeros, and those of
    the rows alone of which somebody says something."""
    names = ALL_NAMES if policy else ALL_NAMES[1:2]
    words = dict(zip(ALL_NAMES, says.split(), strict=True))
    reported = {name: torch.tensor([c == "1" for c in words[name]]) for name in names}
    ids = torch.randint(5, 60, (SOME, 6), generator=torch.Generator().manual_seed(0))
    keys = torch.as_tensor(make_keys(SOME))
    labels = torch.tensor([0, 1, 2, -100, 1])
    if many:
        labels = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [-100] * 3, [1, 1, 1]])
    router = policy and Router(policy, temperature=2.0, fitted=fitted_teachers[many])

    def batch(rows, held):
        signals = {
            name: Signals(
                randn(SOME, CLASSES, seed=9 + at).masked_fill(~reported[name][:, None], held)[rows],
                reported=reported[name][rows],
            )
            for at, name in enumerate(names)
        }
        view, named = PaddedView(ids[rows], torch.ones(len(rows), 6).long()), ["b", None, "c"]
        teachers = [named[row % 3] for row in rows.tolist()]
        views = {"student": view}
        made = {"keys": keys[rows], "signals": signals, "teacher_names": teachers}
        return Batch.from_views(views, labels[rows], **made)

    every, taught = torch.arange(SOME), torch.stack([*reported.values()]).any(dim=0)
    for terms in READ:
        found = loss_of(model, router, terms, batch(every, 0.0))
        assert all(part.isfinite().all() for part in found)
        for held in (torch.nan, -torch.inf, torch.inf, 1e38):
            again = loss_of(model, router, terms, batch(every, held))
            assert all(map(torch.equal, again, found)), (terms, held)
        if "cross_entropy" in terms:  # counts all rows with a label
            continue
        if not taught.any():
            assert not any(part.any() for part in found)
            continue
        alone = loss_of(model, router, terms, batch(taught.nonzero()[:, 0], 0.0))
        for part, wanted in zip(found, alone, strict=True):
            torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-6)
