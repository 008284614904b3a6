"""Write a first recipe: what was guessed stands in it, each guess with a comment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from ds_distill.data.sources import open_files
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.errors import UserError
from ds_distill.init import DEFAULT_TEACHER
from ds_distill.init.guess import Guess
from ds_distill.models.configuration import check_head, load_config, usable_length
from ds_distill.models.labels import are_generic, class_names
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tags import are_entities
from ds_distill.recipe.tasks import TASKS
from ds_distill.recipe.text import one_line

TERMS = {"regression": "logit_mse: {}", "masked-lm": "kl: {temperature: 2.0}, cross_entropy: {}"}
_KL = "kl: {temperature: 2.0}"


@dataclass(frozen=True)
class TeacherFacts:
    """A teacher that the user names."""

    name: str
    model: str
    config: PreTrainedConfig | None
    """None of the default teacher, which is not read."""
    has_head: bool
    labels: list[str] | None
    """Of its head, in the order of its outputs; None where it has none, or they have no names."""


def read_teachers(references: Sequence[str], task: str) -> list[TeacherFacts]:
    """Raises UserError for a folder that is no model."""
    found = []
    for number, reference in enumerate(references or [DEFAULT_TEACHER]):
        name = f"teacher-{number + 1}" if len(references) > 1 else "teacher"
        config = None
        if references:
            config = load_config(resolve_model(reference))
        has_head = config is not None and _has_head(reference, config, task)
        labels = None
        if config is not None and has_head and task in _WITH_CLASSES:
            names = class_names(config)
            labels = None if are_generic(names) else names
        found.append(TeacherFacts(name, reference, config, has_head, labels))
    return found


_LONGEST = {"masked-lm": 128, "extractive-qa": 384, "character-spans": 384}
"""Tokens, where longer texts are read in windows; all others are cut at 512."""
_WITH_CLASSES = ("single-label", "multi-label", "token-classification")


def _has_head(reference: str, config: PreTrainedConfig, task: str) -> bool:
    if not getattr(config, "architectures", None):
        return False
    try:
        check_head(reference, config, TASKS[task])
    except UserError:
        return False
    return True


def recipe_text(guess: Guess, data: str, references: Sequence[str], student: str | None) -> str:
    """The recipe's YAML, with comments. data: its path, as it will stand there.

    Raises UserError where teachers know too few of the data's labels, or a split has others than
    train.
    """
    teachers = read_teachers(references, guess.task)
    fresh = [one.name for one in teachers if not one.has_head]
    if fresh and not guess.labelled:
        raise UserError(
            f"{data}: train has no labels, on which {', '.join(fresh)} could be fine-tuned. Name "
            "teachers that are, with --teacher."
        )
    in_data = _labels_in(guess, data) if guess.task in _WITH_CLASSES else []
    teachers = [_spelt_as(in_data, one) for one in teachers]
    labels, source = _labels(guess, data, teachers, in_data)
    length, why = _max_length(guess, teachers[0])
    lines = [
        f"description: {Path(data).name}, by ds-distill init.",
        "task:",
        f"  type: {guess.task}  # guessed from the columns",
        *_data_lines(guess, data),
    ]
    if labels:
        lines.append(f"  labels: {one_line(labels)}  # {source}")
    if guess.task == "token-classification" and not are_entities(labels):
        lines.append("  metric: accuracy  # the tags are none of entities")
    lines += [f"  max_length: {length}  # {why}", *_long_line(guess)]
    lines += ["teachers:", *(_teacher_line(one, labels) for one in teachers)]
    lines += _student_lines(teachers[0], student)
    if "validation" not in guess.has:
        lines += ["training:", "  keep: last  # no validation split chooses an epoch"]
    lines.append("# deepspeed, micro_batch_size for your GPUs: ds-distill plan")
    partial = any(_knows_in_part(one, labels) for one in teachers)
    lines += ["phases:", *_phase_lines(guess, teachers, fresh, partial)]
    lines.append("# Next: batch_size, epochs, learning_rate in `training` (docs/reference.md).")
    return "\n".join(lines) + "\n"


def _data_lines(guess: Guess, data: str) -> list[str]:
    lines = ["  data:", f"    path: {one_line(data)}"]
    if guess.columns:
        lines.append(f"    columns: {one_line(guess.columns)}  # guessed from names and content")
    if guess.splits:
        lines.append(f"    splits: {one_line(guess.splits)}")
    if "test" not in guess.has and guess.labelled:
        lines.append("    folds: {number: 10, fold: 1}  # no test split: a tenth of train judges")
    return lines


def _long_line(guess: Guess) -> list[str]:
    return ["  long: split  # texts are read in windows"] if guess.task == "masked-lm" else []


def _spelt_as(labels: Sequence[str], teacher: TeacherFacts) -> TeacherFacts:
    """A teacher's labels as the data spell them, where only capitals differ."""
    spelt = {label.lower(): label for label in labels}
    own = teacher.labels or []
    alike = {*spelt} == {label.lower() for label in own}
    if not alike or not len(spelt) == len(own) == len(labels):
        return teacher
    return replace(teacher, labels=[spelt[label.lower()] for label in own])


