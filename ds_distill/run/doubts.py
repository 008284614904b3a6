"""Whether teachers know what they are to teach: their scores on labelled examples before a student
learns from them, and warnings of those that are useless, or have their labels in another order than
the task's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds_distill.data.batches import Units
from ds_distill.data.groups import CHOOSING_SPLIT, few_groups
from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.errors import UserError
from ds_distill.evaluation.label_order import LabelDoubt, NumberDoubt
from ds_distill.files import write_json
from ds_distill.models.configuration import load_config, output_function
from ds_distill.models.labels import LabelMap, class_names
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.lineage import model_at
from ds_distill.recipe.phases import FineTune
from ds_distill.recipe.tasks import TASKS
from ds_distill.recipe.text import one_line
from ds_distill.reporting.results import limits_of
from ds_distill.run.inference import predictions_of
from ds_distill.run.run import Run


def score_teachers(number: int, name: str, run: Run) -> None:
    """Score the teachers that phase `number`, or one after it, teaches with, once they are what
    they will be then: those that come trained before anything else runs, those that this run
    trains before the phase that distils. Where validation has no labels nothing is scored.

    name: the phase's. Every rank must call this. Raises UserError for a teacher that is no better
    than its commonest label, unless the recipe says to go on.
    """
    _tell(run, name, [one for one in _entries(run) if one["phase"] == name])  # from before a kill
    references = _ready(number, run)
    new = [one for one in references if not _score_of(run, one)]
    if new:
        examples = run.data.examples(CHOOSING_SPLIT)
        counted = run.kind.counted(examples)
        new = [one for one in new if run.knows(one, examples)[counted].any()]
    if new:
        predictions, _ = predictions_of(run, new, CHOOSING_SPLIT, PADDED_BATCH, finite=False)
        _keep(number, name, run, CHOOSING_SPLIT, new, predictions, examples)
    _refuse(run, references)


def score_of_signals(
    number: int,
    name: str,
    run: Run,
    split: str,
    references: Sequence[ModelReference],
    predictions: Mapping[str, Any],
    examples: Units,
) -> None:
    """Take as scores what a phase has predicted on labelled examples, of teachers that have none.

    predictions: by teacher, as the task's kind makes them. Every rank must call this. Raises as
    `score_teachers`.
    """
    if _teaching(number, run) is not None:
        new = [one for one in references if not _score_of(run, one)]
        _keep(number, name, run, split, new, predictions, examples)
        _refuse(run, references)


def _teaching(number: int, run: Run) -> int | None:
    """The first phase from `number` on in which the task's teachers teach; None without one, and
    where nothing of a run's quality counts."""
    for at, phase in run.phases.items() if run.observer is None else ():
        if at >= number and phase.runs_teachers and phase.makes == "student":
            return at
    return None


def _ready(number: int, run: Run) -> list[ModelReference]:
    """The teachers to score before phase `number`."""
    teaching = _teaching(number, run)
    if teaching is None or not run.task.reads_labels or not run.data.has_split(CHOOSING_SPLIT):
        return []
    before = range(number, teaching)
    if any(at in run.phases and run.phases[at].leaves_out_teachers for at in before):
        return []  # it says which teachers teach, and has their predictions
    trained = {output for at in before for output in run.recipe.phases[at].outputs}
    ready = [run.reference(name, number) for name in run.teachers(teaching) if name not in trained]
    return [one for one in ready if number == teaching or not one.trained]


def _entries(run: Run) -> list[dict[str, Any]]:
    """The scores of the task's teachers so far, in order."""
    everything = run.folder.read_teacher_scores()
    return [entry for entry in everything if entry["task"] == run.task_name]


def _score_of(run: Run, reference: ModelReference) -> dict[str, Any]:
    """What is known of a teacher as it is now; empty where nothing is."""
    for entry in _entries(run):
        if entry["teacher"] == reference.name and entry["model"] == _files_of(run, reference):
            return entry
    return {}


def _files_of(run: Run, reference: ModelReference) -> list[str | None]:
    if reference.predictions is not None:
        return [str(reference.predictions), None]
    return [run.folder.from_here(Path(reference.model)), reference.revision]


