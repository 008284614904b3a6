"""Routing policies against slow transcriptions of their rules, one example at a time."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from waits import Waits

from ds_distill.errors import UserError
from ds_distill.keys import content_keys, name_id, uniform
from ds_distill.recipe.policies import (
    POLICIES,
    Average,
    Best,
    ByColumn,
    ByExpertise,
    Calibrated,
    ConfidenceAware,
    LearnedGate,
    MTBert,
    Random,
)
from ds_distill.routing import ExpertiseTable, Fitted, Router, fit
from ds_distill.routing.calibration import fit_temperature
from ds_distill.routing.fitting import STATES, folds_of
from ds_distill.routing.gate import FOLDS, Gate
from ds_distill.routing.multi_label import (
    FittedByLabel,
    check_states,
    fit_by_label,
    joined,
    load_fitted,
    of_label,
)
from ds_distill.routing.policies import NOTHING, Asked
from ds_distill.seen import Target
from ds_distill.types import Batch, Signals

NAMES = ("ann", "bob", "eve", "zoe")
NORMALISED = ("average", "best", "random", "column", "expertise", "calibrated", "ca-mkd")
POLICY_SETTINGS = [
    *(policy() for name, policy in POLICIES.items() if name != "chosen"),
    *(ByExpertise(conflict=rule) for rule in ("best-teacher", "best-expert", "most-confident")),
]
TEMPERATURES = {"ann": 0.7, "bob": 1.9, "eve": 1.0, "zoe": 3.1, "only": 1.0}


def make_keys(count, mark=""):
    return torch.from_numpy(content_keys([f"text {mark}{number}" for number in range(count)]))


def make_table(correct, total, teachers):
    """correct: {teacher: right answers per class}."""
    counts = np.array([correct[name] for name in teachers])
    labels = tuple(f"class {index}" for index in range(len(total)))
    return ExpertiseTable(tuple(teachers), labels, counts, np.array(total))


def make_fitted(table, width=0):
    """A table with temperatures and a gate that belong to the teachers' names.

    width: of the states that the gate reads; 0 for none.
    """
    classes = len(table.total)

    def numbers(name, *shape):
        seed = sum(map(ord, name)) + sum(shape)
        return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))

    rows = len(table.teachers) * (classes + 1 + width)
    gate = Gate(
        numbers("".join(sorted(table.teachers)), rows, classes) - 0.5,
        numbers("bias", classes),
        width > 0,
    )
    return Fitted(
        table,
        {name: TEMPERATURES.get(name, 1.0) for name in table.teachers},
        gate,
        torch.zeros(0, 2, dtype=torch.int64),
    )


def make_batch(labels, keys=None, epoch=0):
    labels = torch.as_tensor(labels)
    keys = make_keys(len(labels)) if keys is None else keys
    row_sets = {"all": torch.arange(len(labels)), "labelled": (labels >= 0).nonzero()[:, 0]}
    ids = torch.tensor([name_id(name) if name else 0 for name in named(keys)])
    return Batch(keys, {}, labels, row_sets, epoch, teacher_ids=ids)


def named(keys):
    """The teacher that the data name for each row; some none."""
    return [[*NAMES, None][high % (len(NAMES) + 1)] for high in keys[:, 0].tolist()]


def route(routing, logits, labels=None, table=None, *, temperature=1.0, epoch=0, keys=None, seed=0):
    count = len(next(iter(logits.values())))
    batch = make_batch([-100] * count if labels is None else labels, keys, epoch)
    fitted = table if isinstance(table, Fitted | None) else make_fitted(table)
    router = Router(routing, temperature=temperature, seed=seed, fitted=fitted)
    return router({name: Signals(scores) for name, scores in logits.items()}, batch)


# ------------------------------------------------------------------------- oracles


def hard_prediction(scores):
    return max(range(len(scores)), key=lambda index: (scores[index], -index))


def overall(name, correct, total):
    return sum(correct[name]) / max(sum(total), 1)


def best_of(names, correct, total):
    """The most accurate overall; of equals the first by name."""
    return min(names, key=lambda name: (-overall(name, correct, total), name))


def best_in_class(index, correct, total):
    most = max(correct[name][index] for name in correct)
    equals = [name for name in correct if correct[name][index] == most]
    return best_of(equals, correct, total)


def experts_of(scores, correct, total):
    """The teachers that predict a class that they know best."""
    return [
        name
        for name in scores
        if best_in_class(hard_prediction(scores[name]), correct, total) == name
    ]


def expert_by_hand(scores, correct, total, conflict):
    """Sections 4.5 to 4.7: scores of one example by teacher -> the teacher it follows."""
    experts = experts_of(scores, correct, total)
    if len(experts) == 1:
        return experts[0]
    if conflict == "best-expert" and experts:
        return best_of(experts, correct, total)
    return best_of(list(correct), correct, total)


def cross_entropy(scores, label):
    largest = max(scores)
    return math.log(sum(math.exp(x - largest) for x in scores)) - (scores[label] - largest)


def ca_mkd_by_hand(scores, label):
    if len(scores) == 1 or label < 0:
        return dict.fromkeys(scores, 1 / len(scores))
    errors = {name: cross_entropy(scores[name], label) for name in scores}
    total = sum(math.exp(error) for error in errors.values())
    return {
        name: (1 - math.exp(error) / total) / (len(scores) - 1) for name, error in errors.items()
    }


def mt_bert_by_hand(scores, label):
    errors = {name: cross_entropy(scores[name], label) if label >= 0 else 0.0 for name in scores}
    return {name: 1 / (1 + error) for name, error in errors.items()}


def weights_by_hand(routing, scores, label, correct, total, teacher):
    """One example's weights by teacher; random excepted. teacher: what the data name."""
    if routing.policy in ("average", "calibrated"):
        return dict.fromkeys(scores, 1 / len(scores))
    if routing.policy == "column":
        known = teacher in scores
        return {name: float(name == teacher) if known else 1 / len(scores) for name in scores}
    if routing.policy == "ca-mkd":
        return ca_mkd_by_hand(scores, label)
    if routing.policy == "mt-bert":
        return mt_bert_by_hand(scores, label)
    if routing.policy == "best":
        followed = best_of(list(correct), correct, total)
    else:
        followed = expert_by_hand(scores, correct, total, routing.conflict)
    return {name: float(name == followed) for name in scores}


