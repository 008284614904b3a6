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
        for key, items in step.phase.lists().items():
            if not items:
                yield Mistake(f"{step.location}.{key}=[]", "the list is empty. Name at least one.")
            for item in dict.fromkeys(items):
                if items.count(item) > 1:
                    yield Mistake(f"{step.location}.{key}", f"{item!r} stands twice. Keep it once.")
        yield from step.phase.mistakes(step)
        if (unmet := _unmet(step.phase, step, "Take the phase out.")) is not None:
            yield Mistake(step.location, unmet)
        else:
            yield from _part_mistakes(step)
        yield from _file_mistakes(step)
        yield from _other_heads(step)


def _other_heads(step: Step) -> Iterator[Mistake]:
    """Teachers that run with the head of another task. An evaluation leaves them out. With tasks of
    words they may know some of the tags, which their labels tell."""
    if not step.phase.runs_teachers or step.phase.makes == "evaluation":
        return
    for teacher in step.teachers:
        head = step.model(teacher).head or step.task_name
        if not step.recipe.takes_head(step.task_name, head):
            yield Mistake(
                step.location,
                f"runs teacher {teacher!r} on task {step.task_name!r}, and a phase before has "
                f"trained it on task {head!r}, whose head it has now. Train it on "
                f"{step.task_name!r} last, or give the trained model another name with save_as.",
            )


def _unmet(part: Part, step: Step, remedy: str) -> str | None:
    """The first of a part's needs that the recipe as a whole does not meet.

    remedy: what to do where the part is for other kinds of task.
    """
    needs, name, task, fits = part.all_needs(), part.part_name, step.task, step.expertise
    count, own = len(step.teachers), {*step.teachers} == {*step.given}
    whose = "the recipe has" if own else "the phase follows"
    if (why := task.lacks(needs)) is not None:
        return f"{name} {why[0]}, and {task.location}.type={task.type} {why[1]}. {remedy}"
    if count == 0 < needs.teachers:
        return "the recipe has no teachers. Add teachers: {NAME: ...}."
    if count < needs.teachers:
        return (
            f"{name} needs at least {needs.teachers} teachers, and {whose} {count}. Add one to "
            "teachers, or take it out."
        )
    if needs.at_most is not None and count > needs.at_most:
        return (
            f"{name} takes at most {needs.at_most} teacher(s), and {whose} {count}. Take one out, "
            f"or {name}."
        )
    if needs.expertise and not own:
        return (
            f"{name} needs what an expertise phase learns of the recipe's teachers, and the phase "
            f"follows {', '.join(step.teachers)}. Take follow out, or {name}."
        )
    if needs.expertise and fits is None:
        return (
            f"{name} needs what an expertise phase learns of the teachers as they are then. Add "
            "- expertise: {split: validation} before it (after the last fine-tuning of a teacher)."
        )
    if needs.expertise and fits and step.phase.followed and fits.phase.leaves_out_teachers:
        return (
            f"{name} is fitted on the teachers that {fits.location} leaves, and the phase follows "
            "those of the recipe, whoever was left out. Take follow out, or leave_out of "
            f"{fits.location}."
        )
    return None


def _part_mistakes(step: Step) -> Iterator[Mistake]:
    """Mistakes of the parts that a phase uses, and of those with the cache that it reads."""
    phase, split = step.phase, step.phase.cached_split
    held = None if split is None else step.held(split)
    live = any(part.all_needs().live_teachers for _, part in phase.parts())
    if split is not None and held is None and not step.may_be_cached and not live:
        yield Mistake(
            step.location,
            "teachers=cached, and no cache phase before it holds the signals of the teachers, as "
            f"they are then, on split {split!r}. Add - cache: {{splits: {split}}} before it (after "
            "the last fine-tuning of a teacher), or set teachers=live.",
        )
    of_tokens = []
    for key, part in phase.parts():
        needs, location = part.all_needs(), f"{step.location}.{key}"
        unmet = _unmet(part, step, _remedy(part, phase, step.task))
        if needs.teachers and not phase.runs_teachers:
            unmet = (
                f"{part.part_name} needs teachers, and a {phase.kind} phase runs none. Take it "
                "out, or use it in a distil phase."
            )
        if unmet is not None:
            yield Mistake(location, unmet)
            continue
        if split is not None and needs.live_teachers:
            what = f"reads of the teachers what no cache holds. Set {step.location}.teachers=live."
            yield Mistake(location, what)
        elif held is not None:
            yield from _cache_mistakes(part, step, held, location)
        yield from part.mistakes(step.at(location))
        if needs.every_token:
            of_tokens.append(location)
    policies = (part for _, part in phase.parts() if isinstance(part, Routing))
    if any(not policy.keeps_lone_teacher for policy in policies) or len(step.teachers) > 1:
        yield from (_of_mixed_tokens(location, step) for location in of_tokens)


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


