"""Which student is shipped, what chooses it, and what the run reports about it."""

import itertools

import pytest

from ds_distill.check.check import trained_on_what_chooses
from ds_distill.phases.evaluate import models_to_evaluate
from ds_distill.recipe.lineage import trained_on
from ds_distill.recipe.schema import Recipe
from ds_distill.reporting.results import uses
from ds_distill.run.publish import choose_student

LOSSES = {"losses": {"kl": {}}}


def recipe_of(*phases, **task):
    return Recipe.model_validate(
        {
            "name": "a-run",
            "task": {"data": {"path": "data"}, **task},
            "teachers": {"t": {"model": "m"}, "u": {"model": "m"}},
            "student": {"model": "m"},
            "phases": list(phases),
        }
    )


CHOOSING = {"split": "validation", "examples": 40, "metric": "accuracy"}


def record_of(kind, scores, *, split="train", keep="best"):
    """scores: by model, on the examples that choose; None without any."""
    trained = [
        {
            "output": name,
            "split": split,
            "examples": 500,
            "choosing": score and {**CHOOSING, "keep": keep, "score": score},
        }
        for name, score in scores.items()
    ]
    return {"kind": kind, "trained": trained}


THREE = {"distil": {"routing": ["average", "random", "ca-mkd"], **LOSSES}}
CONTROL = {"fine-tune": {"models": "student", "save_as": "control"}}


@pytest.mark.parametrize("accuracies", list(itertools.permutations((0.5, 0.6, 0.7))))
def test_the_best_distilled_student_is_shipped(accuracies):
    by_name = dict(zip(("average", "random", "ca-mkd"), accuracies, strict=True))
    records = [record_of("distil", by_name), record_of("fine-tune", {"control": 0.9})]
    best = max(by_name, key=by_name.get)
    assert choose_student(recipe_of(THREE, CONTROL), records) == (0, best)


def test_of_equals_the_first_and_without_choosing_examples_the_last():
    recipe = recipe_of(THREE)
    equal = dict.fromkeys(("average", "random", "ca-mkd"), 0.5)
    assert choose_student(recipe, [record_of("distil", equal)]) == (0, "average")
    none = dict.fromkeys(equal)
    assert choose_student(recipe, [record_of("distil", none)]) == (0, "ca-mkd")
    assert choose_student(recipe_of({"evaluate": {}}), [{"kind": "evaluate"}]) is None
    control = recipe_of(CONTROL)
    assert choose_student(control, [record_of("fine-tune", {"control": 0.4})]) == (0, "control")


CHAIN = [
    {"distil": {"name": "general", "save_as": "general", **LOSSES}},
    {"fine-tune": {"models": "general", "save_as": "adapted"}},
]


@pytest.mark.parametrize(
    ("phases", "student"),
    [
        (CHAIN, "adapted"),  # a student that goes on alone, and was the baseline of itself
        ([*CHAIN, {"distil": {"follow": "t", "start": "adapted", **LOSSES}}], "student"),
        ([*CHAIN, CONTROL], "adapted"),
        ([{"fine-tune": {"models": "student"}}, {"fine-tune": {"models": "t"}}], "student"),
        ([{"fine-tune": {"models": ["t", "u"]}}], "u"),
    ],
)
def test_what_goes_on_from_a_distilled_student_is_one(phases, student):
    """It counted as a control, and the step before it was shipped."""
    records = [
        record_of("any", dict.fromkeys(phase.outputs)) for phase in recipe_of(*phases).phases
    ]
    assert choose_student(recipe_of(*phases), records)[1] == student
    roles = models_to_evaluate(recipe_of(*phases, {"evaluate": {}}), len(phases))
    distils = any("distil" in phase for phase in phases)
    assert student == "u" or roles[student] == ("student" if distils else "control")
    assert roles.get("control", "control") == "control"


def test_the_student_that_a_recipe_names_is_shipped_whatever_chooses():
    names = ("average", "random", "ca-mkd")
    records = [
        record_of("distil", dict.fromkeys(names, 0.5)),
        record_of("fine-tune", {"control": 0.9}),
    ]
    for name, number in [*dict.fromkeys(names, 0).items(), ("control", 1)]:
        recipe = recipe_of(THREE, CONTROL).model_copy(update={"ships": name})
        assert choose_student(recipe, records) == (number, name)
        of = [one["of"] for one in uses(recipe, records) if one["use"] == "choose"]
        assert of and all("student to ship" not in one for one in of)


