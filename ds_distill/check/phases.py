"""What is wrong across phases: whether each finds what it and its parts need. What else is wrong
with a part it says itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from ds_distill.errors import Mistake, UserError
from ds_distill.files import why_unwritable
from ds_distill.recipe import Recipe
from ds_distill.recipe.codecs import CODECS
from ds_distill.recipe.lineage import Step, steps
from ds_distill.recipe.part import Part
from ds_distill.recipe.phases import Cache, Expertise, PhaseSettings
from ds_distill.recipe.policies import Routing
from ds_distill.recipe.tasks import TaskSettings
from ds_distill.recipe.terms import LayeredTerm, RowTerm, SoftenedTerm


def phase_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """What is wrong with each phase, without what only follows from another mistake."""
    for step in steps(recipe):
        yield from _mistakes_of(step.phase, step)


def _mistakes_of(phase: PhaseSettings, here: Step) -> Iterator[Mistake]:
    yield from _list_mistakes(phase, here.location)
    yield from phase.mistakes(here)
    unmet = list(_unmet(phase, here, "Take the phase out."))
    yield from unmet
    if not unmet:
        yield from _part_mistakes(phase, here)
    yield from file_mistakes(phase, here)
    yield from _other_heads(phase, here)


def _other_heads(phase: PhaseSettings, context: Step) -> Iterator[Mistake]:
    """Teachers that run with the head of another task. An evaluation leaves them out. With tasks of
    words they may know some of the tags, which their labels tell."""
    if not phase.runs_teachers or phase.makes == "evaluation":
        return
    for teacher in context.teachers:
        head = context.model(teacher).head or context.task_name
        if not context.recipe.takes_head(context.task_name, head):
            yield Mistake(
                context.location,
                f"runs teacher {teacher!r} on task {context.task_name!r}, and "
                f"a phase before has trained it on task {head!r}, whose head it has now. Train it "
                f"on {context.task_name!r} last, or give the trained model another name with "
                "save_as.",
            )


def _list_mistakes(phase: PhaseSettings, location: str) -> Iterator[Mistake]:
    for key, items in phase.lists().items():
        if not items:
            yield Mistake(f"{location}.{key}=[]", "the list is empty. Name at least one.")
        for item in dict.fromkeys(items):
            if items.count(item) > 1:
                yield Mistake(f"{location}.{key}", f"{item!r} stands twice. Keep it once.")


def _unmet(part: Part, context: Step, remedy: str) -> Iterator[Mistake]:
    """The first of a part's needs that the recipe as a whole does not meet.

    remedy: what to do where the part is for other kinds of task.
    """
    needs, location, name = part.all_needs(), context.location, part.part_name
    count, whose = len(context.teachers), "the phase follows"
    if set(context.teachers) == set(context.recipe.teachers):
        whose = "the recipe has"
    if (why := context.task.lacks(needs)) is not None:
        task = context.task
        yield Mistake(
            location,
            f"{name} {why[0]}, and {task.location}.type={task.type} {why[1]}. {remedy}",
        )
    elif count == 0 < needs.teachers:
        yield Mistake(location, "the recipe has no teachers. Add teachers: {NAME: ...}.")
    elif count < needs.teachers:
        yield Mistake(
            location,
            f"{name} needs at least {needs.teachers} teachers, and {whose} "
            f"{count}. Add one to teachers, or take it out.",
        )
    elif needs.at_most is not None and count > needs.at_most:
        yield Mistake(
            location,
            f"{name} takes at most {needs.at_most} teacher(s), and {whose} "
            f"{count}. Take one out, or {name}.",
        )
    elif needs.expertise and whose == "the phase follows":
        yield Mistake(
            location,
            f"{name} needs what an expertise phase learns of the recipe's "
            f"teachers, and the phase follows {', '.join(context.teachers)}. Take follow out, or "
            f"{name}.",
        )
    elif needs.expertise and context.expertise is None:
        yield Mistake(
            location,
            f"{name} needs what an expertise phase learns of the teachers as "
            "they are then. Add - expertise: {split: validation} before it (after the last "
            "fine-tuning of a teacher).",
        )
    elif needs.expertise and context.phase.followed is not None:
        fits = context.expertise
        if fits is not None and fits.phase.leaves_out_teachers:
            yield Mistake(
                location,
                f"{name} is fitted on the teachers that phases.{fits.name} "
                "leaves, and the phase follows those of the recipe, whoever was left out. Take "
                f"follow out, or leave_out of phases.{fits.name}.",
            )


def _part_mistakes(phase: PhaseSettings, context: Step) -> Iterator[Mistake]:
    """Mistakes of the parts that a phase uses, and of those with the cache that it reads."""
    split, held = phase.cached_split, None
    if split is not None:
        held = context.held(split)
        live = any(part.all_needs().live_teachers for _, part in phase.parts())
        if held is None and not context.may_be_cached and not live:
            yield Mistake(
                context.location,
                "teachers=cached, and no cache phase before it holds the "
                f"signals of the teachers, as they are then, on split {split!r}. Add - cache: "
                f"{{splits: {split}}} before it (after the last fine-tuning of a teacher), or set "
                "teachers=live.",
            )
    mixed, of_tokens = len(context.teachers) > 1, []
    for key, part in phase.parts():
        here = context.at(f"{context.location}.{key}")
        needs = part.all_needs()
        if needs.teachers and not phase.runs_teachers:
            yield Mistake(
                here.location,
                f"{part.part_name} needs teachers, and a {phase.kind} phase runs "
                "none. Take it out, or use it in a distil phase.",
            )
            continue
        unmet = list(_unmet(part, here, _remedy(part, phase, context.task)))
        yield from unmet
        if not unmet and split is not None:
            if needs.live_teachers:
                yield Mistake(
                    here.location,
                    "reads of the teachers what no cache holds. Set "
                    f"{context.location}.teachers=live.",
                )
            elif held is not None:
                yield from _cache_mistakes(part, here, held, split, context.location)
        if not unmet:
            yield from part.mistakes(here)
        mixed |= isinstance(part, Routing) and not part.keeps_lone_teacher
        if needs.every_token and not unmet:
            of_tokens.append(here.location)
    if mixed:
        yield from (_of_mixed_tokens(location, context) for location in of_tokens)


def _remedy(part: Part, phase: PhaseSettings, task: TaskSettings) -> str:
    """What to do about a part that is for other kinds of task: name those of its own that are for
    this one."""
    if isinstance(part, RowTerm) and task.lacks(part.needs) is None:
        return f"Leave {part.part_name}.rows out."
    others = [
        name
        for name, other in part.table.items()
        if task.lacks(other.needs) is None
        and (phase.runs_teachers or not other.needs.teachers)
        and getattr(other, "moves_student", True)
    ]
    if not others:
        return f"Take {part.part_name} out."
    return f"Choose {' or '.join(filter(None, (', '.join(others[:-1]), others[-1])))}."


def _cache_mistakes(
    part: Part, context: Step, held: Cache, split: str, phase: str
) -> Iterator[Mistake]:
    """What a part reads and the cache does not hold.

    held: the cache phase that holds the split. phase: the location of the phase that reads it.
    """
    location, needs = context.location, part.all_needs()
    if isinstance(part, LayeredTerm) and part.cached_layers() is None:
        yield Mistake(
            f"{location}.layers={part.layers}",
            "the teachers' depths tell which layers "
            "these are, and a cache has its layers by number. Name pairs, "
            f"{{STUDENT: TEACHER}}, or set {phase}.teachers=live.",
        )
    missing = [layer for layer in needs.states if layer not in held.hidden]
    if missing:
        yield Mistake(
            location,
            "needs the teachers' hidden states of layer(s) "
            f"{', '.join(map(str, missing))}, and the cache of split {split!r} does not hold them. "
            f"Set hidden: {sorted({*missing, *held.hidden})} in its cache phase, or "
            f"{phase}.teachers=live.",
        )
    if needs.fitted_states and context.fitted_states and -1 not in held.hidden:
        reads = "reads" if part.runs else "may choose the gate, which reads"
        yield Mistake(
            location,
            f"{part.part_name} {reads} the teachers' last states, and the cache of split "
            f"{split!r} holds logits alone. Set hidden: [-1] in its cache phase, or states: false "
            "in the expertise phase for a gate of logits.",
        )
    if context.task.predicts != "token":  # logits of classes, and numbers, are stored as they are
        return
    codec = held.codec
    if codec.keeps_logits:
        return
    stored = f"the cache holds distributions with codec {codec.name!r}"
    if isinstance(part, SoftenedTerm) and part.temperature != held.codec.temperature:
        yield Mistake(
            f"{location}.temperature={part.temperature}",
            f"{stored} at temperature "
            f"{held.codec.temperature}. Set codec.temperature in the cache phase to the same.",
        )
    if needs.logits:
        yield Mistake(
            location,
            f"needs the teacher's logits, and {stored}. Set codec: {{name: "
            f"{_that_keep_logits()}}} in the cache phase, or teachers=live.",
        )


def _of_mixed_tokens(location: str, context: Step) -> Mistake:
    """What mixes teachers reads their logits: of every token they are [tokens, vocabulary] of each,
    which a lone teacher's never are."""
    count = len(context.teachers)
    whose = f"{count} teachers are mixed" if count > 1 else "the policy weighs the teacher"
    return Mistake(
        location,
        f"counts every token of a text, and {whose} by logits of every token over the whole "
        f"vocabulary. Name one teacher, {context.location}.follow: [NAME], without a routing, or "
        "count masked tokens alone, where the term has `rows`.",
    )


