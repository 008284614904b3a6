"""Predictions that a run keeps are those that it had, of every kind of task."""

import numpy as np
import pytest

from ds_distill.errors import UserError
from ds_distill.evaluation.answers import AnswerPredictions
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.prediction_files import PREDICTIONS, SavedPredictions, examples_mark
from ds_distill.evaluation.predictions import (
    ClassPredictions,
    LabelPredictions,
    NumberPredictions,
    SpanPredictions,
    TagPredictions,
    TokenScores,
)
from ds_distill.evaluation.scores import build_metric
from ds_distill.recipe.metrics import METRICS, reported_metrics
from ds_distill.recipe.tags import SPAN_TAGS

TAGS = ["O", "B-a", "I-a"]
OVER = list(METRICS)


def made(over, seed):
    """Predictions for the same six examples, a model's own by the seed."""
    draw, same = np.random.default_rng(seed), np.random.default_rng(0)
    if over == "classes":
        return ClassPredictions(draw.normal(size=(6, 3)), np.array([0, 1, 2, 0, 1, 2]))
    if over == "labels":
        labels = np.array([[0, 1], [1, 0], [1, 1], [0, 0], [-1, 1], [1, -1]])
        return LabelPredictions(draw.normal(size=(6, 2)).astype(np.float32), labels)
    if over == "masked tokens":
        tokens, words = same.integers(2, 9, 6) * 1.0, same.integers(1, 4, 6) * 1.0
        loss, own, of_words = (
            draw.uniform(1, 9, 6),
            draw.uniform(1, 9, (3, 6)),
            draw.uniform(1, 9, 6),
        )
        return TokenScores(loss, np.ones(6), tokens, own, of_words, words)
    if over == "numbers":
        return NumberPredictions(draw.normal(size=6), same.normal(size=6))
    if over == "answers":
        said = [["a", "b"], ["b"], ["the a"], ["c", "a"], [], ["x"]]
        right = [["a"], ["b", "a"], ["a"], ["a"], ["a"], ["y"]]
        return AnswerPredictions([said[at] for at in draw.permutation(6)], right, 9)
    offsets = np.array([0, 3, 4, 7, 9, 10, 12])
    counted = np.arange(12) != 5
    if over == "characters":
        starts = 4 * (np.arange(12) - np.repeat(offsets[:-1], np.diff(offsets)))
        answers = np.array([[0, 4, 11], [2, 0, 3], [3, 4, 7], [5, 0, 7]])
        of_contexts = np.stack([starts, starts + 3], axis=1), answers, 6
        labels = same.integers(0, 2, 12)
        logits = draw.normal(size=(12, 2))
        return SpanPredictions(logits, labels, offsets, counted, list(SPAN_TAGS), *of_contexts)
    logits, labels = draw.normal(size=(12, 3)), same.integers(0, 3, 12)
    return TagPredictions(logits, labels, offsets, counted, TAGS)


@pytest.mark.parametrize("over", OVER)
def test_what_is_read_is_what_was_written(over, tmp_path):
    assert set(PREDICTIONS) == set(OVER)
    names = {"classes": ["x", "y", "z"], "labels": ["x", "y"], "words": TAGS}
    labels = {**names, "characters": list(SPAN_TAGS)}.get(over, [])
    models = {"first": made(over, 1), "second/third": made(over, 2)}
    groups = np.array([0, 0, 1, 2, 3, 3])
    file = tmp_path / "new" / "predictions.safetensors"
    SavedPredictions(labels, groups, models).write(file)
    again = SavedPredictions.read(file, over)
    assert again.labels == labels and again.groups.tolist() == groups.tolist()
    assert set(again.models) == set(models)
    for settings in reported_metrics(over).values():
        judge = build_metric(over, settings, labels)
        for name, of_model in models.items():
            assert judge.value(again.models[name]) == judge.value(of_model)
        pairs = [list(each.values()) for each in (models, {n: again.models[n] for n in models})]
        was, now = (paired_interval(*pair, judge, groups=groups) for pair in pairs)
        np.testing.assert_array_equal(was, now)


def test_a_damaged_file_is_refused(tmp_path):
    file = tmp_path / "predictions.safetensors"
    SavedPredictions([], np.zeros(6, int), {"m": made("masked tokens", 1)}).write(file)
    with pytest.raises(UserError, match="not readable"):
        SavedPredictions.read(file, "classes")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"not readable.*Copy the run again"):
        SavedPredictions.read(file, "masked tokens")


def test_the_mark_tells_examples_apart():
    keys, labels = np.arange(8).reshape(4, 2), np.array([0, 1, 1, 0])
    mark = examples_mark(keys, labels, {"labels": ["a", "b"], "length": 8})
    assert mark == examples_mark(keys.copy(), labels.copy(), {"length": 8, "labels": ["a", "b"]})
    others = [
        (keys[::-1], labels, {"labels": ["a", "b"], "length": 8}),
        (keys, 1 - labels, {"labels": ["a", "b"], "length": 8}),
        (keys, labels, {"labels": ["b", "a"], "length": 8}),
        (keys[:3], labels[:3], {"labels": ["a", "b"], "length": 8}),
    ]
    assert len({mark, *(examples_mark(*other) for other in others)}) == 5