def softmax(scores, temperature):
    scaled = [x / temperature for x in scores]
    exps = [math.exp(x - max(scaled)) for x in scaled]
    return [x / sum(exps) for x in exps]


@st.composite
def cases(draw):
    """Teachers' logits on some rows, labels, and an expertise table with ties and gaps."""
    teachers = draw(st.permutations(NAMES).map(lambda p: p[: draw(st.integers(1, 4))]))
    rows, classes = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    # Integers make ties of logits, and of accuracies.
    score = st.one_of(st.integers(-3, 3), st.floats(-8, 8, width=32)).map(float)
    table = st.lists(
        st.lists(score, min_size=classes, max_size=classes), min_size=rows, max_size=rows
    )
    logits = {name: torch.tensor(draw(table)) for name in teachers}
    labels = draw(st.lists(st.sampled_from([-100, *range(classes)]), min_size=rows, max_size=rows))
    total = draw(st.lists(st.integers(0, 3), min_size=classes, max_size=classes))
    correct = {name: [draw(st.integers(0, most)) for most in total] for name in teachers}
    return logits, labels, correct, total


ROUTINGS = [
    Average(),
    Best(),
    Random(),
    ByColumn(),
    ByExpertise(conflict="best-teacher"),
    ByExpertise(conflict="best-expert"),
    Calibrated(),
    ConfidenceAware(),
    MTBert(),
]
each_routing = pytest.mark.parametrize(
    "routing",
    ROUTINGS,
    ids=["-".join(routing.model_dump(exclude_none=True).values()) for routing in ROUTINGS],
)


