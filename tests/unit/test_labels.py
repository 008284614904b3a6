"""Which outputs of a teacher are the task's classes, and whether their order can be right."""

import numpy as np
import pytest
import torch
import transformers as tr
import yaml
from families import built
from hypothesis import given
from hypothesis import strategies as st

from ds_distill.check.labels import label_notes
from ds_distill.errors import UserError
from ds_distill.evaluation.label_order import label_doubt
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import check_head
from ds_distill.models.labels import LabelMap, label_map, tag_map
from ds_distill.phases.evaluate import with_head
from ds_distill.recipe.data import Data
from ds_distill.recipe.schema import Recipe, Teacher
from ds_distill.recipe.tasks import TASKS, MultiLabel, SingleLabel
from ds_distill.run.run import Run
from ds_distill.types import Batch
from ds_distill.views import PaddedView

LABELS = ["a", "b", "c"]


ONE = SingleLabel(data=Data(path="x"))
MANY = MultiLabel(data=Data(path="x"))


def mapped(names, labels, given=None, task=ONE):
    config = tr.BertConfig(id2label=dict(enumerate(names)))
    return label_map("m", config, task, labels, given)


def columns(names, labels, given=None):
    """The output of each label, of a teacher that has one for each."""
    found = mapped(names, labels, given)
    if found is None:
        return None
    assert found.classes is None
    assert found.to_json() == [one for [one] in found.outputs], "as caches had it before"
    return [one for [one] in found.outputs]


def generic(count):
    return [f"LABEL_{number}" for number in range(count)]


# ------------------------------------------------------------------------- as they stand


def test_without_the_key_labels_must_be_the_tasks():
    assert columns(["A", "b", "C"], LABELS) is None, "case does not matter"
    assert columns(generic(3), LABELS) is None, "never named"
    with pytest.raises(UserError, match=r"order b, a, c.*order a, b, c.*task\.labels") as caught:
        columns(["b", "a", "c"], LABELS)
    assert "labels: {b: b, a: a, c: c}" in str(caught.value)
    with pytest.raises(UserError, match="Fine-tune it on this task first"):
        mapped(["a", "b"], LABELS, task=MANY)
    config = tr.BertConfig(id2label={1: "a", 2: "b", 3: "c"})  # counted from 1, yet in order
    assert label_map("m", config, ONE, LABELS) is None


# ------------------------------------------------------------------------- as they are given


@given(st.data())
def test_each_label_gets_the_output_that_is_given_for_it(data):
    """A walk over the outputs, one by one, with all that a recipe may write for each."""
    labels = [f"task {number}" for number in range(data.draw(st.integers(2, 6)))]
    outputs = data.draw(st.permutations(range(len(labels) + data.draw(st.integers(0, 3)))))
    names = data.draw(st.sampled_from([generic(len(outputs)), [f"n{at}" for at in outputs]]))
    written = {}
    for label, output in zip(labels, outputs, strict=False):
        written[data.draw(st.sampled_from([str(output), names[output]]))] = label
    order = data.draw(st.permutations(list(written)))
    found = columns(names, labels, {key: written[key] for key in order})
    wanted = [outputs[at] for at in range(len(labels))]
    assert found == (None if wanted == list(range(len(names))) else wanted)
    text = yaml.safe_dump(
        {"model": "m", "labels": {int(k) if k.isdigit() else k: written[k] for k in order}}
    )
    assert Teacher(**yaml.safe_load(text)).labels == written


def test_a_name_is_a_name_before_it_is_a_number():
    stars = ["1", "2", "3"]
    assert columns(stars, LABELS, {"1": "c", "2": "b", "3": "a"}) == [2, 1, 0]
    assert columns(stars, LABELS, {"0": "a", "2": "b", "3": "c"}) is None


def test_tags_of_other_tasks_are_those_of_the_same_name():
    genes, both = ["O", "B-gene", "I-gene"], ["B-disease", "B-gene", "I-gene", "O"]
    assert tag_map(genes, genes) is None
    assert tag_map(genes, both) == LabelMap(((1,), (2,), (0,)), (1, 2, 3))
    # What the task does not know is O there: probabilities of several outputs add.
    assert tag_map(both, genes) == LabelMap(((0, 3), (1,), (2,)))
    assert tag_map(["B-city", "O"], genes) == LabelMap(((0, 1),), (0,))
    assert tag_map(["x", "y"], ["y", "z"]) == LabelMap(((1,),), (0,))