def _that_keep_logits() -> str:
    return " or ".join(name for name, codec in CODECS.items() if codec.keeps_logits)


def file_mistakes(phase: PhaseSettings, context: Step) -> Iterator[Mistake]:
    """Phases that train such a teacher, read its states or attention, or have a task of which it
    can say nothing."""
    files = context.recipe.from_files
    for name in phase.starts:
        if name in files:
            yield Mistake(
                context.location,
                f"trains {name!r}, of which there is a file of predictions and "
                "no model. Name a teacher with a model, or the student.",
            )
    asked = [name for name in context.teachers if name in files] if phase.runs_teachers else []
    if not asked:
        return
    whose = f"teacher {asked[0]!r} is a file of predictions"
    task = context.task
    if len(context.recipe.tasks_by_name) > 1:
        yield Mistake(
            f"teachers.{asked[0]}.predictions", "a file is of one task, and the recipe has several."
        )
    if not has_files(task):
        yield Mistake(
            f"teachers.{asked[0]}.predictions",
            f"phase {context.name!r} is of "
            f"{task.location}.type={task.type}, and a file is read for texts or words with "
            "labels, and for numbers. Give a model.",
        )
        return
    if isinstance(phase, Expertise) and phase.states:
        yield Mistake(
            f"{context.location}.states",
            f"lets the gate read the teachers' states, and {whose}, "
            f"which has none. Set {context.location}.states=false.",
        )
    if isinstance(phase, Cache) and phase.hidden:
        yield Mistake(
            f"{context.location}.hidden",
            f"keeps the teachers' states, and {whose}, which has none. "
            f"Take hidden out, or leave the teacher out with {context.location}.follow=[NAME].",
        )
    for key, part in phase.parts():
        needs = part.all_needs()
        if needs.states or needs.live_teachers:
            yield Mistake(
                f"{context.location}.{key}",
                f"reads the teachers' states or attention, and {whose}, "
                f"which has none. Take {part.part_name} out, or leave the teacher out with "
                f"{context.location}.follow=[NAME].",
            )


