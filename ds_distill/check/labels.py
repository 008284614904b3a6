"""What can be wrong with teachers' labels, and what is worth a note."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from transformers import PreTrainedConfig

from ds_distill.errors import Mistake
from ds_distill.models.labels import LabelMap, are_generic, class_names, label_map
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import PhaseSettings
from ds_distill.recipe.policies import Routing, not_fitted, that_take_partial
from ds_distill.recipe.tasks import MultiLabel, SingleLabel, TaskSettings
from ds_distill.recipe.text import one_line


def label_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """`teachers.NAME.labels` where they would have no effect."""
    given = [name for name, teacher in recipe.teachers.items() if teacher.labels is not None]
    tasks = recipe.tasks_by_name.values()
    if not any(task.has_classes for task in tasks):
        without = " and ".join(f"{task.location}.type={task.type}" for task in tasks)
        for name in given:
            yield Mistake(f"teachers.{name}.labels", f"{without} has no labels. Take the key out.")
        return
    for phase_name, phase in recipe.named_phases():
        for name in phase.starts:
            if name in given:
                yield Mistake(
                    f"teachers.{name}.labels",
                    f"phase {phase_name!r} trains that model on the "
                    "task's own labels, and `labels` is for teachers that run as they are. "
                    "Take `labels` out, or name the checkpoint a second time, as another teacher.",
                )


def partial_mistakes(
    recipe: Recipe,
    task: str,
    labels: list[str],
    maps: Mapping[str, LabelMap | None],
    lacking: Callable[[PhaseSettings], Collection[str]],
) -> Iterator[Mistake]:
    """Labels that no teacher knows, and policies that do not take teachers of some of the labels.

    maps: of the teachers that run on the task as they are, without mistakes. lacking: gives the
        teachers that say nothing of some examples of a phase.
    """
    known, every = _known_in_part(maps), range(len(labels))
    if len(known) == len(recipe.teachers) > 0:
        by_any = set().union(*known.values())
        if unknown := [labels[number] for number in every if number not in by_any]:
            yield Mistake(
                f"{recipe.tasks_by_name[task].location}.labels",
                f"no teacher knows {', '.join(unknown)}. Add a teacher that does, map a class to "
                "it in teachers.NAME.labels, or take it out of the task's labels.",
            )
    for location, phase, policy in _policies(recipe, task) if known else ():
        if not policy.allows_partial():
            yield Mistake(
                location,
                f"{policy.policy} takes teachers that know all labels, and {', '.join(known)} "
                "know(s) some of them: what is likely among those says nothing of the others. "
                f"Choose {' or '.join(that_take_partial())}.",
            )
        elif policy.takes_partial == "target":
            silent = lacking(phase)
            without = [teacher for teacher in recipe.teachers if teacher not in silent]
            by_any = set().union(*(known.get(one, every) for one in without))
            if without and len(by_any) < len(labels):
                yield Mistake(
                    location,
                    f"{policy.policy} reads all teachers, and of some examples "
                    f"{', '.join(silent)} says nothing, where the others ({', '.join(without)}) do "
                    "not know all labels. Complete the file, or mix losses: "
                    "routing={policy: average, mix: losses}.",
                )


def class_mistakes(recipe: Recipe, task: str, labels: list[str]) -> Iterator[Mistake]:
    """Policies that are not fitted on so many classes."""
    reasons = {} if recipe.tasks_by_name[task].many_labels else not_fitted(len(labels))
    for location, _, policy in _policies(recipe, task):
        if policy.policy in reasons:
            yield Mistake(
                location,
                f"{policy.policy} cannot be taken here: {reasons[policy.policy]}. Choose another "
                "policy, or `chosen`, the best of those that can.",
            )


def _policies(recipe: Recipe, task: str) -> Iterator[tuple[str, PhaseSettings, Routing]]:
    """The policies of a task's phases, and where each stands."""
    for name, phase in recipe.named_phases(task):
        for key, part in phase.parts():
            if isinstance(part, Routing):
                yield f"phases.{name}.{key}", phase, part


