"""Any number of labels per example, and numbers as labels: data, losses, metrics, routing, and
what is refused."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import NO_DROPOUT, built
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import write
from runs import loaded
from scipy import stats
from sklearn.metrics import mean_squared_error
from transformers import AutoModelForSequenceClassification, BertConfig

from ds_distill.check.phases import phase_mistakes
from ds_distill.data.batches import Units
from ds_distill.data.open_source import open_source
from ds_distill.data.schedule import keep_share_of_others
from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import NumberPredictions
from ds_distill.evaluation.scores import build_metrics, difference, metric_values
from ds_distill.losses import Seen, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import check_head
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.numbers import correlation
from ds_distill.recipe.tasks import TASKS, Data, MultiLabel, Regression
from ds_distill.recipe.terms import losses_of
from ds_distill.routing import Router, Target
from ds_distill.routing.comparison import compare
from ds_distill.routing.multi_label import fit_by_label, load_fitted
from ds_distill.tasks.labelled import MultiLabelKind, RegressionKind
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

SMALL = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, **NO_DROPOUT}
ROWS = [
    {"text": "a b", "label": ["x", "y"]},
    {"text": "c", "label": []},
    {"text": "d", "label": ["z"]},
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "numbers"])
def test_lists_of_labels_are_read(tmp_path, ending):
    """null is no label, and an empty list is none of them."""
    rows = ROWS
    if ending == "numbers":
        rows = [{**row, "label": ["xyz".index(name) for name in row["label"]]} for row in ROWS]
    write(tmp_path / ("train.parquet" if ending == "parquet" else "train.jsonl"), rows)
    write(tmp_path / "test.jsonl", [{**row, "label": None} for row in ROWS])
    task = MultiLabel(labels=["x", "y", "z"], data=Data(path=str(tmp_path)))
    source = open_source(task, tmp_path / "cache")
    found = Units.of(source.read("train"))
    assert found.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]] and found.labelled.all()
    assert not Units.of(source.read("test")).labelled.any()
    with pytest.raises(UserError, match="no labels"):
        source.read("test", need_labels=True)


def test_a_focus_takes_all_examples_with_one_of_its_labels():
    labels = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]])
    keys = torch.arange(8).view(4, 2)
    assert keep_share_of_others(labels, keys, [0], 0.0).tolist() == [0, 3]
    assert keep_share_of_others(labels, keys, [0, 2], 0.0).tolist() == [0, 1, 3]
    assert keep_share_of_others(labels, keys, [0], 1.0).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------ losses


def test_logit_mse_is_the_mean_over_labels():
    """Logits 1 and 2 against 0: (1 + 4) / 2. The logit of a label's absence is 0 in all models, and
    is none of theirs."""
    student = built("bert", AutoModelForSequenceClassification, num_labels=2, **SMALL)
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
def test_a_live_teacher_that_no_term_asks_for_logits(of_labels, of_states):
    """Each term's share is that which it has alone."""
    student, teacher = (
        built("bert", AutoModelForSequenceClassification, seed=seed, num_labels=3, **SMALL)
        for seed in range(2)
    )
    ids = torch.randint(0, 9, (3, 4))
    view, labels = PaddedView(ids, torch.ones_like(ids)), torch.randint(0, 2, (3, 3))

    def shares(*names):
        torch.manual_seed(1)  # of projections
        losses = losses_of({name: {} for name in names})
        bundle = Bundle(student, {"t": teacher}, build_terms(losses, TermInputs(4, {"t": 4})))
        return bundle(Batch.from_views({"student": view, "t": view}, labels))

    together = shares(of_labels, of_states)
    for name in (of_labels, of_states):
        assert together[name].equal(shares(name)[name])


def make_batch(draw, n, many):
    ids = torch.from_numpy(draw.integers(5, 50, (n, 4)))
    labels = torch.from_numpy(draw.integers(0, 2, (n, many)))
    labels[draw.random(n) < 0.3] = -1
    return Batch.from_views({"student": PaddedView(ids, torch.ones_like(ids))}, labels)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(2, 5), st.sampled_from([1.0, 2.0]))