def _keep(
    number: int,
    name: str,
    run: Run,
    split: str,
    references: Sequence[ModelReference],
    predictions: Mapping[str, Any],
    examples: Units,
) -> None:
    """Add scores to those of the run, and log them."""
    new = []
    for reference in references:
        own, judged, known = predictions[reference.name], examples, run.knows(reference, examples)
        if not known.all():
            judged, rows = examples.where(known)
            own = own[rows]
        entry = {
            "task": run.task_name,
            "teacher": reference.name,
            "model": _files_of(run, reference),
            "phase": name,
            "split": split,
            "examples": int(run.kind.counted(judged).sum()),
            "over": TASKS[run.task.type].over,
            "metric": run.kind.metric.name,
            "score": None,
            **known_labels(run, reference),
        }
        if run.kind.finite(own).all():  # else the phases say so, or leave examples out
            value = run.kind.metric.value(run.kind.scored(own, judged))
            entry["score"] = value if math.isfinite(value) else None
            classes = classes_of(reference) or _focus(number, run, reference)
            entry |= _doubt(run, reference, split, own, judged, classes)
        new.append(entry)
    run.world.barrier()  # all have read what was there
    if run.world.is_main:
        write_json(run.folder.teacher_scores, [*run.folder.read_teacher_scores(), *new])
    run.world.barrier()
    _tell(run, name, new)


def _focus(number: int, run: Run, reference: ModelReference) -> list[int] | None:
    """The class ids of which a teacher that this run has trained saw all examples; None for one
    that saw all of all classes."""
    made_by = model_at(run.recipe, reference.name, number).made_by
    phase = None if made_by is None else run.recipe.phases[made_by]
    if not isinstance(phase, FineTune) or phase.focus is None:
        return None
    return [run.labels.index(label) for label in phase.focus.classes]


def _doubt(
    run: Run,
    reference: ModelReference,
    split: str,
    predictions: Any,
    examples: Units,
    classes: Sequence[int] | None,
) -> dict[str, Any]:
    """Of a doubtful teacher the `doubt`, and whether it `teaches_nothing`; see
    `TaskKind.label_doubt`. The label order of one that this run trained is not in doubt."""
    found = run.kind.label_doubt(predictions, examples, classes)
    if found is None or (reference.trained and not found.is_worthless):
        return {}
    text = doubt_text(run, reference, split, found, classes)
    return {"doubt": text, "teaches_nothing": _teaches_nothing(run, reference, found)}


def _teaches_nothing(run: Run, reference: ModelReference, found: LabelDoubt | NumberDoubt) -> bool:
    """Whether it is below its commonest label, or no better and better in another order; both
    beyond chance. Among words, nearly all of which may be O, one that finds entities can be below
    that label, too. Numbers on another scale can be right in their order."""
    if isinstance(found, NumberDoubt):
        return False
    below = found.is_below and not run.task.of_words
    return below or (found.is_reordered and not reference.trained)


def _tell(run: Run, phase: str, entries: Iterable[Mapping[str, Any]]) -> None:
    for entry in entries:
        metric = run.kind.metric
        run.log.info(
            f"  teacher {entry['teacher']}{limits_of(entry)}: {metric.title} "
            f"{metric.shown_as(entry['score'])} on {entry['examples']:,} examples of "
            f"{entry['split']}"
        )
        about = {key: entry[key] for key in ("teacher", "split", "examples", "metric", "score")}
        run.log.event("teacher-score", phase=phase, **about)
        if "doubt" in entry and not _is_refused(run, entry):
            _logged(run, phase, [f"teacher {entry['teacher']}: {entry['doubt']}"])


def _given(run: Run, teacher: str) -> str:
    """The recipe's model that a teacher was made of."""
    return model_at(run.recipe, teacher, len(run.recipe.phases)).origin


def _is_refused(run: Run, entry: Mapping[str, Any]) -> bool:
    """A model that came from the student has no key that says to go on: it is warned of."""
    if not entry.get("teaches_nothing"):
        return False
    teacher = run.recipe.teachers.get(_given(run, entry["teacher"]))
    return teacher is not None and teacher.below_majority == "stop"


def _refuse(run: Run, references: Sequence[ModelReference]) -> None:
    """Raises UserError for teachers that have nothing to teach."""
    scores = (_score_of(run, one) for one in references)
    if refused := [one for one in scores if _is_refused(run, one)]:
        what = " ".join(f"teachers.{one['teacher']}: {one['doubt']}" for one in refused)
        given = dict.fromkeys(_given(run, one["teacher"]) for one in refused)
        keys = " ".join(f"teachers.{teacher}.below_majority=warn" for teacher in given)
        raise UserError(
            f"{what} A student would learn that, so none was distilled. Correct it; to go on all "
            f"the same, set {keys}."
        )


def warn_of_teachers(
    run: Run,
    phase: str,
    split: str,
    references: Iterable[ModelReference],
    predictions: Mapping[str, Any],
    examples: Units,
    role: str = "teacher",
) -> list[str]:
    """Log and return a line for each doubtful teacher that was not doubted when it was scored.

    predictions: of the split's examples, by teacher, as the task's kind makes them. role: what they
        are called: a checkpoint that is only evaluated teaches nobody.
    """
    warnings = []
    for one in references:
        about = run, one, split, predictions[one.name], examples, classes_of(one)
        if "doubt" not in _score_of(run, one) and (found := _doubt(*about)):
            name = one.name if one.name == role else f"{role} {one.name}"
            warnings.append(f"{name}: {found['doubt']}")
    return _logged(run, phase, warnings)


