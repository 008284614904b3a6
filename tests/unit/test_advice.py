"""Which placement of teachers a plan's first line says to take."""

from dataclasses import replace

import pytest
from passes import untraced

from ds_distill.planning.facts import SplitFacts
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.memory import States
from ds_distill.planning.plan import BreakEven, Choice, JobPlan, Placement, Plan
from ds_distill.planning.planner import Planner
from ds_distill.planning.table import advice, plan_text
from ds_distill.planning.times import StepTime
from ds_distill.planning.units import GIB
from ds_distill.recipe import load_recipe


def placement(stage, teachers, gib, seconds):
    states, step = States(round(gib * GIB)), StepTime(student=seconds)
    choice = Choice(stage, teachers, checkpointing=False)
    return Placement(choice, states, 0, 0, 0, 1, step, seconds, usable=10 * GIB)


def plan(whole, sharded, passes, in_recipe=7):
    """Of so many GiB, where the recipe has sharded teachers."""
    ways = [
        placement(1, "live", whole, 0.2),
        placement(2, "live", whole - 1, 0.3),
        placement(3, "live", sharded, 1.0),
        placement(1, "cached", 2.0, 0.1),
        placement(3, "cached", 1.0, 0.4),
    ]
    split = SplitFacts("train", 100, 10.0)
    job = JobPlan("distil", ["student"], 4, 2, 16, split, 50, ways[2], ways)
    pays = BreakEven("distil", passes * (1.0 - 0.4), 1.0, 0.4, in_recipe)
    return Plan("mine", GPUS["l4"], 8, [], [job], [], [pays])


EACH = (
    "whole teachers on each GPU (stage 1): 200.0 ms a step, 8.0 GiB; sharded teachers (stage 3): "
    "1.0 s a step, 3.0 GiB; cached teachers (stage 1): 100.0 ms a step, 2.0 GiB."
)


@pytest.mark.parametrize(
    ("whole", "sharded", "passes", "expected"),
    [
        (8.0, 3.0, 1.0, f"take cached teachers, at stage 1. {EACH}"),
        # 1.5 passes with the recipe's way are 9 with the fastest live one: (1 - 0.4) / (0.2 - 0.1).
        (
            *(8.0, 3.0, 1.5),
            f"take whole teachers on each GPU, at stage 1, because a cache does not pay. {EACH}",
        ),
        (10.5, 3.0, 9.0, "take whole teachers on each GPU, at stage 2, because a cache does not"),
        (30.0, 3.0, 12.0, "take sharded teachers, at stage 3, because a cache does not pay."),
        (30.0, 20.0, 9.0, "take cached teachers, at stage 1. whole teachers on each GPU (stage 2)"),
    ],
)
def test_what_to_take(whole, sharded, passes, expected):
    first, *_ = plan_text(plan(whole, sharded, passes)).splitlines()
    assert first.startswith(f"distil: {expected}")


def test_where_nothing_fits():
    large = plan(30.0, 20.0, 1.0)
    job = large.jobs[0]
    others = [replace(one, usable=GIB // 2) for one in job.others]
    nothing = replace(large, jobs=[replace(job, others=others)])
    [line] = advice(nothing)
    assert line.startswith("distil: nothing fits. Take larger GPUs")
    assert line.count("which does not fit") == 3


def test_a_recipe_without_teachers_has_no_advice():
    made = plan(8.0, 3.0, 1.0)
    alone = replace(made.jobs[0].chosen.choice, teachers=None)
    job = replace(made.jobs[0], chosen=replace(made.jobs[0].chosen, choice=alone))
    assert list(advice(replace(made, jobs=[job], break_even=[]))) == []


def test_no_cache_is_advised_where_none_can_be_read(monkeypatch):
    """As of a student that knows more words than its teacher, which are planned, too."""
    untraced(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = Planner(load_recipe("vekd"), GPUS["h100"], 8).plan()
    lines = [*advice(found)]
    assert len(lines) == 2 and not any("cache" in line for line in lines)
    grown, given = found.jobs
    rows = (60000 - 30522) * 768
    assert grown.chosen.states.total - given.chosen.states.total > 2 * rows
