"""Metrics against scikit-learn and slow transcriptions; intervals of differences between two
models."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn import metrics as sklearn

from ds_distill.errors import UserError
from ds_distill.evaluation import bootstrap
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import (
    ClassPredictions,
    LabelPredictions,
    NumberPredictions,
    TokenScores,
    Unigram,
    confusion_matrix,
)
from ds_distill.evaluation.scores import (
    build_metric,
    build_metrics,
    comparisons,
    metric_values,
    model_report,
    to_teacher,
)
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics import classes as named
from ds_distill.recipe.metrics.classes import AUC, ECE, F1, Accuracy, MacroAUC, MacroF1, MicroF1
from ds_distill.recipe.metrics.metric import CountMetric
from ds_distill.recipe.metrics.tokens import Loss, Perplexity

NAMES = ["a", "b", "c", "d"]


def value(settings, logits, labels, names=NAMES, over="classes"):
    kind = ClassPredictions if over == "classes" else LabelPredictions
    return build_metric(over, settings, names).value(kind(np.asarray(logits), np.asarray(labels)))


def one_hot(predicted, classes=4):
    return np.eye(classes)[predicted]


pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)
ALIKE = [(1, 1)] * 3  # one class alone
WRONG = [(0, 1)]  # one example, and wrong

# ------------------------------------------------------------------------- against scikit-learn


@pytest.mark.filterwarnings("error")
@settings(max_examples=15)
@given(pairs, st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=3))
@example(ALIKE, "a", ["b"])
@example(ALIKE, "b", ["a", "c", "d"])
@example(WRONG, "b", [])
def test_counts_are_scikit_learns(examples, positive, left_out):
    predicted, labels = np.array(examples).T
    names = sorted({*predicted, *labels})
    kept = [number for number, name in enumerate(NAMES) if name not in left_out]
    one = {"labels": [NAMES.index(positive)], "average": "macro"}
    some = {"labels": kept, "average": "micro"}
    every = {"labels": names, "average": "macro"}
    wanted = [
        (named.F1.Settings(positive=positive), sklearn.f1_score, one),
        (named.Precision.Settings(positive=positive), sklearn.precision_score, one),
        (named.Recall.Settings(positive=positive), sklearn.recall_score, one),
        (named.MicroF1.Settings(leave_out=left_out), sklearn.f1_score, some),
        (named.MicroPrecision.Settings(leave_out=left_out), sklearn.precision_score, some),
        (named.MicroRecall.Settings(leave_out=left_out), sklearn.recall_score, some),
        (named.MacroF1.Settings(), sklearn.f1_score, every),
        (named.MacroPrecision.Settings(), sklearn.precision_score, every),
        (named.MacroRecall.Settings(), sklearn.recall_score, every),
    ]
    for metric, function, options in wanted:
        expected = function(labels, predicted, zero_division=0, **options)
        assert value(metric, one_hot(predicted), labels) == pytest.approx(expected), metric
    expected = sklearn.accuracy_score(labels, predicted)
    assert value(named.Accuracy.Settings(), one_hot(predicted), labels) == pytest.approx(expected)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=40).filter(
        lambda x: len({label for _, label in x}) == 2
    )
)
def test_the_auc_is_scikit_learns(examples):
    """Whole scores, so that many are equal."""
    scores, labels = np.array(examples).T
    logits = np.stack([np.zeros(len(scores)), scores], axis=1)
    wanted = pytest.approx(sklearn.roc_auc_score(labels, scores))
    for more in ({}, {"positive": "b"}, {"positive": "a"}):  # seen from the other class the same
        assert value(named.AUC.Settings(**more), logits, labels, ["a", "b"]) == wanted


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 1), st.integers(0, 3)), max_size=20))
def test_a_weight_counts_an_example_as_often(examples):
    """Of every metric over classes and numbers: weights 0, 1, 2, 3 are as many copies."""
    logits = np.array([[0.0, score] for score, _, _ in examples]).reshape(-1, 2)
    labels = np.array([label for _, label, _ in examples], dtype=np.int64)
    weights = np.array([weight for *_, weight in examples], dtype=np.int64)

    def of(over, *times):
        some, truth = (np.repeat(each, *times, axis=0) for each in (logits, labels))
        if over == "classes":
            return ClassPredictions(some, truth)
        return NumberPredictions(some[:, 1], truth.astype(float))

    for over, names in (("classes", ["ab"]), ("numbers", [])):
        whole, copies = of(over, 1), of(over, weights)
        for entry in METRICS[over].values():
            metric = build_metric(over, entry.Settings(), *names)
            [found] = metric.weighted(whole, weights[None].astype(float))
            assert found == pytest.approx(metric.value(copies), nan_ok=True), entry.name
            if isinstance(metric, CountMetric):
                assert metric.counts(whole).shape[0] == len(whole)


@settings(max_examples=15)
@given(st.data(), st.lists(st.integers(0, 2), min_size=2, max_size=8))
def test_a_metric_says_of_which_labels_it_has_no_value(data, labels):
    """Of those that are undefined by labels alone, whatever is predicted."""
    draw, labels = np.random.default_rng(data.draw(st.integers(0, 99))), np.array(labels)
    counts, scores = np.bincount(labels, minlength=3), draw.normal(size=(len(labels), 3))
    for name in "abc":
        metric = build_metric("classes", named.AUC.Settings(positive=name), "abc")
        has = not np.isnan(metric.value(ClassPredictions(scores, labels)))
        assert (metric.no_value(counts, len(labels)) is None) == has
    many = np.stack([labels & 1, labels >> 1], axis=1)
    metric = build_metric("labels", METRICS["labels"]["macro_auc"].Settings(), "ab")
    has = not np.isnan(metric.value(LabelPredictions(scores[:, :2], many)))
    assert (metric.no_value(many.sum(axis=0), len(labels)) is None) == has
    for name in ("pearson", "spearman", "mse"):
        metric = build_metric("numbers", METRICS["numbers"][name].Settings())
        has = not np.isnan(metric.value(NumberPredictions(scores[:, 0], labels.astype(float))))
        different = np.unique(labels, return_counts=True)[1]
        assert (metric.no_value(different, len(labels)) is None) == has


# ---------------------------------------------------------------------------------- no examples


@pytest.mark.filterwarnings("error")
def test_without_examples_a_metric_has_no_value_or_is_0():
    nothing = ClassPredictions(np.zeros((0, 4)), np.zeros(0, dtype=np.int64))
    for name, entry in METRICS["classes"].items():
        found = build_metric("classes", entry.Settings(), NAMES).value(nothing)
        if name in ("f1", "precision", "recall", "micro_f1", "micro_precision", "micro_recall"):
            assert found == 0.0, name  # as scikit-learn has it
        else:
            assert np.isnan(found), name


def test_what_has_no_value_is_refused():
    metrics = build_metrics("classes", ["a", "b"], named.AUC.Settings())
    with pytest.raises(UserError, match="metric auc has no value on these 2 examples"):
        metric_values(ClassPredictions(np.eye(2), np.array([1, 1])), metrics)


# ------------------------------------------------------------------------------- calibration


def ece_by_hand(logits, labels, bins):
    """Guo et al. 2017, equation 3; bin m is ((m - 1) / M, m / M]."""
    probabilities = softmax(logits.astype(float), axis=1)
    total = 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        rows = [i for i, p in enumerate(probabilities.max(axis=1)) if low < p <= high]
        if rows:
            accuracy = np.mean([probabilities[i].argmax() == labels[i] for i in rows])
            confidence = np.mean([probabilities[i].max() for i in rows])
            total += len(rows) / len(labels) * abs(accuracy - confidence)
    return total


@settings(max_examples=15)
@given(st.integers(1, 60), st.integers(2, 5), st.sampled_from([1, 5, 15, 100]), st.integers(0, 99))
def test_the_calibration_error_is_the_papers(size, classes, bins, seed):
    generator = np.random.default_rng(seed)
    logits = 3 * generator.normal(size=(size, classes)).astype(np.float32)
    labels = generator.integers(0, classes, size)
    found = value(named.ECE.Settings(bins=bins), logits, labels, "abcde"[:classes])
    assert found == pytest.approx(ece_by_hand(logits, labels, bins))


# ----------------------------------------------------------------------------------- labels


@pytest.mark.filterwarnings("error")
@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=30))
@example([[3, 1, 0, 0]])  # of a label that is neither there nor predicted, too
@example([[0, 0, 0, 0]])
def test_what_is_over_labels_is_scikit_learns(rows):
    """2 * predicted + there, of each example and label."""
    codes = np.array(rows)
    predicted, there = codes // 2, codes % 2
    for average, metric, function in (
        ("micro", named.MicroF1, sklearn.f1_score),
        ("micro", named.MicroPrecision, sklearn.precision_score),
        ("micro", named.MicroRecall, sklearn.recall_score),
        ("macro", named.LabelsMacroF1, sklearn.f1_score),
        ("macro", named.LabelsMacroPrecision, sklearn.precision_score),
        ("macro", named.LabelsMacroRecall, sklearn.recall_score),
    ):
        wanted = function(there, predicted, average=average, zero_division=0)
        found = value(metric.Settings(), predicted - 0.5, there, over="labels")
        assert found == pytest.approx(wanted), metric


def test_what_is_not_known_of_a_label_is_left_out():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(80, 3)), generator.integers(-1, 2, (80, 3))
    known = labels >= 0
    wanted = sklearn.f1_score(labels[known] == 1, logits[known] > 0)
    assert value(named.MicroF1.Settings(), logits, labels, "abc", "labels") == pytest.approx(wanted)
    each = [
        sklearn.roc_auc_score(labels[known[:, at], at], logits[known[:, at], at]) for at in range(3)
    ]
    settings_ = METRICS["labels"]["macro_auc"].Settings()
    assert value(settings_, logits, labels, "abc", "labels") == pytest.approx(np.mean(each))
    labels[:, 1] = 1  # has no AUC
    wanted = np.mean([each[0], each[2]])
    assert value(settings_, logits, labels, "abc", "labels") == pytest.approx(wanted)


# ----------------------------------------------------------------------------------- reports


def report_of(logits, labels, names):
    predictions = ClassPredictions.labelled(np.asarray(logits), np.asarray(labels))
    return model_report(predictions, build_metrics("classes", names), names)


@pytest.mark.filterwarnings("error")
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), min_size=1, max_size=40).filter(
        lambda x: any(label >= 0 for _, label in x)
    )
)
def test_a_report_is_what_counting_gives(examples):
    said, truth = np.array(examples).T
    logits = one_hot(said) + np.random.default_rng(0).random((len(truth), 4)) / 2
    report = report_of(logits, truth, NAMES)
    said, truth = said[truth >= 0], truth[truth >= 0]
    confusion, seen = sklearn.confusion_matrix(truth, said, labels=range(4)), {*said, *truth}
    there = np.maximum(confusion.sum(axis=1), 1)
    per_class = dict(zip(NAMES, confusion.diagonal() / there, strict=True))
    assert report["examples"] == len(truth) and report["confusion"] == confusion.tolist()
    for number, name in enumerate(NAMES):
        assert report["per_class"][name] == (per_class[name] if number in truth else None)
    f1 = sklearn.f1_score(truth, said, labels=[*seen], average="macro", zero_division=0)
    assert report["macro_f1"] == pytest.approx(f1)
    assert report["accuracy"] == pytest.approx((said == truth).mean())
    bins = report["reliability"]
    assert sum(row["count"] for row in bins) == len(truth)
    right = sum(row["count"] * row["accuracy"] for row in bins)
    assert right == pytest.approx((said == truth).sum())
    assert [row["confidence"] for row in bins] == sorted(row["confidence"] for row in bins)


def test_the_confusion_of_thousands_of_classes_is_the_counts_that_are_there():
    """As rows of counts it was 16 MB of JSON a model with 2,000 classes."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2_000, 500)
    logits = generator.random((500, 2_000))
    logits[np.arange(400), labels[:400]] += 1.0
    names = [f"class {number}" for number in range(2_000)]
    found = report_of(logits, labels, names)["confusion"]
    assert len(json.dumps(found)) < 20_000
    dense = np.zeros((2_000, 2_000), dtype=np.int64)
    dense[found["true"], found["predicted"]] = found["count"]
    assert np.array_equal(dense, confusion_matrix(labels, logits.argmax(axis=1), 2_000))