def test_losses_are_those_of_sigmoids(seed, n, many, temperature):
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


def test_an_unlabelled_row_is_in_no_row_of_two():
    batch = make_batch(np.random.default_rng(0), 3, 4)
    batch.labels[1] = -100
    batch.row_sets["labelled"] = torch.tensor([0, 2])
    logits = torch.zeros(3, 4)
    rows = Seen(Signals(logits), batch).by_label().batch
    assert rows.row_sets["labelled"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert (rows.labels[rows.row_sets["labelled"]] >= 0).all()
    assert rows.keys[4:8].equal(batch.keys[1].expand(4, 2)), "each row is of its example"


# ----------------------------------------------------------------------------------- routing


def experts(n=400):
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


def test_what_a_teacher_knows_is_known_of_each_label(tmp_path):
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
        assert target.logits.shape == (400, 3)
        assert target.weights.shape == (2, 400, 3)
        right = (target.logits.numpy() > 0) == (truth == 1)
        assert right.mean(axis=0).min() > 0.95, policy
    followed = Router("expertise", fitted=fitted)(signals, batch).weights
    there = torch.from_numpy(truth == 1)
    assert (followed[0, :, 0][there[:, 0]] == 1).all() and (
        followed[1, :, 1][there[:, 1]] == 1
    ).all()


def test_of_a_rare_label_the_expert_is_not_who_never_predicts_it():
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


def test_policies_are_compared_over_labels():
    signals, truth, keys = experts()
    found = compare(signals, truth, keys, ["x", "y", "z"])
    assert found.metric == "micro_f1" and found.examples == 400
    assert found.any_teacher.score > 0.95
    assert found.policies["gate"].score > found.policies["average"].score
    assert found.policies["gate"].interval[0] > 0
    assert set(found.policies["gate"].per_class) == {"x", "y", "z"}
    assert found.choice != "average"


@pytest.mark.parametrize("split", ["train", "other"])
def test_a_new_head_starts_at_the_log_odds_of_train(tmp_path, split):
    """Of three labelled examples and one without; 0 where no split train is."""
    names = ["x", "y", "z"]
    built("bert", **SMALL).save_pretrained(tmp_path)
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [-1, -1, -1]])
    data = SimpleNamespace(
        has_split=lambda name: name == split,
        examples=lambda name: SimpleNamespace(labels=labels),
    )
    kind = MultiLabelKind(MultiLabel(labels=names, data=Data(path=str(tmp_path))), names)
    model = kind.load(data, str(tmp_path), names, new_head=True)
    shares = torch.tensor([2.5 / 4, 2.5 / 4, 0.5 / 4] if split == "train" else [0.5] * 3)
    torch.testing.assert_close(model.classifier.bias.sigmoid(), shares)


NUMBERS = [0.5, -2.0, 3.0]


def numbers_read(folder, split="train", need=False, **data):
    task = Regression(data=Data(path=str(folder), **data))
    return open_source(task, folder / "cache").read(split, need)


def write_numbers(folder, ending, labels):
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    write(folder / f"train.{ending}", rows)


# -------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("labels", [NUMBERS, [1, 2, -3], [7], [1, 2.5, -3, 4e-3]])
def test_numbers_are_read(tmp_path, ending, labels):
    write_numbers(tmp_path, ending, labels)
    found = Units.of(numbers_read(tmp_path, need=True))
    assert found.labels.dtype == np.float32 and found.labels.tolist() == pytest.approx(labels)
    assert found.labelled.all()


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["empty", "none"])
def test_a_split_may_have_no_labels(tmp_path, ending, column):
    write_numbers(tmp_path, ending, [None, None])
    if column == "none":
        (tmp_path / f"train.{ending}").unlink()
        (tmp_path / "train.txt").write_text("a\nb\n")
    found = Units.of(numbers_read(tmp_path))
    kind = RegressionKind(Regression(data=Data(path="d")), [])
    assert not found.labelled.any() and not kind.examples(found).labelled.any()
    assert kind.examples(found).labels.dtype == np.float32
    with pytest.raises(UserError, match=r"no labels|no column 'label'"):
        numbers_read(tmp_path, need=True)


