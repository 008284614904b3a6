"""Which cache a phase that follows models can read, against a plain walk that numbers each model's
weights."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ds_distill.check.phases import phase_mistakes
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import validate

NAMES = ("a", "b", "made")
FOLLOWS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True) | st.none()
PHASES = st.lists(
    st.tuples(st.just("fine-tune"), st.sampled_from(NAMES))
    | st.tuples(st.sampled_from(["cache", "distil"]), FOLLOWS),
    max_size=8,
)


def recipe_of(phases: list[tuple[str, Any]]) -> Any:
    model = {"model": "some/model"}
    made = [{"fine-tune": {"models": "student", "save_as": "made"}}]
    for kind, of in phases:
        if kind == "fine-tune":
            made.append({kind: {"models": of, "save_as": of}})
        elif kind == "cache":
            made.append({kind: {"splits": "train", "follow": of}})
        else:
            settings = {"teachers": "cached", "losses": {"kl": {}}, "follow": of}
            made.append({kind: {**settings, "save_as": f"student-{len(made)}"}})
    return validate(
        Recipe,
        {
            "name": "follow",
            "task": {"data": {"path": "data"}},
            "teachers": {"a": model, "b": model},
            "student": model,
            "phases": made,
        },
    )


@given(phases=PHASES)
def test_a_cache_is_read_while_its_teachers_are_as_they_were(
    phases: list[tuple[str, Any]],
) -> None:
    recipe = recipe_of(phases)
    versions = dict.fromkeys(NAMES, 0)
    caches: list[dict[str, int]] = []
    wanted = []
    for number, (kind, of) in enumerate(phases, 1):
        names = of if isinstance(of, list) else ["a", "b"]
        if kind == "fine-tune":
            versions[of] += 1
        elif kind == "cache":
            caches.append({name: versions[name] for name in names})
        elif not any(all(cache.get(n) == versions[n] for n in names) for cache in caches):
            wanted.append(recipe.phase_names()[number])
    found = [
        mistake.at.removeprefix("phases.")
        for mistake in phase_mistakes(recipe)
        if "no cache phase before it holds" in mistake.what
    ]
    assert found == wanted