def _cache_mistakes(part: Part, step: Step, held: Cache, location: str) -> Iterator[Mistake]:
    """What a part reads and the cache phase that holds the phase's split does not keep."""
    needs, live = part.all_needs(), f"{step.location}.teachers=live"
    holds = f"the cache of split {step.phase.cached_split!r}"
    if isinstance(part, LayeredTerm) and part.cached_layers() is None:
        yield Mistake(
            f"{location}.layers={part.layers}",
            "the teachers' depths tell which layers these are, and a cache has its layers by "
            f"number. Name pairs, {{STUDENT: TEACHER}}, or set {live}.",
        )
    if missing := [layer for layer in needs.states if layer not in held.hidden]:
        yield Mistake(
            location,
            f"needs the teachers' hidden states of layer(s) {', '.join(map(str, missing))}, and "
            f"{holds} does not hold them. Set hidden: {sorted({*missing, *held.hidden})} in its "
            f"cache phase, or {live}.",
        )
    if needs.fitted_states and step.fitted_states and -1 not in held.hidden:
        reads = "reads" if part.runs else "may choose the gate, which reads"
        yield Mistake(
            location,
            f"{part.part_name} {reads} the teachers' last states, and {holds} holds logits alone. "
            "Set hidden: [-1] in its cache phase, or states: false in the expertise phase for a "
            "gate of logits.",
        )
    codec = held.codec
    if not step.task.of_vocabulary or codec.keeps_logits:
        return  # logits of classes, and numbers, are stored as they are
    stored = f"the cache holds distributions with codec {codec.name!r}"
    if isinstance(part, SoftenedTerm) and part.temperature != codec.temperature:
        yield Mistake(
            f"{location}.temperature={part.temperature}",
            f"{stored} at temperature {codec.temperature}. Set codec.temperature in the cache "
            "phase to the same.",
        )
    if needs.logits:
        keeping = " or ".join(name for name, one in CODECS.items() if one.keeps_logits)
        yield Mistake(
            location,
            f"needs the teacher's logits, and {stored}. Set codec: {{name: {keeping}}} in the "
            "cache phase, or teachers=live.",
        )


def _of_mixed_tokens(location: str, step: Step) -> Mistake:
    """What mixes teachers reads their logits: of every token they are [tokens, vocabulary] of each,
    which a lone teacher's never are."""
    count = len(step.teachers)
    whose = f"{count} teachers are mixed" if count > 1 else "the policy weighs the teacher"
    return Mistake(
        location,
        f"counts every token of a text, and {whose} by logits of every token over the whole "
        f"vocabulary. Name one teacher, {step.location}.follow: [NAME], without a routing, or "
        "count masked tokens alone, where the term has `rows`.",
    )


def _file_mistakes(step: Step) -> Iterator[Mistake]:
    """Of teachers that are files of predictions: phases that train one, read its states or
    attention, or have a task of which it can say nothing."""
    phase, task, files, at = step.phase, step.task, step.recipe.from_files, step.location
    for name in phase.starts:
        if name in files:
            yield Mistake(
                at,
                f"trains {name!r}, of which there is a file of predictions and no model. Name a "
                "teacher with a model, or the student.",
            )
    asked = [name for name in step.teachers if name in files] if phase.runs_teachers else []
    if not asked:
        return
    file = f"teachers.{asked[0]}.predictions"
    if len(step.recipe.tasks_by_name) > 1:
        yield Mistake(file, "a file is of one task, and the recipe has several.")
    if not has_files(task):
        yield Mistake(
            file,
            f"phase {step.name!r} is of {task.location}.type={task.type}, and a file is read for "
            "texts or words with labels, and for numbers. Give a model.",
        )
        return
    whose = f"and teacher {asked[0]!r} is a file of predictions, which has none"
    if isinstance(phase, Expertise) and phase.states:
        what = f"lets the gate read the teachers' states, {whose}. Set {at}.states=false."
        yield Mistake(f"{at}.states", what)
    reads = {"hidden": "hidden"} if isinstance(phase, Cache) and phase.hidden else {}
    for key, part in phase.parts():
        needs = part.all_needs()
        if needs.states or needs.live_teachers:
            reads[key] = part.part_name
    for key, name in reads.items():
        yield Mistake(
            f"{at}.{key}",
            f"asks for the teachers' states or attention, {whose}. Take {name} out, or leave the "
            f"teacher out with {at}.follow=[NAME].",
        )


def has_files(task: TaskSettings) -> bool:
    """Whether files are read for such tasks."""
    return task.reads_labels and not task.asks


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
                yield Mistake(f"{step.location}.folder={phase.folder}", why)


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