def test_labels_left_out_several_classes_and_null():
    assert mapped(["x", "y"], LABELS, {"y": "a", "x": "c"}) == LabelMap(((1,), (0,)), (0, 2))
    assert mapped(["x", "y", "z"], ["a", "b"], {"z": "a", "x": "a", "y": "b"}) == LabelMap(
        ((0, 2), (1,))
    )
    given = {"a": "a", "b": "b", "c": "c", "d": None}
    assert mapped(list("abcd"), LABELS, given) == LabelMap(((0,), (1,), (2,)))
    without_null = {"a": "a", "b": "b", "c": "c"}
    assert mapped(list("abcd"), LABELS, without_null) == LabelMap(((0,), (1,), (2,)))
    assert mapped(["a", "b"], LABELS, {"a": "a", "b": "b"}) == LabelMap(((0,), (1,)), (0, 1))
    text = yaml.safe_load("{model: m, labels: {0: a, 1: null}}")
    assert Teacher(**text).labels == {"0": "a", "1": None}
    found = mapped(["x", "y", "z"], LABELS, {"y": "a", "z": "a", "x": "c"})
    assert found.to_json() == [[1, 2], None, 0]


def test_with_many_labels_each_has_one_class():
    """There is no distribution over a part of the labels, and their probabilities do not add."""
    whole = {"0": "c", "1": "b", "2": "a"}
    assert mapped(generic(3), LABELS, whole, task=MANY) == mapped(generic(3), LABELS, whole)
    with pytest.raises(UserError, match=r"given for c.*type single-label"):
        mapped(generic(3), LABELS, {"0": "a", "1": "b"}, task=MANY)
    with pytest.raises(UserError, match="do not add"):
        mapped(generic(4), LABELS, {**whole, "3": "a"}, task=MANY)


# ---------------------------------------------------------------------------- the bundle