def test_a_split_of_other_data_keeps_its_numbers(tmp_path):
    write_numbers(tmp_path, "jsonl", NUMBERS)
    write_numbers(tmp_path / "other", "csv", [9.5])
    other = {"path": str(tmp_path / "other")}
    splits = {"train": "train", "test": other, "transfer": {**other, "labels": "none"}}
    assert Units.of(numbers_read(tmp_path, "test", splits=splits)).labels.tolist() == [9.5]
    assert not Units.of(numbers_read(tmp_path, "transfer", splits=splits)).labelled.any()


# ------------------------------------------------------------------------------------- terms


@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0.1, 3.0))
def test_the_losses_are_squared_errors(seed, n, weight):
    draw = np.random.default_rng(seed)
    student, teacher = (torch.from_numpy(draw.normal(0, 3, (n, 1))).float() for _ in range(2))
    labels = torch.from_numpy(draw.normal(0, 3, n))
    labels[draw.random(n) < 0.3] = float("nan")
    ids = torch.from_numpy(draw.integers(5, 50, (n, 4)))
    batch = Batch.from_views({"student": PaddedView(ids, torch.ones_like(ids))}, labels)
    terms = build_terms(
        losses_of({"mse": {"weight": weight}, "logit_mse": {"weight": weight}}),
        TermInputs(4, {"t": 4}),
    )
    found = {
        name: term(Seen(Signals(student), batch, {"t": Signals(teacher)})).tolist()
        for name, term in terms.items()
    }
    pairs = zip(student[:, 0].tolist(), labels.float().tolist(), strict=True)
    expected = [weight * (own - label) ** 2 for own, label in pairs if label == label]
    assert found["mse"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    expected = (weight * (student - teacher).square()[:, 0]).tolist()
    assert found["logit_mse"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_labels_of_another_kind_are_refused_by_the_terms():
    view = PaddedView(torch.ones(2, 2).long(), torch.ones(2, 2).long())
    terms = build_terms(losses_of({"mse": {}, "cross_entropy": {}}), TermInputs(4))
    numbers = Batch.from_views({"student": view}, torch.tensor([0.5, 1.0]))
    classes = Batch.from_views({"student": view}, torch.tensor([0, 1]))
    two, one = Signals(torch.zeros(2, 2)), Signals(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="these labels are numbers: use mse"):
        terms["cross_entropy"](Seen(two, numbers))
    for signals, batch in ((two, numbers), (one, classes)):
        with pytest.raises(ValueError, match="mse needs a student with one output"):
            terms["mse"](Seen(signals, batch))


@pytest.mark.parametrize("split", ["train", "other"])
def test_a_new_head_starts_at_the_mean_of_train(tmp_path, split):
    built("bert", num_hidden_layers=1).save_pretrained(tmp_path)
    examples = Units.plain(torch.zeros(3, 2).long(), np.array([1.0, 2.0, 6.0], dtype=np.float32))
    data = SimpleNamespace(has_split=lambda name: name == split, examples=lambda name: examples)
    kind = RegressionKind(Regression(data=Data(path=str(tmp_path))), [])
    model = kind.load(data, str(tmp_path), [], new_head=True)
    assert model.classifier.bias.tolist() == [3.0 if split == "train" else 0.0]
    assert model.config.problem_type == "regression" and model.config.num_labels == 1


# ----------------------------------------------------------------------------------- metrics

METRICS_OF_NUMBERS = build_metrics("numbers")
values = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.25, 1.0, 7.5, 1e3]), min_size=2, max_size=30)