def _known_in_part(maps: Mapping[str, LabelMap | None]) -> dict[str, set[int]]:
    """The class ids that teachers know which do not know all, by teacher."""
    return {
        name: set(found.classes)
        for name, found in maps.items()
        if found is not None and found.classes is not None
    }


def label_notes(
    recipe: Recipe, task: str, labels: list[str], configs: Mapping[str, PreTrainedConfig]
) -> list[str]:
    """What to know of the labels of teachers that run as they are: one line each.

    configs: of these teachers, by name, in a recipe without mistakes.
    """
    notes, maps, of_task = [], {}, recipe.tasks_by_name[task]
    for name, config in configs.items():
        names, teacher = class_names(config), recipe.teachers[name]
        model = recipe.encoders[name]
        maps[name] = found = label_map(model, config, of_task, labels, teacher.labels)
        used = len(names) if found is None else sum(map(len, found.outputs))
        if teacher.labels is None and are_generic(names):
            pairs = one_line(dict(zip(names, labels, strict=True)))
            notes.append(
                f"teachers.{name}: {model} does not name its classes, and they are taken "
                f"in the task's order: {pairs}. If that is not so, set teachers.{name}.labels."
            )
        elif used < len(names):
            notes.append(
                f"teachers.{name}.labels: {len(names) - used} of its {len(names)} classes "
                "are left out; its probabilities are over the others."
            )
        if (note := _problem_note(of_task, config)) is not None:
            notes.append(f"teachers.{name}: {model} {note}")
        if found is not None and found.classes is not None:
            known = ", ".join(labels[number] for number in found.classes)
            notes.append(
                f"teachers.{name}.labels: knows {len(found.classes)} of the {len(labels)} labels "
                f"({known}); its losses are over those."
            )
    known_in_part = _known_in_part(maps)
    if len(known_in_part) == len(recipe.teachers):
        notes += _unrelated_notes(recipe, task, known_in_part)
    return notes


def _problem_note(task: TaskSettings, config: PreTrainedConfig) -> str | None:
    """What a teacher's configuration says of its outputs, where they can be read as the task's all
    the same: what `check_head` refuses is none of it."""
    stated = getattr(config, "problem_type", None)
    if task.problem == SingleLabel.problem and stated == MultiLabel.problem:
        return (
            f"was trained with a sigmoid for each label (problem_type={stated}), and a "
            f"{task.type} task reads its outputs as those of one softmax: a text of several of "
            "its labels, or of none, has one of them here."
        )
    if task.many_labels and stated is None:
        return (
            "does not say what its outputs are (problem_type in config.json), and each is taken "
            "as the logit of a label. If it was trained with one softmax over all labels, "
            "fine-tune it on this task first."
        )
    return None


def _unrelated_notes(recipe: Recipe, task: str, known: Mapping[str, set[int]]) -> Iterator[str]:
    """Losses that leave open how likely the labels of one teacher are beside those of another."""
    groups: list[set[int]] = []  # of labels that teachers compare with each other
    for classes in known.values():
        apart = [group for group in groups if not group & classes]
        groups = [*apart, classes.union(*(group for group in groups if group & classes))]
    if len(groups) < 2:
        return
    gate, phases = "an expertise phase and the policy gate", recipe.named_phases(task)
    if any(phase.kind == "expertise" for _, phase in phases):
        gate = "take the policy gate"
    for name, phase in phases:
        parts = [part for _, part in phase.parts()]
        policies = [
            part.policy
            for part in parts
            if isinstance(part, Routing) and part.takes_partial == "losses"
        ]
        if policies and not any(part.needs.labels for part in parts):
            yield (
                f"phases.{name}: the teachers of {', '.join(known)} share no label, so a loss "
                f"over the labels of each ({', '.join(policies)}) leaves open which teacher's "
                f"label a text has. Add losses.cross_entropy, or {gate}."
            )