@each_routing
@settings(max_examples=15)
@given(
    case=cases(),
    mix=st.sampled_from(["logits", "probabilities", "losses"]),
    temperature=st.floats(1, 4),
    order=st.randoms(),
)
def test_weights_and_targets_are_what_the_rules_say(routing, case, mix, temperature, order):
    """In whatever order the teachers are given, and were fitted."""
    logits, labels, correct, total = case
    routing = routing.model_copy(update={"mix": mix})
    routed = route(
        routing, logits, labels, make_table(correct, total, list(correct)), temperature=temperature
    )
    names, others = list(logits), list(correct)
    order.shuffle(names)
    order.shuffle(others)
    shuffled, table = {name: logits[name] for name in names}, make_table(correct, total, others)
    again = route(routing, shuffled, labels, table, temperature=temperature)
    places = [list(logits).index(name) for name in names]
    torch.testing.assert_close(again.weights, routed.weights[places])
    assert (routed.logits is None) == (mix == "losses")
    if routed.logits is not None:
        torch.testing.assert_close(again.logits, routed.logits, rtol=1e-4, atol=1e-4)
    if routing.policy in NORMALISED:
        torch.testing.assert_close(routed.weights.sum(dim=0), torch.ones(len(labels)))
    if routing.policy == "random":  # its choice has tests of its own
        return
    teachers = named(make_keys(len(labels)))
    for row, label in enumerate(labels):
        scores = {name: values[row].tolist() for name, values in logits.items()}
        wanted = weights_by_hand(routing, scores, label, correct, total, teachers[row])
        if routing.policy == "calibrated":
            scores = {name: [x / TEMPERATURES[name] for x in scores[name]] for name in scores}
        assert routed.weights[:, row].tolist() == pytest.approx(list(wanted.values()), abs=1e-5)
        if mix == "losses":
            continue
        if mix == "logits":
            columns = zip(*scores.values(), strict=True)
            mixed = [
                sum(w * x for w, x in zip(wanted.values(), column, strict=True))
                for column in columns
            ]
            assert routed.logits[row].tolist() == pytest.approx(mixed, abs=1e-3)
        else:
            shares = {name: softmax(values, temperature) for name, values in scores.items()}
            mixed = [
                sum(wanted[name] * shares[name][index] for name in shares) / sum(wanted.values())
                for index in range(len(total))
            ]
            target = torch.softmax(routed.logits[row] / temperature, dim=0)
            assert target.tolist() == pytest.approx(mixed, abs=1e-4)


# ---------------------------------------------------------- what is learnt from a split


TARGETS = [
    ByExpertise(conflict="most-confident"),
    LearnedGate(),
]
"""Policies with an oracle of their own."""


def log_softmax(scores, temperature=1.0):
    scaled = [x / temperature for x in scores]
    total = max(scaled) + math.log(sum(math.exp(x - max(scaled)) for x in scaled))
    return [x - total for x in scaled]


def gate_by_hand(scores, states, fitted):
    """log of the calibrated average, plus x W + b."""
    names = sorted(scores)
    outputs = {name: log_softmax(scores[name], TEMPERATURES[name]) for name in names}
    energies = [math.log(sum(math.exp(x) for x in scores[name])) for name in names]
    x = [y for name in names for y in outputs[name]] + energies
    x += [y for name in names for y in states.get(name, [])]
    weight, bias = fitted.gate.weight.tolist(), fitted.gate.bias.tolist()
    target = []
    for c in range(len(bias)):
        mean = sum(math.exp(outputs[name][c]) for name in names) / len(names)
        target.append(math.log(mean) + sum(f * w[c] for f, w in zip(x, weight, strict=True)))
        target[c] += bias[c]
    return softmax(target, 1.0)