def classes_of(reference: ModelReference) -> Sequence[int] | None:
    """The class ids that a partial teacher knows; None for one that knows all."""
    return None if reference.label_map is None else reference.label_map.classes


def known_labels(run: Run, reference: ModelReference) -> dict[str, Any]:
    """`knows`, of a partial teacher, for its record: its labels, and how many the task has."""
    classes = classes_of(reference)
    if classes is None:
        return {}
    return {"knows": {"labels": [run.labels[n] for n in classes], "of": len(run.labels)}}


def warn_of_one_expert(run: Run, phase: str, split: str, experts: Mapping[str, str]) -> list[str]:
    """Log and return a line where one of the recipe's teachers is best at every class (thesis 6.1).

    experts: the best teacher of each class.
    """
    if len(run.recipe.teachers) == 1 or len(set(experts.values())) > 1:
        return []
    noun = "labels" if run.task.many_labels else "classes"
    line = (
        f"teacher {next(iter(experts.values()))} is best at all {len(experts)} {noun} of {split}: "
        "no other adds a class to what it knows, and to distil it alone may be as good. Compare "
        "with that, or train teachers that differ more."
    )
    return _logged(run, phase, [line])


def warn_of_few_groups(run: Run, phase: str, split: str, group_keys: np.ndarray) -> list[str]:
    """Log and return a line where a split has so few groups that intervals are too narrow."""
    line = few_groups(split, group_keys)
    return _logged(run, phase, [] if line is None else [line])


def _logged(run: Run, phase: str, warnings: list[str]) -> list[str]:
    for line in warnings:
        run.log.info(f"WARNING: {line}")
        run.log.event("warning", phase=phase, text=line)
    return warnings


def doubt_text(
    run: Run,
    reference: ModelReference,
    split: str,
    found: LabelDoubt | NumberDoubt,
    classes: Sequence[int] | None,
) -> str:
    """What is doubtful of a teacher, and what may be done.

    classes: class ids on whose examples it was judged; None for all.
    """
    if isinstance(found, NumberDoubt):
        fact = (
            f"mean squared error {found.error:.4g} on {split}, where always predicting the mean "
            f"label has {found.error_of_mean:.4g}."
        )
        return fact if reference.trained else f"{fact} {_fix_of_numbers(reference)}"
    where = split if classes is None else f"the examples of its classes in {split}"
    own, constant = f"accuracy {found.accuracy:.1%}", f"{found.share:.1%}"
    if found.scores is not None:
        metric = run.kind.metric
        value, of_constant = map(metric.shown_as, found.scores)
        own, constant = f"{own} and {metric.title} {value}", f"{constant} and {of_constant}"
    fact = f"{own} on {where}, where always predicting {found.majority!r} has {constant}."
    return fact if reference.trained else f"{fact} {_fix_of_order(run, reference, found)}"


def _fix_of_order(run: Run, reference: ModelReference, found: LabelDoubt) -> str:
    if found.order is None:
        return "No other order of its labels would be better than that."
    would = f"With its labels in another order it would be {found.accuracy_in_order:.1%}: if"
    if reference.predictions is not None:
        meant = dict(zip(run.labels, (run.labels[label] for label in found.order), strict=True))
        return f"{would} {reference.predictions} has them so, correct it: {one_line(meant)}."
    names = class_names(load_config(reference.model, reference.revision))
    if len(set(names)) < len(names):
        names = [str(number) for number in range(len(names))]
    mapped = reference.label_map or LabelMap(tuple((n,) for n in range(len(run.labels))))
    order: dict[str, str | None] = {
        names[output]: run.labels[mapped.known[label]]
        for outputs, label in zip(mapped.outputs, found.order, strict=True)
        for output in outputs
    }
    so = f"that is how it was trained, set teachers.{reference.name}.labels to"
    return f"{would} {so} {one_line(order)}."


def _fix_of_numbers(reference: ModelReference) -> str:
    why = "Its numbers may be on another scale than the labels."
    if reference.predictions is None:
        key, function = output_function(load_config(reference.model, reference.revision))
        if function is not None:
            why = (
                f"Its config.json has {key}={function}, which sentence-transformers puts behind "
                "its output: here it is what the model computes before that."
            )
    return (
        f"{why} Fine-tune it on this task first, or give its numbers on the labels' scale in a "
        f"file (teachers.{reference.name}.predictions)."
    )