def test_the_tasks_metric_comes_first_and_as_it_is_set():
    assert list(build_metrics("classes", NAMES)) == ["accuracy", "macro_f1", "ece"]
    found = build_metrics("classes", NAMES, named.MicroF1.Settings(leave_out=["a"]))
    assert list(found) == ["micro_f1", "accuracy", "macro_f1", "ece"]
    assert found["micro_f1"].settings.leave_out == ["a"]
    found = build_metrics("classes", NAMES, named.ECE.Settings(bins=3))
    assert list(found) == ["ece", "accuracy", "macro_f1"] and found["ece"].settings.bins == 3


def test_a_student_against_its_teachers():
    labels = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    predicted = {
        "teacher": np.array([0, 0, 0, 1, 1, 1, 0, 2]),
        "student": np.array([0, 0, 1, 1, 1, 1, 2, 2]),
        "control": np.array([1, 1, 1, 1, 1, 1, 2, 2]),
    }
    roles = {name: name for name in predicted}
    models = {name: ClassPredictions(one_hot(of), labels) for name, of in predicted.items()}
    metrics = build_metrics("classes", NAMES)
    reports = {name: model_report(of, metrics, NAMES) for name, of in models.items()}
    [to_teacher_, to_control] = comparisons(models, roles, reports, metrics["accuracy"])
    assert to_teacher_["student"] == to_control["student"] == "student"
    assert to_teacher_["retention"] == pytest.approx((6 / 8) / (6 / 8))
    # -1/4 of a, 0 of b, +1/2 of c; d has no example
    assert to_teacher_["median_class_difference"] == 0.0
    assert "retention" not in to_control
    assert to_control["difference"] == pytest.approx(2 / 8)
    low, high = to_control["interval"]
    assert low <= 2 / 8 <= high