@settings(max_examples=15)
@given(case=cases(), width=st.sampled_from([0, 3]), order=st.randoms())
def test_a_gate_is_what_the_equation_says(case, width, order):
    logits, labels, correct, total = case
    fitted = make_fitted(make_table(correct, total, list(correct)), width)
    states = {
        name: torch.randn(len(labels), width, generator=torch.Generator().manual_seed(len(name)))
        for name in logits
        if width
    }
    names = list(logits)
    order.shuffle(names)  # the fitted numbers are another order of teachers than the batch's
    teachers = {name: Signals(logits[name], {-1: states[name]} if width else {}) for name in names}
    router = Router("gate", fitted=fitted)
    assert router.layers == ((-1,) if width else ())
    routed = router(teachers, make_batch(labels))
    for row in range(len(labels)):
        scores = {name: logits[name][row].tolist() for name in names}
        there = {name: states[name][row].tolist() for name in names if width}
        target = torch.softmax(routed.logits[row], dim=0).tolist()
        assert target == pytest.approx(gate_by_hand(scores, there, fitted), abs=1e-4)
        # Each teacher's share of the probability that all give to the target's class.
        best = target.index(max(target))
        behind = [softmax(scores[name], TEMPERATURES[name])[best] for name in names]
        shares = [x / sum(behind) for x in behind]
        assert routed.weights[:, row].tolist() == pytest.approx(shares, abs=1e-4)


@settings(max_examples=15)
@given(case=cases())
def test_conflicts_go_to_the_most_confident(case):
    logits, labels, correct, total = case
    table = make_table(correct, total, list(correct))
    routing = ByExpertise(conflict="most-confident")
    routed = route(routing, logits, labels, table)
    for row in range(len(labels)):
        scores = {name: values[row].tolist() for name, values in logits.items()}
        sure = {name: max(softmax(scores[name], TEMPERATURES[name])) for name in scores}
        rivals = experts_of(scores, correct, total) or list(scores)
        followed = list(scores)[int(routed.weights[:, row].argmax())]
        assert followed in rivals
        assert sure[followed] == pytest.approx(max(sure[name] for name in rivals), abs=1e-6)
        equals = [name for name in rivals if sure[name] == sure[followed]]
        assert routed.weights[:, row].sum() == 1.0
        if all(sure[name] < sure[followed] - 1e-6 for name in rivals if name not in equals):
            assert followed == best_of(equals, correct, total)


def speaking(count, classes=3, teachers=("ann", "bob"), seed=0, width=0):
    """Teachers' words on random examples; each is good at some classes."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(classes, (count,), generator=generator)
    words = {}
    for number, name in enumerate(teachers):
        scores = torch.randn(count, classes, generator=generator)
        knows = truth % len(teachers) == number
        scores[torch.arange(count), truth] += torch.where(knows, 3.0, 0.5)
        states = torch.randn(count, width, generator=generator)
        words[name] = Signals(scores, {-1: states} if width else {})
    return words, truth.numpy(), make_keys(count)


@pytest.mark.parametrize("true_temperature", [0.3, 2.5])
def test_the_temperature_that_made_the_labels_is_found(true_temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5_000, 4, generator=generator)
    draws = torch.multinomial(torch.softmax(logits / true_temperature, 1), 1, generator=generator)
    found = fit_temperature(logits, draws[:, 0])
    assert found == pytest.approx(true_temperature, rel=0.1)
    # No temperature near it is likelier.
    losses = [
        torch.nn.functional.cross_entropy(logits.double() / t, draws[:, 0])
        for t in (found * 0.99, found, found * 1.01)
    ]
    assert losses[1] < min(losses[0], losses[2])


def test_what_is_fitted_does_not_depend_on_the_order_of_rows_or_teachers():
    width = 5
    words, truth, keys = speaking(120, width=width)
    truth[::7] = -1
    asked, _, _ = speaking(30, seed=1, width=width)
    targets = []
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    for rows, names in ((torch.arange(120), ["ann", "bob"]), (order, ["bob", "ann"])):
        there = {
            name: Signals(
                words[name].logits[rows], {k: v[rows] for k, v in words[name].hidden.items()}
            )
            for name in names
        }
        fitted = fit(there, truth[rows.numpy()], keys[rows], list("abc"))
        teachers = {name: asked[name] for name in names}
        for routing in [*TARGETS, Calibrated(), Best()]:
            routed = Router(routing, fitted=fitted)(teachers, make_batch([-100] * 30))
            targets.append(torch.softmax(routed.logits, dim=1))
    half = len(targets) // 2
    for one, other in zip(targets[:half], targets[half:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


def test_targets_are_equal_bit_for_bit_in_any_order_of_teachers():
    """A sum in floats depends on its order, and a recipe's order of teachers must not matter."""
    width = 3
    words, _, _ = speaking(200, teachers=NAMES, width=width)
    fitted = make_fitted(make_table({name: [1, 1, 1] for name in NAMES}, [2, 2, 2], NAMES), width)
    router = Router("gate", fitted=fitted)
    targets = [
        router({name: words[name] for name in names}, make_batch([-100] * 200)).logits
        for names in itertools.permutations(NAMES)
    ]
    assert all(torch.equal(target, targets[0]) for target in targets)