def _labels(
    guess: Guess, data: str, teachers: Sequence[TeacherFacts], labels: list[str]
) -> tuple[list[str], str]:
    """The task's labels, in the order of the first teacher that knows these; and whose they are."""
    if guess.task not in _WITH_CLASSES:
        return [], ""
    named = [one for one in teachers if one.labels is not None]
    for one in named:
        _refuse_strange(one, labels, all_of_them=guess.task == "multi-label")
    knows_in_part = [one for one in named if _knows_in_part(one, labels)]
    if len(knows_in_part) == len(teachers):
        known = {label for one in knows_in_part for label in one.labels or ()}
        if unknown := [label for label in labels if label not in known]:
            raise UserError(
                f"{data}: no teacher knows {', '.join(unknown)}. Give a --teacher that does, or "
                "one without a head, which is fine-tuned; or take these rows out."
            )
    # A tagger may know types that the data do not have.
    if not guess.labelled and not named:
        raise UserError(
            f"{data}: train has no labels, and no --teacher names its own. Name a teacher that "
            "does (id2label in config.json)."
        )
    more = guess.task == "token-classification"
    for own in (one.labels for one in named if one.labels is not None):
        if {*own} == {*labels} or (more and {*own} > {*labels}):
            return own, "of the teachers, in their order"
    return labels, "in train" if guess.labelled else "of validation or test"


def _knows_in_part(teacher: TeacherFacts, labels: Sequence[str]) -> bool:
    return teacher.labels is not None and not {*labels} <= {*teacher.labels}


def _refuse_strange(teacher: TeacherFacts, labels: Sequence[str], *, all_of_them: bool) -> None:
    """Raises UserError for a teacher of other labels than the data's. One that knows two of them
    says which it takes for likelier. all_of_them: a part of them is none."""
    own = teacher.labels or []
    common = {*labels} & {*own}
    if len(common) < 2 or (all_of_them and len(common) < len(labels)):
        raise UserError(
            f"--teacher {teacher.model}: its labels are {', '.join(own)}, and the data have "
            f"{', '.join(labels)}: not in both are {', '.join(sorted({*labels} ^ {*own}))}. Rename "
            "them in the data, or write the recipe by hand with teachers.NAME.labels."
        )


def _labels_in(guess: Guess, data: str) -> list[str]:
    """Those of train. Other splits are read by them here: in the recipe they will be listed in an
    order, by which a number would be a class id. Where train has none, those of the others."""
    others = [split for split in guess.has if split != "train"]
    splits = guess.splits if guess.labelled else {**guess.splits, "train": guess.splits[others[0]]}
    columns = {"path": data, "columns": guess.columns, "splits": splits}
    task: Any = TASKS[guess.task].model_validate({"type": guess.task, "data": columns})
    source = open_files(task, None, None)
    for split in others:
        source.read(split)
    return source.labels


