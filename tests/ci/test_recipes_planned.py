"""The built-in recipes, planned."""

import re

import pytest
import transformers as tr
from passes import untraced

from ds_distill.errors import UserError
from ds_distill.planning.facts import SplitFacts
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.planner import Planner
from ds_distill.planning.table import plan_text
from ds_distill.recipe import builtin_recipes, load_recipe

LIVE_ALONE = {
    *("adapt-and-distill", "compact-biobert", "distil-biobert", "distilbert", "minilm", "minilmv2"),
    *("mobilebert", "tiny-biobert", "tinybert", "vekd", "vekd-da", "vekd-large"),
}
"""Recipes whose losses read of the teachers what no cache holds."""


@pytest.mark.parametrize("name", builtin_recipes())
def test_each_recipe_is_planned_live_and_cached(name, monkeypatch, tmp_path):
    """Answered, or refused in a sentence: some ended in tracebacks. Sizes alone, for one GPU."""
    untraced(monkeypatch)
    module = "ds_distill.planning.facts"
    monkeypatch.setattr(f"{module}.split_facts", lambda r, t, split: SplitFacts(split, 1000, 20.0))
    monkeypatch.setattr(f"{module}.Facts.chosen", lambda *given: 500)
    names = {n for n, phase in load_recipe(name).named_phases() if phase.kind == "distil"}
    more = []
    if name == "mobilebert":  # its teacher is a user's own
        tr.MobileBertConfig().save_pretrained(tmp_path)
        more = [f"teachers.ib-bert.model={tmp_path}"]

    def planned(teachers):
        given = [f"phases.{n}.teachers={teachers}" for n in names]
        plan = Planner(load_recipe(name, [*more, *given]), GPUS["h100"], 1).plan()
        assert plan_text(plan, every=True).count("\nPhase ") == len([*plan.jobs, *plan.caches])
        assert {one.chosen.choice.teachers for one in plan.jobs if one.phase in names} <= {teachers}
        return plan

    pays = {one.phase for one in planned("live").break_even}
    if name not in LIVE_ALONE:
        assert pays == names == {one.phase for one in planned("cached").break_even}
        return
    with pytest.raises(UserError) as refusal:
        planned("cached")
    for mistake in map(str, refusal.value.mistakes):
        told = {*re.findall(r"phases\.([\w-]+)", mistake)} & names  # once of several phases
        said = "Add - cache" if told & pays else "no cache holds|vocabulary was expanded"
        assert told
        assert re.search(said, mistake)
