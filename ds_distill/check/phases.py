"""Which phases a recipe may have, in which order. Each rule yields its mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from ds_distill.check.masked_lm import codec_mistakes, masked_lm_mistakes
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Cache, Distil, Expertise, FineTune, Routing
from ds_distill.recipe.schema import MaskedLM


def name_mistakes(recipe: Recipe) -> Iterator[str]:
    """Models of the same name."""
    if "student" in recipe.teachers:
        yield "teachers.student: `student` names the student. Rename the teacher."
    for number, output in recipe.trained_models():
        phase = recipe.phases[number]
        retrained = isinstance(phase, FineTune) and not phase.save_as
        if output in recipe.teachers and not retrained:
            yield (
                f"phases.{recipe.phase_names()[number]}: its model would be called {output!r}, and "
                "a teacher has that name. Choose another with save_as, or rename the teacher."
            )


def phase_mistakes(recipe: Recipe) -> Iterator[str]:
    """What each phase needs of the recipe and of the phases before it. A phase with a mistake
    counts as mended for those after it."""
    known = {"student", *recipe.teachers}
    cached: dict[str, Cache] = {}  # split -> the cache phase that holds it
    holes = False  # whether a cache phase lists no split, so that it could be the one asked for
    measured: Expertise | None = None
    states_read = False  # whether the gate that was learnt last reads states
    masked_lm = isinstance(recipe.task, MaskedLM)
    for name, phase in zip(recipe.phase_names(), recipe.phases, strict=True):
        location = f"phases.{name}"
        yield from _empty_lists(phase, location)
        if masked_lm:
            yield from masked_lm_mistakes(recipe, phase, location)
        if isinstance(phase, Distil | Cache | Expertise) and not recipe.teachers:
            yield f"{location}: the recipe has no teachers. Add teachers: {{NAME: ...}}."
        if isinstance(phase, FineTune):
            for model in phase.models:
                if model not in known:
                    yield (
                        f"{location}.models: no model {model!r} here. There are: "
                        f"{', '.join(sorted(known))}."
                    )
            if set(phase.outputs) & set(recipe.teachers):
                cached, measured = {}, None
            known |= set(phase.outputs)
        elif isinstance(phase, Expertise):
            measured = phase
            held = cached.get(phase.split)
            states_read = phase.states and (held is None or -1 in held.hidden)
        elif isinstance(phase, Cache):
            cached |= dict.fromkeys(phase.splits, phase)
            holes |= not phase.splits
        elif isinstance(phase, Distil):
            if phase.start not in known:
                yield (
                    f"{location}.start: no model {phase.start!r} before this phase. There are: "
                    f"{', '.join(sorted(known))}."
                )
            known |= set(phase.outputs)
            if not recipe.teachers:
                continue
            if phase.split in cached or not holes:
                yield from _cached_mistakes(recipe, phase, location, cached)
            for routing in phase.routing:
                if not (masked_lm and routing.needs_expertise):  # told above
                    yield from _routing_mistakes(
                        phase, routing, location, cached, measured, states_read
                    )


def _empty_lists(phase: object, location: str) -> Iterator[str]:
    lists: dict[str, list[str]] = {}
    if isinstance(phase, FineTune):
        lists["models"] = phase.models
        if phase.focus is not None:
            lists["focus.classes"] = phase.focus.classes
    elif isinstance(phase, Cache):
        lists["splits"] = phase.splits
    for key, items in lists.items():
        if not items:
            yield f"{location}.{key}=[]: the list is empty. Name at least one."
        for item in dict.fromkeys(items):
            if items.count(item) > 1:
                yield f"{location}.{key}: {item!r} stands twice. Keep it once."


def _cached_mistakes(
    recipe: Recipe, phase: Distil, location: str, cached: dict[str, Cache]
) -> Iterator[str]:
    """What a phase that trains from a cache needs in it."""
    if phase.teachers != "cached":
        return
    if phase.split not in cached:
        yield (
            f"{location}: teachers=cached, and no cache phase before it holds the signals of "
            f"the teachers, as they are then, on split {phase.split!r}. Add - cache: {{splits: "
            f"{phase.split}}} before it (after the last fine-tuning of a teacher), or set "
            "teachers=live."
        )
        return
    if phase.losses.hidden_mse and -1 not in cached[phase.split].hidden:
        yield (
            f"{location}.losses.hidden_mse: needs the last layer's states, and the cache of split "
            f"{phase.split!r} keeps logits alone. Set hidden: [-1] in its cache phase, or "
            f"{location}.teachers=live."
        )
    if isinstance(recipe.task, MaskedLM):
        yield from codec_mistakes(recipe, phase, location, cached[phase.split].codec)


def _routing_mistakes(
    phase: Distil,
    routing: Routing,
    location: str,
    cached: dict[str, Cache],
    measured: Expertise | None,
    states_read: bool,
) -> Iterator[str]:
    if routing.needs_expertise and measured is None:
        yield (
            f"{location}.routing: {routing.policy} needs what an expertise phase learns of the "
            "teachers as they are then. Add - expertise: {split: validation} before it (after "
            "the last fine-tuning of a teacher)."
        )
    elif (
        routing.may_read_states
        and states_read
        and phase.teachers == "cached"
        and phase.split in cached
        and -1 not in cached[phase.split].hidden
    ):
        may = "reads" if routing.policy == "gate" else "may choose the gate, which reads"
        yield (
            f"{location}.routing: {routing.policy} {may} the teachers' last states, and the cache "
            f"of split {phase.split!r} keeps logits alone. Set hidden: [-1] in its cache "
            "phase, or states: false in the expertise phase for a gate of logits."
        )