def test_a_bundle_puts_a_teachers_outputs_in_order_and_leaves_its_weights():
    model = built("bert", tr.AutoModelForSequenceClassification, num_labels=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(1, 20, (5, 6))
    views = dict.fromkeys(["plain", "turned"], PaddedView(ids, torch.ones_like(ids)))
    batch = Batch(torch.zeros(5, 2).long(), dict(views), torch.zeros(5).long(), {})
    turned = LabelMap(((3,), (0,), (2,)))
    bundle = Bundle(None, {"plain": model, "turned": model}, label_maps={"turned": turned})
    outputs = bundle(batch, predict=("plain", "turned"), layers=(-1,))
    assert torch.equal(outputs["turned"].logits, outputs["plain"].logits[:, [3, 0, 2]])
    assert torch.equal(outputs["turned"].hidden[-1], outputs["plain"].hidden[-1])
    assert not [name for name in bundle.state_dict() if not name.startswith("teachers.")]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ------------------------------------------------------------------------ another order


@given(st.integers(2, 6), st.integers(0, 10_000))
def test_the_order_of_a_teacher_that_knows_its_work_is_found(classes, seed):
    """Most of each class is told rightly, under a permutation of the outputs."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), 40)
    output_of = draw.permutation(classes)
    told = np.where(
        draw.random(len(labels)) < 0.9, labels, draw.integers(classes, size=len(labels))
    )
    logits = np.eye(classes)[output_of[told]] + 0.1 * draw.random((len(labels), classes))
    labels[draw.random(len(labels)) < 0.1] = -1
    names = [f"label {number}" for number in range(classes)]
    found = label_doubt(logits, labels, names)
    known = labels >= 0
    if output_of.tolist() == list(range(classes)):
        assert found is None
        return
    assert [found.order[output] for output in output_of] == list(range(classes))
    assert found.accuracy == pytest.approx((logits.argmax(1) == labels)[known].mean())
    assert found.accuracy_in_order == pytest.approx((told == labels)[known].mean())
    counts = np.bincount(labels[known])
    assert found.share == pytest.approx(counts.max() / known.sum())
    assert found.majority == names[counts.argmax()]


@pytest.mark.parametrize(("told", "order"), [((1, 1), [1, 0, 2, 3]), ((9, 9), [1, 0, 3, 2])])
def test_pairs_that_chance_alone_would_swap_stay(told, order):
    """a and b are swapped beyond doubt; c and d are mostly taken for a, and by some for each
    other."""
    confusion = np.array([[0, 40, 0, 0], [40, 0, 0, 0], [20, 0, 0, told[0]], [20, 0, told[1], 0]])
    labels, outputs = (np.repeat(at.ravel(), confusion.ravel()) for at in np.indices((4, 4)))
    found = label_doubt(np.eye(4)[outputs], labels, ["a", "b", "c", "d"])
    assert found.order == order


@given(st.integers(4, 8), st.integers(0, 10_000))
def test_an_expert_of_half_the_classes_is_not_in_doubt(classes, seed):
    """It takes the others' examples for its own classes, now and then for another's."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), 40)
    mine = labels < classes // 2
    own, any_class = (
        draw.integers(classes // 2, size=len(labels)),
        draw.integers(classes, size=len(labels)),
    )
    others = np.where(draw.random(len(labels)) < 0.8, own, any_class)
    told = np.where(mine & (draw.random(len(labels)) < 0.9), labels, others)
    assert (
        label_doubt(np.eye(classes)[told], labels, [str(name) for name in range(classes)]) is None
    )


def test_a_teacher_that_knows_nothing_has_no_better_order():
    labels = np.array([0] * 60 + [1] * 20 + [2] * 20)
    found = label_doubt(np.eye(3)[np.tile([1, 2], 50)], labels, LABELS)
    assert found.order is None and found.majority == "a"
    same = label_doubt(np.eye(3)[np.zeros(100, int)], labels, LABELS)
    assert same.is_worthless and same.order is None, "it is that answer"
    assert label_doubt(np.eye(3), np.full(3, -1), LABELS) is None, "nothing is labelled"


def recipe_of(teacher, evaluates, **task):
    phases = [{"evaluate": {"task": one} if one else {}} for one in evaluates]
    models = {"teachers": {"t": teacher}, "student": {"model": "m"}}
    return Recipe.model_validate({"name": "toy", **models, "phases": phases, **task})


@pytest.mark.parametrize("names", [["x", "y"], ["LABEL_0", "LABEL_1"]])
def test_a_teacher_with_labels_of_another_task_has_no_head_of_this_one(names, tmp_path):
    """An evaluation leaves it out, also where the checkpoint's own names would do."""
    config = tr.BertConfig(id2label=dict(enumerate(names)))
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    tasks = {task: {"data": {"path": "data"}} for task in ("moods", "topics")}
    labels = dict(zip(names, ("bad", "good"), strict=True))
    recipe = recipe_of({"model": str(tmp_path), "labels": labels}, [*tasks], tasks=tasks)
    found = {}
    for task, own in (("moods", ["good", "bad"]), ("topics", ["news", "sports"])):
        run = Run.__new__(Run)  # a whole one opens data
        run.recipe, run.task_name, run.labels = recipe, task, own
        run.task = recipe.tasks_by_name[task]
        reference = run.reference("t", 0)
        found[task] = with_head(run, reference), reference.label_map is not None
    assert found == {"moods": (True, True), "topics": (False, False)}


@pytest.mark.parametrize(
    ("kinds", "is_trained"),
    [
        ([], True),
        (["BertForSequenceClassification"], True),
        (["BertForMaskedLM", "BertForSequenceClassification"], True),
        (["BertForMaskedLM"], False),
    ],
)
def test_a_teacher_has_a_trained_head_by_its_configuration(kinds, is_trained):
    config = tr.BertConfig(architectures=kinds)
    if is_trained:
        check_head("m", config, TASKS["single-label"])
        return
    with pytest.raises(UserError, match="holds BertForMaskedLM, which is no trained"):
        check_head("m", config, TASKS["single-label"])


@pytest.mark.parametrize(
    ("task", "stated", "refused", "noted"),
    [
        ("single-label", None, None, None),
        ("single-label", "single_label_classification", None, None),
        ("single-label", "multi_label_classification", None, "a sigmoid for each label"),
        ("single-label", "regression", "outputs are numbers", None),
        ("multi-label", None, None, "does not say what its outputs are"),
        ("multi-label", "multi_label_classification", None, None),
        ("multi-label", "single_label_classification", "one softmax over all labels", None),
        ("multi-label", "regression", "outputs are numbers", None),
        ("token-classification", "single_label_classification", None, None),
    ],
)
def test_what_a_teachers_outputs_are_its_configuration_says(task, stated, refused, noted):
    config = tr.BertConfig(id2label=dict(enumerate(["bad", "good"])), problem_type=stated)
    if refused is not None:
        with pytest.raises(UserError, match=f"problem_type={stated}.*{refused}.*set problem_type="):
            check_head("m", config, TASKS[task])
        return
    check_head("m", config, TASKS[task])
    recipe = recipe_of({"model": "m"}, [None], task={"type": task, "data": {"path": "data"}})
    notes = label_notes(recipe, "task", ["bad", "good"], {"t": config})
    assert (notes == []) if noted is None else (len(notes) == 1 and noted in notes[0])