def _teacher_line(one: TeacherFacts, labels: Sequence[str]) -> str:
    line = f"  {one.name}: {{model: {one_line(one.model)}}}"
    if one.has_head and one.labels is None and labels and one.config is not None:
        names = class_names(one.config)
        if len(names) == len(labels):
            mapped = one_line(dict(zip(names, labels, strict=True)))
            line = f"  {one.name}:\n    model: {one_line(one.model)}\n    labels: {mapped}"
            return f"{line}  # guessed: its outputs have no names"
    if one.labels is not None and one.labels != [*labels]:
        known = {name: name if name in labels else None for name in one.labels}
        count = sum(label is not None for label in known.values())
        line = f"  {one.name}:\n    model: {one_line(one.model)}\n    labels: {one_line(known)}"
        return f"{line}  # it knows {count} of the {len(labels)} labels"
    if not one.has_head:
        line += "  # has no head of the task: the first phase fine-tunes it"
    return line


def _student_lines(teacher: TeacherFacts, student: str | None) -> list[str]:
    if student is not None:
        return [f"student: {{model: {one_line(student)}}}"]
    depth = 24 if teacher.config is None else int(teacher.config.num_hidden_layers)
    kept = max(1, depth // 2 if depth <= 12 else depth // 4)
    layers = [(number + 1) * depth // kept - 1 for number in range(kept)]
    return [
        "student:",
        f"  model: {one_line(teacher.model)}",
        f"  layers: {layers}  # {kept} of the {depth} of {teacher.name}",
    ]


def _phase_lines(
    guess: Guess, teachers: Sequence[TeacherFacts], fresh: Sequence[str], partial: bool
) -> list[str]:
    """partial: whether a teacher knows some of the labels."""
    lines = []
    if fresh:
        lines.append(f"  - fine-tune: {{models: {one_line(list(fresh))}}}")
    if guess.task != "masked-lm" and guess.labelled:
        lines.append("  # The same student on labels alone: what the teachers are worth.")
        lines.append("  - fine-tune: {name: control, models: student, save_as: labels-only}")
    routed = len(teachers) > 1 and "validation" in guess.has and guess.task in _WITH_CLASSES
    # Masks change by the epoch, so that the teachers of a masked-LM run beside the student.
    of = "" if guess.task == "masked-lm" else "teachers: cached, "
    if of:
        splits, hidden = ("[train, validation]", ", hidden: [-1]") if routed else ("train", "")
        lines.append(f"  - cache: {{splits: {splits}{hidden}}}  # each teacher runs once")
    routing = ""
    if routed:
        lines.append("  - expertise: {split: validation}  # which teacher knows what")
        routing = "routing: chosen, "
    elif len(teachers) > 1:
        routing = f"routing: {'{policy: average, mix: losses}' if partial else 'average'}, "
    terms = TERMS.get(guess.task, _KL)
    if (
        partial and not routed and guess.labelled
    ):  # which teacher's label a text has, the data's labels say
        terms += ", cross_entropy: {}"
    lines.append(f"  - distil: {{{of}{routing}losses: {{{terms}}}}}")
    judges = "test" if "test" in guess.has or guess.labelled else "validation"
    return [*lines, f"  - evaluate: {{split: {judges}}}"]


def _max_length(guess: Guess, teacher: TeacherFacts) -> tuple[int, str]:
    """In tokens, and where it comes from: the length that 99 of 100 examples do not exceed."""
    most = None
    try:
        tokenizer = (
            load_tokenizer(resolve_model(teacher.model)) if teacher.config is not None else None
        )
    except UserError:
        tokenizer = None
    if tokenizer is not None and teacher.config is not None:
        texts = [" ".join(parts) for parts in guess.texts]
        lengths = [len(ids) + 1 for ids in tokenizer(texts, truncation=False)["input_ids"]]
        most, by = usable_length(teacher.config), f"tokens of {teacher.name}"
    else:
        lengths = [math.ceil(1.4 * len(" ".join(parts).split())) + 3 for parts in guess.texts]
        by = "an estimate from the words"
    wanted = int(np.quantile(lengths, 0.99))
    rounded = min(_LONGEST.get(guess.task, 512), max(32, 8 * math.ceil(wanted / 8)))
    if most is not None:
        rounded = min(rounded, most)
    return rounded, f"99% of {len(lengths):,} texts have at most {wanted}: {by}"