def test_a_teacher_that_knows_nothing_has_nothing_to_retain():
    entry, loss = METRICS["classes"]["f1"], METRICS["masked tokens"]["loss"]
    own, other = {"f1": 0.5, "per_class": {"a": 0.75}}, {"f1": 0.0, "per_class": {"a": 0.5}}
    found = to_teacher(own, other, entry)
    assert found == {"retention": None, "median_class_difference": 0.25}
    found = to_teacher({"f1": 0.4}, {"f1": 0.5}, entry)
    assert found == {"retention": pytest.approx(0.8), "median_class_difference": None}
    assert to_teacher({"loss": 1.0}, {"loss": 2.0}, loss)["retention"] is None


# ----------------------------------------------------------------------------- baselines


def test_a_unigram_is_what_counting_says():
    """Six tokens, of which 0 and 1 are special; 5 never stands in the training text."""
    text = [0, 2, 2, 3, 1, 0, 2, 4, 1]
    unigram = Unigram.of(np.bincount(text, minlength=6), (0, 1))
    probability = {2: 4 / 9, 3: 2 / 9, 4: 2 / 9, 5: 1 / 9}  # one more of each
    hidden, example = np.array([2, 5, 3, 2, 2]), np.array([0, 0, 2, 2, 2])
    scores = unigram.score(hidden, example, 4)
    wanted = [[2, 5], [], [3, 2, 2], []]
    np.testing.assert_allclose(
        scores.loss, [sum(-np.log(probability[token]) for token in tokens) for tokens in wanted]
    )
    np.testing.assert_array_equal(scores.right, [tokens.count(2) for tokens in wanted])
    np.testing.assert_array_equal(scores.tokens, [len(tokens) for tokens in wanted])
    assert np.exp(unigram.log_probs).sum() == pytest.approx(1)