def test_what_was_fitted_goes_to_the_device_of_the_batch():
    signals, truth, keys = speaking(20)
    router = Router("gate", fitted=fit(signals, truth, keys, list("abc")))
    there = torch.device("meta")
    target = router({name: s.to(there) for name, s in signals.items()}, make_batch(truth).to(there))
    assert target.logits.device == target.weights.device == there


def test_what_is_fitted_survives_the_disk(tmp_path):
    words, truth, keys = speaking(60, width=4)
    fitted = fit(words, truth, keys, list("abc"))
    fitted.save(tmp_path / "routing.safetensors")
    again = load_fitted(tmp_path / "routing.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["routing.safetensors"]
    for routing in [*TARGETS, *ROUTINGS]:
        answers = [Router(routing, fitted=f)(words, make_batch(truth)) for f in (fitted, again)]
        assert torch.equal(answers[0].weights, answers[1].weights)
        if answers[0].logits is not None:
            assert torch.equal(answers[0].logits, answers[1].logits)


@pytest.mark.parametrize(("width", "many"), [(0, False), (4, False), (4, True)])
def test_a_gate_of_first_tokens_states_is_refused(width, many, tmp_path):
    """As earlier versions fitted it, whatever the teachers' heads read."""
    words, truth, keys = speaking(60, width=width)
    path = tmp_path / "routing.safetensors"
    if many:
        truth = np.stack([truth == label for label in range(3)], axis=1).astype(np.int64)
        fit_by_label(words, truth, keys, list("abc")).save(path)
    else:
        fit(words, truth, keys, list("abc")).save(path)
    check_states(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fitted"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for part in header.get("of", [header]):
        del part["states"]
    save_file(tensors, path, {"fitted": json.dumps(header)})
    if width:
        with pytest.raises(UserError, match=r"fitted this gate to first tokens' states"):
            check_states(path)
    else:
        check_states(path)


def test_a_gate_takes_at_most_so_many_examples(monkeypatch):
    words, truth, keys = speaking(300)
    monkeypatch.setattr("ds_distill.routing.fitting.fit_temperature", lambda *_: 1.0)
    monkeypatch.setattr("ds_distill.routing.fitting.GATE_EXAMPLES", 100)
    some = fit(words, truth, keys, list("abc")).gate.weight
    chosen = uniform(keys, 0, 103).argsort()[:100]
    assert torch.bincount(folds_of(keys[chosen], 0), minlength=FOLDS).min() > 5
    rest = torch.ones(300, dtype=torch.bool)
    rest[chosen] = False
    for outputs in words.values():  # what the others say does not matter
        outputs.logits[rest] = -outputs.logits[rest]
    assert torch.equal(fit(words, truth, keys, list("abc")).gate.weight, some)
    monkeypatch.setattr("ds_distill.routing.fitting.GATE_EXAMPLES", 300)
    whole = fit(words, truth, keys, list("abc")).gate.weight
    assert not torch.allclose(whole, some, atol=1e-2)


# ------------------------------------------------------- the thesis's own examples

FRUIT = {"T1": [9, 0, 0], "T2": [0, 8, 0], "T3": [0, 0, 7]}  # T1 knows Apple, T2 Orange, T3 Grass
APPLE, ORANGE, GRASS = range(3)


@pytest.mark.parametrize(
    ("most_accurate", "predictions", "best_teacher", "best_expert"),
    [
        ("T3", [APPLE, APPLE, ORANGE], "T1", "T1"),  # 4.7.1.1: T1 alone predicts its own class
        ("T3", [APPLE, ORANGE, ORANGE], "T3", "T1"),  # 4.7.1.2: T1 and T2 do; M is T3
        ("T2", [APPLE, ORANGE, ORANGE], "T2", "T2"),  # ... and M is one of them
        ("T3", [APPLE, ORANGE, GRASS], "T3", "T3"),  # all do
        ("T2", [ORANGE, APPLE, APPLE], "T2", "T2"),  # none does
    ],
)
def test_the_apples_and_oranges_of_section_4_7_1(
    most_accurate, predictions, best_teacher, best_expert
):
    # Teachers are equally good at a fourth class but for M, who is the most accurate of all.
    correct = {name: [*counts, 0] for name, counts in FRUIT.items()}
    correct["T1"][3], correct["T2"][3], correct["T3"][3] = 2, 1, 0
    correct[most_accurate][3] = 10
    table = make_table(correct, [10, 10, 10, 10], FRUIT)
    logits = {
        name: torch.nn.functional.one_hot(torch.tensor([predicted]), 4).float()
        for name, predicted in zip(FRUIT, predictions, strict=True)
    }
    for conflict, wanted in (("best-teacher", best_teacher), ("best-expert", best_expert)):
        routed = route({"policy": "expertise", "conflict": conflict}, logits, table=table)
        assert dict(zip(FRUIT, routed.weights[:, 0].tolist(), strict=True))[wanted] == 1.0


# ------------------------------------------------------------------------ expertise table


def test_the_table_counts_right_answers_per_class():
    truth = np.array([0, 0, 1, 1, 1, -1, 2])
    right = np.eye(4)[[0, 1, 1, 1, 0, 3, 0]]
    table = ExpertiseTable.measure({"a": right, "b": np.eye(4)[[0] * 7]}, truth, list("wxyz"))
    assert table.correct.tolist() == [[1, 2, 0, 0], [2, 0, 0, 0]]
    assert table.total.tolist() == [2, 3, 1, 0]
    np.testing.assert_allclose(table.per_class, [[1 / 2, 2 / 3, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_allclose(table.overall, [3 / 6, 2 / 6])
    # y: nobody is right; z: no example. Both go to the better teacher overall.
    assert table.experts.tolist() == [1, 0, 0, 0]
    again = ExpertiseTable.from_json(table.to_json())
    assert again.experts.tolist() == table.experts.tolist()
    assert (again.teachers, again.labels) == (table.teachers, table.labels)


# ------------------------------------------------------------------------ random choices


def random_choice(keys, epoch=0, seed=0, teachers=3):
    logits = {name: torch.zeros(len(keys), 2) for name in NAMES[:teachers]}
    return route("random", logits, keys=keys, epoch=epoch, seed=seed).weights


def test_a_random_choice_belongs_to_the_example_the_epoch_and_the_seed():
    keys = make_keys(9000)
    whole = random_choice(keys)
    order = torch.randperm(9000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(random_choice(keys[order]), whole[:, order])
    assert torch.equal(random_choice(keys[:1]), whole[:, :1])
    streams = [random_choice(keys, *of).argmax(dim=0) for of in ((0, 0), (1, 0), (0, 1))]
    for first in streams:
        # chi-square with 2 degrees of freedom: 99.9% lie below 13.8
        counts = torch.bincount(first, minlength=3).double()
        assert ((counts - 3000) ** 2 / 3000).sum() < 13.8
    for one, other in itertools.combinations(streams, 2):
        assert abs((one == other).double().mean() - 1 / 3) < 0.02  # 4 standard errors


# ------------------------------------------------------------------- weights and extremes


EXTREMES = {
    "minus infinity where another teacher is finite": ([[-math.inf, 1.0, 2.0]], [[1.0, 2.0, 3.0]]),
    "minus infinity in all": ([[-math.inf, 1.0, 2.0]], [[-math.inf, 2.0, 3.0]]),
    "huge": ([[1e30, -1e30, 0.0]], [[-1e30, 1e30, 0.0]]),
    "a probability below float32": ([[300.0, 0.0, 0.0]], [[0.0, 300.0, 0.0]]),
}


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES)
def test_extreme_logits_still_give_a_distribution(extreme):
    logits = dict(zip(("ann", "bob"), map(torch.tensor, extreme), strict=True))
    table = make_table({"ann": [5, 0, 0], "bob": [0, 5, 5]}, [6, 6, 6], ["ann", "bob"])
    mixes = [r.model_copy(update={"mix": m}) for r in ROUTINGS for m in ("logits", "probabilities")]
    for routing, label in itertools.product([*mixes, *TARGETS], (0, 1, -100)):
        routed = route(routing, logits, [label], table)
        assert torch.isfinite(routed.weights).all(), routing
        target = torch.softmax(routed.logits, dim=-1)
        assert torch.isfinite(target).all(), routing
        assert target.sum().item() == pytest.approx(1.0), routing
        mixed = getattr(routing, "mix", None) == "probabilities"
        if mixed and torch.isfinite(torch.stack([*logits.values()])).all():
            assert torch.isfinite(routed.logits).all(), routing  # so that an MSE on them is, too


def test_half_precision_logits_are_mixed_in_single_precision():
    logits = {"a": torch.tensor([[1.0, 1e-3]]).half(), "b": torch.tensor([[1.0, 2e-3]]).half()}
    routed = route("average", logits)
    assert routed.logits.dtype == torch.float32
    wanted = (logits["a"].float() + logits["b"].float()) / 2
    torch.testing.assert_close(routed.logits, wanted, rtol=0, atol=0)


def test_the_target_of_some_rows():
    logits, weights = torch.randn(4, 3), torch.rand(2, 4)
    for rows in ([0, 1, 2, 3], [3, 1], []):
        part = Target(logits, weights).at(torch.tensor(rows, dtype=torch.int64))
        assert part.logits.tolist() == [logits[row].tolist() for row in rows]
        assert part.weights.tolist() == [[of[row].item() for row in rows] for of in weights]
        assert Target(None, weights).at(torch.tensor(rows, dtype=torch.int64)).logits is None


def of_many_labels(count, many, width=0, lacking=False):
    """Signals, a batch and what is fitted of each label."""
    draw = torch.Generator().manual_seed(many)
    says = torch.rand(len(NAMES), count, generator=draw) < 0.7
    signals = {
        name: Signals(
            torch.randn(count, many, generator=draw) * 3,
            {STATES: torch.randn(count, width, generator=draw)} if width else {},
            reported=says[at] if lacking else None,
        )
        for at, name in enumerate(NAMES)
    }
    labels = torch.randint(0, 2, (count, many), generator=draw)
    labels[0] = -100
    of = []
    for number in range(many):
        correct = {name: torch.randint(0, 9, (2,), generator=draw).tolist() for name in NAMES}
        one = make_fitted(make_table(correct, [9, 9], NAMES), width)
        temperatures = {name: 0.3 + (number * 7 + at) % 11 for at, name in enumerate(NAMES)}
        gate = replace(one.gate, weight=one.gate.weight * torch.rand(1, generator=draw))
        of.append(replace(one, temperatures=temperatures, gate=gate))
    return signals, make_batch(labels), FittedByLabel(tuple(map(str, range(many))), tuple(of))


CHOOSING = ("average", "best", "random", "column", "expertise")

MANY = [*POLICY_SETTINGS, *(Average(mix=mix) for mix in ("probabilities", "losses"))]


@pytest.mark.parametrize("lacking", [False, True], ids=["", "a file lacks rows"])
@pytest.mark.parametrize("routing", MANY, ids=str)
def test_many_labels_at_once_are_those_of_each_label_alone(routing, lacking):
    """To the bit where logits are chosen or added. An exponential or a logarithm is rounded by
    where it stands in a vector of the processor, and a matrix's sums by their order."""
    signals, batch, fitted = of_many_labels(9, 6, 5, lacking)
    found = Router(routing, temperature=2.0, seed=3, fitted=fitted)(signals, batch)
    wanted = joined(
        [
            Router(routing, temperature=2.0, seed=3, fitted=fitted.of[number])(
                of_label(signals, number), replace(batch, labels=labels)
            )
            for number, labels in enumerate(batch.labels.unbind(1))
        ]
    )
    exact = routing.policy in CHOOSING and routing.mix != "probabilities"
    bits = dict.fromkeys(("rtol", "atol"), 0.0 if exact else 2e-6)
    torch.testing.assert_close(found.weights, wanted.weights, **bits)
    assert (found.logits is None) == (wanted.logits is None)
    if found.logits is not None:
        torch.testing.assert_close(found.logits, wanted.logits, **bits)


def test_a_policy_that_was_fitted_on_other_classes_is_refused():
    table = make_table({"ann": [8, 8, 1], "bob": [1, 1, 8]}, [9, 9, 9], NAMES[:2])
    router = Router("gate", fitted=make_fitted(table))
    teachers = {
        "ann": Signals(torch.randn(2, 3)),
        "bob": Signals(torch.randn(2, 2), classes=torch.tensor([0, 2])),
    }
    with pytest.raises(ValueError, match="fit the policy on the same teachers"):
        router(teachers, make_batch([0, 1]))


# ------------------------------------------------------------- rows that a teacher says nothing of


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
@settings(max_examples=8)
def test_a_row_follows_those_that_say_something_of_it(seed, count):
    """Against asking each policy about each row alone, with the teachers of that row."""
    draw = torch.Generator().manual_seed(seed)
    names, classes, keys = NAMES[:3], 3, make_keys(count)
    logits = {name: torch.randn(count, classes, generator=draw) for name in names}
    says = torch.rand(3, count, generator=draw) < 0.6
    labels = torch.randint(-1, classes, (count,), generator=draw)
    correct = {name: torch.randint(0, 9, (classes,), generator=draw).tolist() for name in names}
    total = [10] * classes
    fitted = make_fitted(make_table(correct, total, names))
    signals = {
        name: Signals(of.masked_fill(~says[at, :, None], torch.nan), reported=says[at])
        for at, (name, of) in enumerate(logits.items())
    }
    batch = make_batch(labels.where(labels >= 0, -100), keys)
    for name in POLICIES.keys() - {"chosen"}:
        target = Router(name, fitted=fitted, seed=3)(signals, batch)
        assert not target.weights[~says].any(), name
        for row in range(count):
            present = [other for at, other in enumerate(names) if says[at, row]]
            if not present:
                continue
            of_present = {other: correct[other] for other in present}
            own = target.weights[:, row][says[:, row]]
            if name == "expertise":  # the experts are those of all teachers
                scores = {other: logits[other][row].tolist() for other in present}
                experts = experts_of(scores, correct, total)
                wanted = experts[0] if len(experts) == 1 else best_of(present, of_present, total)
                assert own[present.index(wanted)] == 1
                continue
            # The gate reads all teachers.
            settled = "calibrated" if name == "gate" and len(present) < 3 else name
            entry, here = POLICIES[settled], slice(row, row + 1)
            seen = Asked(
                NOTHING,
                make_batch(batch.labels[here], keys[here]),
                {other: Signals(logits[other][here]) for other in present},
                settings=entry(),
                fitted=replace(fitted, table=make_table(of_present, total, present)),
                seed=3,
            )
            alone = entry.load()(seen)
            torch.testing.assert_close(own, alone.weights[:, 0], msg=name)
            assert (target.logits is None) == (alone.logits is None)
            if alone.logits is not None:
                torch.testing.assert_close(target.logits[row], alone.logits[0], msg=name)


@pytest.mark.parametrize("routing", POLICY_SETTINGS, ids=str)
def test_a_policy_waits_for_nothing(routing):
    """After its first batch: what it looks up is on the device by then."""
    draw = torch.Generator().manual_seed(0)
    logits = {name: torch.randn(20, 3, generator=draw) for name in NAMES}
    table = make_table({name: [1, 2, 3] for name in NAMES}, [4, 4, 4], NAMES)
    batch = make_batch([0, 1, 2, -100] * 5)
    router = Router(routing, fitted=make_fitted(table))
    signals = {name: Signals(scores) for name, scores in logits.items()}
    first = router(signals, batch)
    with Waits() as waits:
        second = router(signals, batch)
    assert waits.found == []
    assert torch.equal(first.weights, second.weights)