def has_files(task: TaskSettings) -> bool:
    """Whether files are read for such tasks."""
    return task.rows != "question" and task.predicts != "token"


def shared_cache_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """One for each cache phase whose folder cannot be written, or holds a teacher's signals of
    another max_length. What else they depend on is known when the teachers are trained."""
    for step in steps(recipe):
        phase = step.phase
        if not isinstance(phase, Cache) or phase.is_left_out(recipe.phases[step.number + 1 :]):
            continue
        if phase.shared is not None:
            encoders = [name for name in step.teachers if name not in recipe.from_files]
            length = recipe.task_of(phase).max_length
            for why in _folder_mistakes(phase.shared, encoders, length):
                yield Mistake(f"phases.{step.name}.folder={phase.folder}", why)


def _folder_mistakes(folder: Path, teachers: Collection[str], max_length: int) -> Iterator[str]:
    if folder.is_dir() and any(folder.iterdir()):
        # Only here: it imports torch, without which `check` takes a third of the time.
        from ds_distill.cache.build import known_teachers
        from ds_distill.cache.format import check_fingerprint

        try:
            known = known_teachers(folder)
            for name in known.keys() & teachers:
                check_fingerprint(folder, name, known[name][0], {"max_length": max_length})
        except UserError as error:
            yield str(error)
            return
        if known:  # it may hold all that is asked for, and is only read then
            return
    if (why := why_unwritable(folder)) is not None:
        yield f"{why}. Name a folder that can be written."