def test_a_report_of_masked_tokens_is_over_tokens_not_texts():
    """Three texts with 4, 1 and 0 hidden tokens."""
    scores = TokenScores(
        loss=np.array([6.0, 4.0, 0.0]), right=np.array([3.0, 0.0, 0.0]), tokens=np.array([4, 1, 0])
    )
    assert model_report(scores, build_metrics("masked tokens")) == {
        "examples": 3,
        "tokens": 5,
        "accuracy": 3 / 5,
        "loss": 2.0,
        "perplexity": pytest.approx(np.exp(2.0), rel=1e-12),
    }


def test_a_model_that_knows_more_tokens_is_reported_on_all_and_on_hidden_words():
    scores = TokenScores(
        *(np.array(values, dtype=float) for values in ([6, 2], [3, 1], [4, 2])),
        own=np.array([[16, 4], [5, 1], [8, 2]], dtype=float),
        word_loss=np.array([9.0, 3.0]),
        words=np.array([3.0, 0.0]),
    )
    report = model_report(scores, build_metrics("masked tokens"))
    assert (report["tokens"], report["accuracy"], report["loss"]) == (6, 4 / 6, 8 / 6)
    assert (report["hidden_words"], report["word_loss"]) == (3, 4.0)
    own = report["own_tokens"]
    assert own == {
        "tokens": 10,
        "accuracy": 0.6,
        "loss": 2.0,
        "perplexity": pytest.approx(np.exp(2.0)),
    }


