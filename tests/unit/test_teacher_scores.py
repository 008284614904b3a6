"""Which teachers are scored before which phase, and what stops a run."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tr

from ds_distill.data.batches import Units
from ds_distill.evaluation.label_order import label_doubt
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import validate
from ds_distill.recipe.tasks import Regression, SingleLabel
from ds_distill.run.doubts import (
    _focus,
    _keep,
    _ready,
    _teaches_nothing,
    doubt_text,
    warn_of_teachers,
)
from ds_distill.run.folder import RunFolder
from ds_distill.tasks.labelled import RegressionKind, SingleLabelKind

NAMES = ["a", "b", "c"]


def run_of(settings, phases, **more):
    """A run of the toy recipe: `first` is trained by a phase, and `second` comes trained."""
    made = {**copy.deepcopy(settings), "phases": phases}
    recipe = validate(Recipe, made)
    trained_in = {output: number for number, output in reversed(list(recipe.trained_models()))}
    return SimpleNamespace(
        recipe=recipe,
        phases=dict(enumerate(recipe.phases)),
        task=recipe.task,
        task_name="task",
        labels=["animal", "food", "weather"],
        observer=None,
        data=SimpleNamespace(has_split=lambda split: True),
        teachers=lambda number: list(recipe.teachers),
        reference=lambda name, number: SimpleNamespace(
            name=name, trained=trained_in.get(name, number) < number
        ),
        **more,
    )


TEACH = {"fine-tune": {"models": "first", "focus": {"classes": ["food", "animal"]}}}
CACHE = {"cache": {"splits": ["transfer"]}}
DISTIL = {"distil": {"split": "transfer", "losses": {"kl": {}}}}
EVALUATE = {"evaluate": {}}


def ready(run):
    return [[one.name for one in _ready(at, run)] for at in range(len(run.recipe.phases))]


def test_each_is_scored_as_soon_as_it_is_what_it_will_teach_as(toy_settings, masked_lm_settings):
    phases = [TEACH, CACHE, {"expertise": {}}, DISTIL, EVALUATE]
    both = ["first", "second"]
    of_all = run_of(toy_settings, phases)
    assert ready(of_all) == [["second"], ["second"], ["second"], both, []]
    assert _focus(3, of_all, SimpleNamespace(name="first")) == [1, 0]
    assert _focus(3, of_all, SimpleNamespace(name="second")) is None
    leaves = [*phases[:2], {"expertise": {"leave_out": "unqualified"}}, *phases[3:]]
    assert ready(run_of(toy_settings, leaves)) == [[], [], [], both, []], "that phase chooses"
    assert ready(run_of(toy_settings, [TEACH, CACHE, EVALUATE])) == [[], [], []], "none teaches"
    of_all.observer = object()
    assert not any(ready(of_all)), "a short run says nothing of quality"
    tokens = run_of(masked_lm_settings, masked_lm_settings["phases"])
    assert not any(ready(tokens)), "no labels"


@pytest.mark.parametrize(
    ("predicted", "trained", "of_words", "stops"),
    [
        ([0] * 60 + [1] * 20 + [2] * 20, False, False, False),  # right
        ([1] * 60 + [2] * 20 + [0] * 20, False, False, True),  # in another order
        ([1] * 60 + [2] * 20 + [0] * 20, False, True, True),
        ([0] * 100, False, False, False),  # that label itself
        ([1] * 60 + [0] * 40, True, False, True),  # below it
        ([1] * 60 + [0] * 40, True, True, False),  # as it may be where most words are O
        ([0] * 56 + [1] * 44, True, False, False),  # as near as chance
    ],
)
def test_what_is_below_the_commonest_label_beyond_chance_stops(predicted, trained, of_words, stops):
    labels = np.array([0] * 60 + [1] * 20 + [2] * 20)
    found = label_doubt(np.eye(3)[predicted], labels, NAMES)
    run = SimpleNamespace(task=SimpleNamespace(of_words=of_words))
    reference = SimpleNamespace(trained=trained)
    assert (found is not None and _teaches_nothing(run, reference, found)) is stops


def test_a_checkpoint_that_is_only_evaluated_is_no_teacher_in_a_warning():
    lines = []
    events = []
    log = SimpleNamespace(
        info=lines.append, event=lambda kind, **about: events.append(about["text"])
    )
    found = label_doubt(np.eye(3)[[1, 1, 1, 1]], np.array([0, 0, 0, 1]), NAMES)
    assert found.is_worthless
    scores = SimpleNamespace(read_teacher_scores=lambda: [])
    kind = SimpleNamespace(label_doubt=lambda *given: found)
    run = SimpleNamespace(log=log, kind=kind, folder=scores, task_name="task")
    for name, role, called in (
        ("ann", "teacher", "teacher ann"),
        ("ann", "checkpoint", "checkpoint ann"),
        ("checkpoint", "checkpoint", "checkpoint"),
    ):
        one = SimpleNamespace(name=name, trained=True, label_map=None)
        about = "evaluate", "test", [one], {name: None}, None, role
        [text] = warn_of_teachers(run, *about)
        assert text.startswith(f"{called}: accuracy 25.0% on test")
        assert lines[-1] == f"WARNING: {text}" and events[-1] == text
    told = {"task": "task", "teacher": "ann", "model": ["a.jsonl", None], "doubt": text}
    run.folder = SimpleNamespace(read_teacher_scores=lambda: [told])
    for file, again in (("a.jsonl", 0), ("b.jsonl", 1)):
        one = SimpleNamespace(name="ann", trained=True, label_map=None, predictions=file)
        assert len(warn_of_teachers(run, "evaluate", "test", [one], {"ann": None}, None)) == again


MAJORITY = [0] * 90 + [1] * 10
FINDS = [0] * 60 + [1] * 40  # all of the rare class, and 30 others: right 70 times, not 90
MISSES = [1] * 30 + [0] * 70  # none of the rare class, and 30 others
SHOWN_BY = {
    "macro_f1": ("accuracy 60.0% and macro F1 37.5%", "has 90.0% and 47.4%"),
    "f1": ("accuracy 60.0% and F1 0.0%", "has 90.0% and 0.0%"),
    "auc": ("accuracy 60.0% and AUC 33.3%", "has 90.0% and 50.0%"),
    "macro_recall": ("accuracy 60.0% and macro recall 33.3%", "has 90.0% and 50.0%"),
}


def kind_of(metric):
    settings = {"type": "single-label", "data": {"path": "x"}, "metric": metric}
    return SingleLabelKind(SingleLabel.model_validate(settings), ["no", "yes"])


@pytest.mark.parametrize("metric", ["accuracy", *SHOWN_BY])
def test_a_detector_of_a_rare_class_is_judged_by_the_tasks_metric(metric):
    """Among 90 without it, one that finds all 10 and takes 30 others for them is right 70 times,
    and always `no` 90 times."""
    kind = kind_of(metric)
    examples = Units.plain(torch.arange(200).view(-1, 2), np.array(MAJORITY))
    run = SimpleNamespace(task=SimpleNamespace(reads_labels=True, of_words=False), kind=kind)
    reference = SimpleNamespace(trained=True)
    detector, useless = (kind.label_doubt(np.eye(2)[told], examples) for told in (FINDS, MISSES))
    assert (detector is None) is (metric != "accuracy"), detector
    assert detector is None or _teaches_nothing(run, reference, detector)
    assert _teaches_nothing(run, reference, useless), "by no metric is it better than always `no`"
    text = doubt_text(run, reference, "validation", useless, None)
    own, constant = SHOWN_BY.get(metric, ("accuracy 60.0% on", "has 90.0%"))
    assert text.startswith(own) and text.endswith(f"always predicting 'no' {constant}."), text
    # One that knows two of three classes is judged on their examples alone.
    if metric in ("accuracy", "macro_f1", "macro_recall"):
        kind = SingleLabelKind(kind.settings.model_copy(), ["no", "other", "yes"])
        labels = np.array([2 * label for label in MAJORITY] + [1] * 50)
        examples = Units.plain(torch.arange(300).view(-1, 2), labels)
        outputs = np.eye(3)[[2 * one for one in FINDS] + [0] * 50]
        found = kind.label_doubt(outputs, examples, (0, 2))
        assert (found is None) is (metric != "accuracy")


def test_an_order_that_is_wrong_is_told_whatever_the_metric():
    kind = SingleLabelKind(kind_of("macro_f1").settings, ["a", "b", "c"])
    examples = Units.plain(torch.arange(200).view(-1, 2), np.repeat([0, 1, 2], [50, 30, 20]))
    swapped = np.repeat([1, 0, 2], [50, 30, 20])
    found = kind.label_doubt(np.eye(3)[swapped], examples)
    assert found.order == [1, 0, 2]
    run = SimpleNamespace(task=SimpleNamespace(reads_labels=True, of_words=False))
    assert _teaches_nothing(run, SimpleNamespace(trained=False), found)


SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, f".activation_fn={SIGMOID}, which"),
        ({"sbert_ce_default_activation_function": SIGMOID}, f"_function={SIGMOID}, which"),
        ({}, "another scale"),
    ],
)
def test_numbers_worse_than_the_mean_label_are_told_with_what_may_be_behind_the_output(
    keys, says, tmp_path, toy_settings
):
    tr.BertConfig(num_labels=1, **keys).save_pretrained(tmp_path / "m")
    lines = []
    log = SimpleNamespace(info=lines.append, event=lambda kind, **about: None)
    settings = {"type": "regression", "data": {"path": "x"}}
    run = run_of(
        toy_settings,
        [CACHE, DISTIL],
        log=log,
        kind=RegressionKind(Regression.model_validate(settings), []),
        world=SimpleNamespace(barrier=lambda: None, is_main=True),
        folder=RunFolder(tmp_path),
        knows=lambda reference, examples: np.ones(len(examples), dtype=bool),
    )
    run.task = run.kind.settings
    one = SimpleNamespace(name="first", model=str(tmp_path / "m"), revision=None, predictions=None)
    one.label_map, one.trained = None, False
    examples = Units.plain(torch.arange(8).view(-1, 2), np.array([0.0, 1, 0, 1], dtype=np.float32))
    for of_model, doubted in (([-4.0, 4, -4, 4], True), ([0.4, 0.6, 0.4, 0.6], False)):
        run.folder.teacher_scores.unlink(missing_ok=True)
        _keep(
            1, "distil", run, "validation", [one], {"first": np.array(of_model)[:, None]}, examples
        )
        [entry] = run.folder.read_teacher_scores()
        assert ("doubt" in entry) is doubted
        if doubted:
            text = entry["doubt"]
            assert text.startswith("mean squared error 12.5 on validation") and "has 0.25" in text
            assert says in text and "teachers.first.predictions" in text
            assert entry["teaches_nothing"] is False
