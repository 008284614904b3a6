"""Numbers as labels: data, terms, metrics, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kinds
import numpy as np
import pytest
import torch
import yaml
from families import built
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import mean_squared_error
from transformers import BertConfig

from ds_distill.check.phases import phase_mistakes
from ds_distill.data.batches import Examples
from ds_distill.data.open_source import open_source
from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import NumberPredictions
from ds_distill.evaluation.scores import build_metrics, difference, metric_values
from ds_distill.losses import Seen, TermInputs, build_terms
from ds_distill.models.configuration import check_head
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.numbers import correlation
from ds_distill.recipe.tasks import TASKS, Data, Regression
from ds_distill.recipe.terms import losses_of
from ds_distill.tasks.labelled import RegressionKind
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

NUMBERS = [0.5, -2.0, 3.0]


def read(folder: Path, split: str = "train", need: bool = False, **data: Any) -> Any:
    task = Regression(data=Data(path=str(folder), **data))
    return open_source(task, folder / "cache").read(split, need)


def write(folder: Path, ending: str, labels: list[Any]) -> None:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    kinds.write(folder / f"train.{ending}", rows)


# -------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("labels", [NUMBERS, [1, 2, -3], [7], [1, 2.5, -3, 4e-3]])
def test_numbers_are_read(tmp_path: Path, ending: str, labels: list[Any]) -> None:
    write(tmp_path, ending, labels)
    found = Examples.of(read(tmp_path, need=True))
    assert found.labels.dtype == np.float32 and found.labels.tolist() == pytest.approx(labels)
    assert found.labelled.all()


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["empty", "none"])
def test_a_split_may_have_no_labels(tmp_path: Path, ending: str, column: str) -> None:
    write(tmp_path, ending, [None, None])
    if column == "none":
        (tmp_path / f"train.{ending}").unlink()
        (tmp_path / "train.txt").write_text("a\nb\n")
    found = Examples.of(read(tmp_path))
    kind = RegressionKind(Regression(data=Data(path="d")), [])
    assert not found.labelled.any() and not kind.examples(found).labelled.any()
    assert kind.examples(found).labels.dtype == np.float32
    with pytest.raises(UserError, match=r"no labels|no column 'label'"):
        read(tmp_path, need=True)


def test_a_split_of_other_data_keeps_its_numbers(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", NUMBERS)
    write(tmp_path / "other", "csv", [9.5])
    other = {"path": str(tmp_path / "other")}
    splits = {"train": "train", "test": other, "transfer": {**other, "labels": "none"}}
    assert Examples.of(read(tmp_path, "test", splits=splits)).labels.tolist() == [9.5]
    assert not Examples.of(read(tmp_path, "transfer", splits=splits)).labelled.any()


# ------------------------------------------------------------------------------------- terms


@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0.1, 3.0))
def test_the_losses_are_squared_errors(seed: int, n: int, weight: float) -> None:
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


def test_labels_of_another_kind_are_refused_by_the_terms() -> None:
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
def test_a_new_head_starts_at_the_mean_of_train(tmp_path: Path, split: str) -> None:
    built("bert", num_hidden_layers=1).save_pretrained(tmp_path)
    examples = Examples(torch.zeros(3, 2).long(), np.array([1.0, 2.0, 6.0], dtype=np.float32))
    data: Any = SimpleNamespace(
        has_split=lambda name: name == split, examples=lambda name: examples
    )
    kind = RegressionKind(Regression(data=Data(path=str(tmp_path))), [])
    model: Any = kind.load(data, str(tmp_path), [], new_head=True)
    assert model.classifier.bias.tolist() == [3.0 if split == "train" else 0.0]
    assert model.config.problem_type == "regression" and model.config.num_labels == 1


# ----------------------------------------------------------------------------------- metrics

METRICS_OF_NUMBERS = build_metrics("numbers")
values = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.25, 1.0, 7.5, 1e3]), min_size=2, max_size=30)


def of_scipy(name: str, predicted: np.ndarray, labels: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constants
        if name == "mse":
            return float(mean_squared_error(labels, predicted))
        return float(
            {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name](predicted, labels)[0]
        )


def test_no_correlation_is_beyond_one() -> None:
    """Rounding takes about one in four of these there."""
    values = np.random.default_rng(0).normal(size=(200, 9))
    weights = np.ones_like(values)
    for factor, end in ((-3.3, -1.0), (7.7, 1.0)):
        found = correlation(values, factor * values + 0.1, weights)
        assert np.abs(found).max() <= 1.0 and found == pytest.approx(end)


@given(values, st.integers(0, 2**32), st.floats(-1e6, 1e6), st.floats(0.0, 2.0))
def test_metrics_are_those_of_scipy(
    labels: list[float], seed: int, shift: float, noise: float
) -> None:
    """With any number of ties, and far from 0."""
    draw = np.random.default_rng(seed)
    truth = np.array(labels)
    predicted = shift + draw.permutation(truth) + noise * draw.normal(size=len(truth)).round(1)
    of = NumberPredictions(predicted, truth)
    for name, metric in METRICS_OF_NUMBERS.items():
        expected = of_scipy(name, predicted, truth)
        assert metric.value(of) == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("name", METRICS["numbers"])
def test_a_good_model_is_told_from_a_bad_one(name: str) -> None:
    draw, n = np.random.default_rng(0), 200
    truth = draw.normal(size=n)
    one, worse = (
        NumberPredictions(truth + draw.normal(0, noise, n), truth) for noise in (0.5, 1.5)
    )
    metric, entry = METRICS_OF_NUMBERS[name], METRICS["numbers"][name]
    assert entry.better(paired_interval(one, worse, metric))
    assert entry.worse(paired_interval(worse, one, metric))


def test_a_constant_has_no_correlation_and_equal_labels_are_refused() -> None:
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
def test_numbers_are_routed(routing: str, tmp_path: Path, toy_settings: dict[str, Any]) -> None:
    path = tmp_path / "toy.yaml"
    distil = {"split": "transfer", "teachers": "live", "losses": {"logit_mse": {}}}
    task = {"type": "regression", "data": toy_settings["task"]["data"]}
    path.write_text(yaml.safe_dump({**toy_settings, "task": task, "phases": [{"distil": distil}]}))
    recipe = load_recipe(str(path), [f"phases.distil.routing={routing}"])
    assert [*phase_mistakes(recipe)] == []


def test_fine_tuning_is_by_squared_error_where_nothing_is_said(
    tmp_path: Path, toy_settings: dict[str, Any]
) -> None:
    path = tmp_path / "toy.yaml"
    settings = {**toy_settings, "phases": [{"fine-tune": {"models": "student"}}]}
    for kind, term in (("regression", "mse"), ("single-label", "cross_entropy")):
        settings["task"] = {"type": kind, "data": toy_settings["task"]["data"]}
        path.write_text(yaml.safe_dump(settings))
        recipe = load_recipe(str(path))
        assert list(recipe.phases[0].losses) == [term]  # type: ignore[attr-defined]
        path.write_text(dump_recipe(recipe))
        assert load_recipe(str(path)) == recipe


def test_a_teacher_has_one_output() -> None:
    entry = TASKS["regression"]
    config = BertConfig(architectures=["BertForSequenceClassification"], num_labels=1)
    check_head("m", config, entry)
    config.num_labels = 2
    with pytest.raises(UserError, match="'m' has 2 outputs, and a regression model has 1"):
        check_head("m", config, entry)