def test_the_gap_closed_is_of_a_teacher_that_is_better_than_the_start():
    truth = np.array([0, 1] * 200)
    draw = np.random.default_rng(0)

    def right(share):
        predicted = np.where(draw.random(400) < share, truth, 1 - truth)
        return ClassPredictions(np.eye(2)[predicted], truth)

    models = {"good": right(0.9), "poor": right(0.5), "one": right(0.7), "start": right(0.5)}
    roles = {"good": "teacher", "poor": "teacher", "one": "student", "start": "start"}
    judge = build_metric("classes", named.Accuracy.Settings())
    reports = {name: {"accuracy": judge.value(of)} for name, of in models.items()}
    rows = comparisons(models, roles, reports, judge)
    gaps = {row["other"]: row.get("gap_closed") for row in rows}
    at = {name: report["accuracy"] for name, report in reports.items()}
    assert gaps["good"] == pytest.approx((at["one"] - at["start"]) / (at["good"] - at["start"]))
    assert gaps["poor"] is None and "gap_closed" not in rows[-1]
    without = comparisons(
        {n: of for n, of in models.items() if n != "start"},
        {n: role for n, role in roles.items() if n != "start"},
        reports,
        judge,
    )
    assert not any("gap_closed" in row for row in without)


TOKENS = build_metric("masked tokens", Accuracy.Settings())


def interval(one, other, tokens=None, **options):
    """Of the accuracy, of how many right predictions each example has."""
    tokens = np.ones(len(one)) if tokens is None else tokens
    first, second = (
        TokenScores(np.zeros(len(one)), np.asarray(right, float), np.asarray(tokens, float))
        for right in (one, other)
    )
    return paired_interval(first, second, TOKENS, **options)


def answers(both, first, second, neither):
    """Two models' answers: examples both get right, one alone, none."""
    pairs = [(True, True)] * both + [(True, False)] * first + [(False, True)] * second
    one, other = np.array(pairs + [(False, False)] * neither).T
    return one, other


def test_the_interval_is_the_same_each_time_and_whatever_the_order():
    one, other = answers(50, 20, 10, 30)
    order = np.random.default_rng(0).permutation(len(one))
    wanted = interval(one, other)
    assert interval(one, other) == wanted
    assert interval(one[order], other[order]) == wanted
    assert interval(one, other, seed=1) != wanted


def test_the_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for number in range(300):
        resamples = generator.multinomial(400, [0.5, 0.2, 0.12, 0.18])
        low, high = interval(*answers(*resamples), seed=number, resamples=1000)
        hits += low <= 0.2 - 0.12 <= high
    # 95% of 300 is 285; 99.9% of binomial draws lie between 272 and 296.
    assert 272 <= hits <= 296