@pytest.mark.parametrize(("metric", "best"), [("macro_f1", "random"), ("ece", "average")])
def test_the_tasks_metric_says_what_is_best(metric, best):
    """ca-mkd has no score: its training had no choosing examples."""
    records = [record_of("distil", {"average": 0.2, "random": 0.3, "ca-mkd": None})]
    assert choose_student(recipe_of(THREE, metric=metric), records) == (0, best)


ON_VALIDATION = {"distil": {"split": "validation", "save_as": "cheat", **LOSSES}}
HONEST = {"distil": {"split": "train", "save_as": "honest", **LOSSES}}


def test_a_student_trained_on_what_chooses_ships_only_alone():
    cheat, honest = record_of("distil", {"cheat": 0.99}), record_of("distil", {"honest": 0.6})
    assert choose_student(recipe_of(ON_VALIDATION, HONEST), [cheat, honest]) == (1, "honest")
    assert choose_student(recipe_of(HONEST, ON_VALIDATION), [honest, cheat]) == (0, "honest")
    assert choose_student(recipe_of(ON_VALIDATION), [cheat]) == (0, "cheat")
    controls = [
        {"fine-tune": {"models": "student", "save_as": name, "split": split}}
        for name, split in (("cheat", "validation"), ("honest", "train"))
    ]
    records = [record_of("fine-tune", {"cheat": 0.99}), record_of("fine-tune", {"honest": 0.5})]
    assert choose_student(recipe_of(*controls), records) == (1, "honest")


def test_what_starts_from_a_model_trained_on_a_split_counts_as_trained_on_it():
    recipe = recipe_of(
        {"fine-tune": {"models": ["t", "u"]}},
        {"fine-tune": {"models": "student", "save_as": "seen", "split": "validation"}},
        {"distil": {"start": "seen", "save_as": "heir", **LOSSES}},
        HONEST,
        {"fine-tune": {"models": "heir", "save_as": "grandchild"}},
    )
    assert trained_on(recipe, "task", "validation") == ["seen", "heir", "grandchild"]
    assert trained_on(recipe, "task", "test") == []
    [note] = trained_on_what_chooses(recipe)
    assert note.startswith("seen, heir, grandchild are trained on split 'validation'")
    assert trained_on_what_chooses(recipe_of(THREE, CONTROL)) == []


def test_uses_are_named_with_what_spoils_them():
    recipe = recipe_of(
        {"fine-tune": {"models": "t"}},
        {"expertise": {"split": "validation"}},
        {"distil": {"routing": ["average", "gate"], "keep": "last", **LOSSES}},
        {"fine-tune": {"models": "student", "save_as": "control", "split": "validation"}},
        {"evaluate": {"split": "validation"}},
        {"evaluate": {"split": "test"}},
    )
    judged = {name: {"examples": 70} for name in ("t", "average")}
    records = [
        record_of("fine-tune", {"t": 0.5}),
        {"kind": "expertise", "split": "validation", "examples": 60},
        record_of("distil", {"average": 0.5, "gate": 0.6}, keep="last"),
        record_of("fine-tune", {"control": 0.9}, split="validation"),
        {"kind": "evaluate", "split": "validation", "models": judged},
        {"kind": "evaluate", "split": "test", "models": judged},
    ]
    found = [
        (row["use"], row["split"], row["examples"], row["of"], len(row["warnings"]))
        for row in uses(recipe, records)
    ]
    assert found == [
        ("train", "train", 500, ["t", "average", "gate"], 0),
        ("train", "validation", 500, ["control"], 0),
        ("fit", "validation", 60, ["routing, and which policy it follows"], 1),
        ("choose", "validation", 40, ["epoch of t", "epoch of control", "student to ship"], 1),
        ("judge", "validation", 70, ["t", "average"], 2),
        ("judge", "test", 70, ["t", "average"], 0),
    ]