def of_scipy(name, predicted, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constants
        if name == "mse":
            return float(mean_squared_error(labels, predicted))
        return float(
            {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name](predicted, labels)[0]
        )


def test_no_correlation_is_beyond_one():
    """Rounding takes about one in four of these there."""
    values = np.random.default_rng(0).normal(size=(200, 9))
    weights = np.ones_like(values)
    for factor, end in ((-3.3, -1.0), (7.7, 1.0)):
        found = correlation(values, factor * values + 0.1, weights)
        assert np.abs(found).max() <= 1.0 and found == pytest.approx(end)


@given(values, st.integers(0, 2**32), st.floats(-1e6, 1e6), st.floats(0.0, 2.0))
def test_metrics_are_those_of_scipy(labels, seed, shift, noise):
    """With any number of ties, and far from 0."""
    draw = np.random.default_rng(seed)
    truth = np.array(labels)
    predicted = shift + draw.permutation(truth) + noise * draw.normal(size=len(truth)).round(1)
    of = NumberPredictions(predicted, truth)
    for name, metric in METRICS_OF_NUMBERS.items():
        expected = of_scipy(name, predicted, truth)
        assert metric.value(of) == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("name", METRICS["numbers"])
def test_a_good_model_is_told_from_a_bad_one(name):
    draw, n = np.random.default_rng(0), 200
    truth = draw.normal(size=n)
    one, worse = (
        NumberPredictions(truth + draw.normal(0, noise, n), truth) for noise in (0.5, 1.5)
    )
    metric, entry = METRICS_OF_NUMBERS[name], METRICS["numbers"][name]
    assert entry.better(paired_interval(one, worse, metric))
    assert entry.worse(paired_interval(worse, one, metric))


def test_a_constant_has_no_correlation_and_equal_labels_are_refused():
    truth = np.array([0.1, 0.2, 0.4])
    constant = NumberPredictions(np.full(3, 0.1), truth)
    assert constant.predicted.mean() != 0.1, "a sum of squares would not be 0"
    found = metric_values(constant, METRICS_OF_NUMBERS)
    assert found["pearson"] is None and found["spearman"] is None
    assert found["mse"] == pytest.approx(of_scipy("mse", constant.predicted, truth))
    other = NumberPredictions(truth, truth)
    undefined = {"difference": None, "interval": None}
    assert difference(other, constant, METRICS_OF_NUMBERS["pearson"]) == undefined
    assert difference(other, constant, METRICS_OF_NUMBERS["mse"])["difference"] < 0
    with pytest.raises(UserError, match="a correlation labels that differ"):
        metric_values(NumberPredictions(truth, np.ones(3)), METRICS_OF_NUMBERS)


# ------------------------------------------------------------------------------------- check


@pytest.mark.parametrize("routing", ["random", "{policy: average, mix: losses}"])
def test_numbers_are_routed(routing, tmp_path, toy_settings):
    distil = {"split": "transfer", "teachers": "live", "losses": {"logit_mse": {}}}
    task = {"type": "regression", "data": toy_settings["task"]["data"]}
    settings = {**toy_settings, "task": task, "phases": [{"distil": distil}]}
    recipe = loaded(settings, tmp_path, f"phases.distil.routing={routing}")
    assert [*phase_mistakes(recipe)] == []


def test_fine_tuning_is_by_squared_error_where_nothing_is_said(tmp_path, toy_settings):
    settings = {**toy_settings, "phases": [{"fine-tune": {"models": "student"}}]}
    for kind, term in (("regression", "mse"), ("single-label", "cross_entropy")):
        settings["task"] = {"type": kind, "data": toy_settings["task"]["data"]}
        recipe = loaded(settings, tmp_path)
        assert list(recipe.phases[0].losses) == [term]
        (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(tmp_path / "again.yaml") == recipe


def test_a_teacher_has_one_output():
    entry = TASKS["regression"]
    config = BertConfig(architectures=["BertForSequenceClassification"], num_labels=1)
    check_head("m", config, entry)
    config.num_labels = 2
    with pytest.raises(UserError, match="'m' has 2 outputs, and a regression model has 1"):
        check_head("m", config, entry)