@settings(max_examples=15)
@given(*[st.integers(0, 40)] * 4, st.sampled_from(["accuracy", "macro_f1", "auc", "ece"]))
def test_two_models_the_other_way_round_have_the_same_interval(both, first, second, neither, name):
    """To the last bit, ties and metrics that are not always defined included."""
    if both + first + second + neither == 0:
        return
    one, other = answers(both, first, second, neither)
    labels = np.arange(len(one)) % 2
    models = [
        ClassPredictions(
            np.stack([(labels == 0) == right, (labels == 1) == right], axis=1).astype(float), labels
        )
        for right in (one, other)
    ]
    metric = build_metric(
        "classes", {**CLASSES, "auc": AUC.Settings(), "ece": ECE.Settings()}[name], "ab"
    )
    given = {"groups": np.arange(len(one)) // 2, "resamples": 100}
    low, high = paired_interval(*models, metric, **given)
    mirrored = paired_interval(*reversed(models), metric, **given)
    np.testing.assert_array_equal(mirrored, (-high, -low))


def test_accuracys_interval_is_that_of_earlier_versions():
    """Published figures do not move with the code: drawn from the same kinds in the same order."""
    one, other = answers(50, 20, 10, 30)
    assert interval(one, other) == (-0.00909090909090909, 0.19090909090909092)


# ------------------------------------------------------------------------------ any metric

CLASSES = {
    "accuracy": Accuracy.Settings(),
    "f1": F1.Settings(positive="b"),
    "micro_f1": MicroF1.Settings(leave_out=["a"]),
    "macro_f1": MacroF1.Settings(),
    "auc": AUC.Settings(positive="c"),
    "ece": ECE.Settings(),
}


def two_models(size, seed=0, copies=1):
    """Of examples of three classes, the first model's predictions are better."""
    generator = np.random.default_rng(seed)
    labels = generator.choice(3, size, p=[0.5, 0.3, 0.2])
    models = []
    for strength in (1.5, 1.0):
        logits = generator.normal(size=(size, 3))
        logits[np.arange(size), labels] += strength
        models.append(
            ClassPredictions(np.repeat(logits, copies, axis=0), np.repeat(labels, copies))
        )
    return models


def at(predictions, rows):
    return type(predictions)(**{name: a[rows] for name, a in predictions.arrays().items()})


def by_hand(first, second, metric, groups, resamples=400):
    """Whole examples, drawn one by one."""
    generator = np.random.default_rng(1)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    found = []
    for _ in range(resamples):
        drawn = generator.integers(len(members), size=len(members))
        rows = np.concatenate([members[group] for group in drawn])
        found.append(metric.value(at(first, rows)) - metric.value(at(second, rows)))
    return np.nanquantile(found, [0.025, 0.975])


def of_tokens(size):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 9, size).astype(float)
    return [
        TokenScores(generator.gamma(2.0, 1.0, size) * tokens, np.floor(share * tokens), tokens)
        for share in (0.6, 0.5)
    ]


def of_labels(size):
    generator = np.random.default_rng(0)
    labels = generator.integers(-1, 2, (size, 4))
    return [
        LabelPredictions(generator.normal(size=(size, 4)) + strength * labels, labels)
        for strength in (1.0, 0.5)
    ]


def of_numbers(size):
    generator = np.random.default_rng(0)
    truth = generator.normal(size=size)
    noises = (generator.normal(0, scale, size) for scale in (0.5, 1.0))
    return [NumberPredictions(truth + noise, truth) for noise in noises]


DRAWN = [
    *(("classes", one, "abc", two_models) for one in CLASSES.values()),
    *(("masked tokens", one.Settings(), None, of_tokens) for one in (Accuracy, Loss, Perplexity)),
    *(("labels", one.Settings(), "abcd", of_labels) for one in (MicroF1, MacroF1, MacroAUC)),
    *(("numbers", one.Settings(), None, of_numbers) for one in METRICS["numbers"].values()),
]


@pytest.mark.parametrize(("over", "settings", "names", "models"), DRAWN)
def test_the_interval_of_any_metric_is_that_of_drawn_examples(over, settings, names, models):
    """One by one, and by whole groups."""
    metric = build_metric(over, settings, *([names] if names else []))
    first, second = models(200)
    groups = np.random.default_rng(0).permutation(200) // 5 * 11
    for own, numbers in ((None, np.arange(200)), (groups, groups)):
        found = paired_interval(first, second, metric, groups=own)
        wanted = by_hand(first, second, metric, numbers)
        np.testing.assert_allclose(found, wanted, atol=0.2 * (wanted[1] - wanted[0]))
        assert found[0] < metric.value(first) - metric.value(second) < found[1]
    low, high = paired_interval(first, first, metric)
    assert (low, high) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_draws_without_a_value_are_left_out():
    """One example of three is of the class: in 30% of the draws there is none."""
    first = ClassPredictions(np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]]), np.array([1, 0, 0]))
    second = ClassPredictions(-first.logits, first.labels)
    metric = build_metric("classes", AUC.Settings(), "ab")
    low, high = paired_interval(first, second, metric)
    assert (low, high) == (-1.0, 1.0)
    alone = at(first, [0])
    assert np.isnan(paired_interval(alone, alone, metric)).all()


def test_draws_in_parts_are_those_of_one_whole(monkeypatch):
    metrics = [build_metric("classes", CLASSES[name], "abc") for name in ("macro_f1", "auc")]
    models = two_models(100)
    whole = [paired_interval(*models, metric) for metric in metrics]
    monkeypatch.setattr(bootstrap, "_AT_ONCE", 999)
    assert [paired_interval(*models, metric) for metric in metrics] == whole
