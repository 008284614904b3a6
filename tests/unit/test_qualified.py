"""Which teachers leave the set after an expertise phase, and why."""

import itertools

import numpy as np
import pytest
import torch

from ds_distill.keys import content_keys
from ds_distill.routing import fit
from ds_distill.routing.comparison import compare
from ds_distill.routing.multi_label import fit_by_label
from ds_distill.routing.selection import unqualified
from ds_distill.types import Signals

LABELS = ["joy", "fear", "anger"]
TRUTH = np.repeat([0, 1, 2], 40)


def knows(*shares, seed=0):
    """Logits that are right on a share of each class's examples, and a class too far on the
    others."""
    predicted = TRUTH.copy()
    for label, share in enumerate(shares):
        wrong = np.flatnonzero(label == TRUTH)[round(40 * share) :]
        predicted[wrong] = (TRUTH[wrong] + 1) % 3
    noise = np.random.default_rng(seed).normal(scale=0.1, size=(len(TRUTH), 3))
    return np.eye(3)[predicted] * 4 + noise


def always(label):
    return np.tile(np.eye(3)[label], (len(TRUTH), 1))


def test_a_teacher_that_is_best_at_no_class_leaves():
    teachers = {"ann": knows(0.9, 0.5, 0.5), "bob": knows(0.5, 0.9, 0.9), "eve": knows(0.8, 0.8, 0)}
    assert unqualified(teachers, TRUTH, LABELS) == {
        "eve": "is best at no class: nearest on joy, with accuracy 80.0% against 90.0% of ann"
    }


@pytest.mark.parametrize("order", list(itertools.permutations(["ann", "bob", "eve"])))
def test_neither_the_order_of_teachers_nor_unlabelled_examples_matter(order):
    teachers = {"ann": knows(0.9, 0.5, 0.5), "bob": knows(0.5, 0.9, 0.9), "eve": knows(0.8, 0.8, 0)}
    truth = np.append(TRUTH, [-1] * 200)
    scores = {name: np.concatenate([teachers[name], np.eye(3)[[0] * 200]]) for name in order}
    assert list(unqualified(scores, truth, LABELS)) == ["eve"]


def test_equals_are_not_both_experts():
    teachers = {"ann": knows(0.9, 0.9, 0.9), "bob": knows(0.9, 0.9, 0.9, seed=1)}
    assert list(unqualified(teachers, TRUTH, LABELS)) == ["bob"]


def test_all_stay_where_each_is_best_at_something():
    teachers = {"ann": knows(1, 0, 0), "bob": knows(0, 1, 0), "eve": knows(0, 0, 1)}
    assert unqualified(teachers, TRUTH, LABELS) == {}


def test_one_that_always_predicts_the_same_class_is_not_its_expert():
    """Its accuracy on that class is 100%; without it, bob is the expert, and stays."""
    teachers = {"ann": knows(0.9, 0.9, 0.5), "bob": knows(0.5, 0.5, 0.9), "one": always(2)}
    found = unqualified(teachers, TRUTH, LABELS)
    assert found == {"one": "predicts no class better than chance"}


def test_a_teacher_that_alone_knows_a_class_stays():
    """Without it no teacher would teach that class; of two that know it, one is enough."""
    none = np.full((len(TRUTH), 1), -np.inf)
    of_two = np.concatenate([none, always(2)[:, 1:]], axis=1)
    good = np.concatenate([knows(0.9, 0.9, 0.9)[:, :2], none], axis=1)
    classes = {"ann": torch.tensor([0, 1]), "two": torch.tensor([1, 2])}
    teachers = {"ann": good, "two": of_two}
    assert list(unqualified(teachers, TRUTH, LABELS)) == ["two"]
    assert unqualified(teachers, TRUTH, LABELS, classes) == {}
    both = {**classes, "too": classes["two"]}
    found = unqualified({**teachers, "too": of_two}, TRUTH, LABELS, both)
    assert list(found) == ["too"]


def test_nobody_leaves_for_chance_where_all_would():
    teachers = {"ann": always(0), "bob": always(1)}
    assert unqualified(teachers, TRUTH, LABELS) == {}
    assert unqualified({"ann": always(0)}, TRUTH, LABELS) == {}


def test_of_many_labels_the_best_f1_counts():
    """Sets of labels. `all` predicts every label, which finds each of them and is F1's weak side;
    it knows nothing. `eve` is good on each label and best at none."""
    draw = np.random.default_rng(0)
    truth = (draw.random((200, 3)) < 0.3).astype(np.int64)

    def good(*shares):
        wrong = draw.random(truth.shape) >= np.array(shares)
        return np.where(truth ^ wrong, 2.0, -2.0)

    teachers = {
        "ann": good(0.97, 0.6, 0.6),
        "bob": good(0.6, 0.97, 0.97),
        "eve": good(0.85, 0.85, 0.85),
        "all": np.full(truth.shape, 2.0),
    }
    found = unqualified(teachers, truth, LABELS)
    assert list(found) == ["eve", "all"]
    assert found["all"] == "predicts no label better than chance"
    assert found["eve"].startswith("is best at no label: nearest on ") and "F1" in found["eve"]


@pytest.mark.parametrize("many", [False, True])
def test_experts_of_what_is_fitted_on_the_rest_are_the_teachers_that_stay(many):
    shares = {"ann": (0.9, 0.5, 0.5), "bob": (0.5, 0.9, 0.9), "eve": (0.45, 0.45, 0.4)}
    teachers = {name: knows(*of) - 2 for name, of in shares.items()}
    truth = np.eye(3, dtype=np.int64)[TRUTH] if many else TRUTH
    left = unqualified(teachers, truth, LABELS)
    signals = {
        name: Signals(torch.from_numpy(scores).float())
        for name, scores in teachers.items()
        if name not in left
    }
    keys = torch.from_numpy(content_keys([f"text {n}" for n in range(len(TRUTH))]))
    fitted = (fit_by_label if many else fit)(signals, truth, keys, LABELS)
    assert set(fitted.experts.values()) == set(signals) == {"ann", "bob"}


def test_policies_of_a_lone_teacher_can_be_fitted_and_compared():
    signals = {"ann": Signals(torch.from_numpy(knows(0.9, 0.8, 0.7)).float())}
    keys = torch.from_numpy(content_keys([f"text {n}" for n in range(len(TRUTH))]))
    assert fit(signals, TRUTH, keys, LABELS).teachers == ("ann",)
    assert list(compare(signals, TRUTH, keys, LABELS).teachers) == ["ann"]


def test_one_that_predicts_by_lot_is_no_better_than_chance():
    """With many classes one of them would look better in a test of its own."""
    draw = np.random.default_rng(0)
    passed = 0
    for _ in range(200):
        truth = draw.integers(0, 20, 400)
        teachers = {"lot": draw.normal(size=(400, 20)), "good": 9 * np.eye(20)[truth]}
        found = unqualified(teachers, truth, [str(n) for n in range(20)])
        passed += found["lot"] != "predicts no class better than chance"
    assert passed < 0.1 * 200
