"""Write a first recipe: what was guessed stands in it, each guess with a comment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
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

_LONGEST = {"masked-lm": 128, "extractive-qa": 384, "character-spans": 384}
"""Tokens, where longer texts are read in windows; all others are cut at 512."""
_WITH_CLASSES = ("single-label", "multi-label", "token-classification")


@dataclass(frozen=True)
class TeacherFacts:
    """A teacher that the user names."""

    name: str
    model: str
    config: PreTrainedConfig | None = None
    """None of the default teacher, which is not read."""
    has_head: bool = False
    labels: list[str] | None = None
    """Of its head, in the order of its outputs; None where it has none, or they have no names."""

    def knows_in_part(self, labels: Sequence[str]) -> bool:
        return self.labels is not None and not {*labels} <= {*self.labels}

    def mapped(self, labels: Sequence[str]) -> tuple[dict[str, str | None], str]:
        """Its labels to the task's, where these are not the same, and a comment."""
        if self.labels is not None and self.labels != [*labels]:
            known = {name: name if name in labels else None for name in self.labels}
            count = sum(label is not None for label in known.values())
            return known, f"it knows {count} of the {len(labels)} labels"
        if self.has_head and self.labels is None and labels and self.config is not None:
            names = class_names(self.config)
            if len(names) == len(labels):
                return dict(zip(names, labels, strict=True)), "guessed: its outputs have no names"
        return {}, ""


def read_teachers(references: Sequence[str], task: str) -> list[TeacherFacts]:
    """Raises UserError for a folder that is no model."""
    if not references:
        return [TeacherFacts("teacher", DEFAULT_TEACHER)]
    found = []
    for number, reference in enumerate(references, 1):
        name = f"teacher-{number}" if len(references) > 1 else "teacher"
        config, labels = load_config(resolve_model(reference)), None
        has_head = _has_head(reference, config, task)
        if has_head and task in _WITH_CLASSES and not are_generic(class_names(config)):
            labels = class_names(config)
        found.append(TeacherFacts(name, reference, config, has_head, labels))
    return found


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
    with_classes = guess.task in _WITH_CLASSES
    in_data = _labels_in(guess, data) if with_classes else []
    teachers = [_spelt_as(in_data, one) for one in teachers]
    labels, whose = _labels(guess, data, teachers, in_data) if with_classes else ([], "")
    length, why = _max_length(guess, teachers[0])
    environment = jinja2.Environment(keep_trailing_newline=True, autoescape=False)
    environment.filters["yaml"] = one_line
    template = Path(__file__).with_name("recipe.yaml.jinja").read_text(encoding="utf-8")
    depth = 24 if teachers[0].config is None else int(teachers[0].config.num_hidden_layers)
    kept = max(1, depth // 2 if depth <= 12 else depth // 4)
    return environment.from_string(template).render(
        name=Path(data).name,
        guess=guess,
        data=data,
        labels=labels,
        whose=whose,
        of_entities=are_entities(labels),
        length=length,
        why=why,
        teachers=teachers,
        student=student,
        layers=[(number + 1) * depth // kept - 1 for number in range(kept)],
        depth=depth,
        fresh=fresh,
        partial=any(one.knows_in_part(labels) for one in teachers),
        routed=len(teachers) > 1 and "validation" in guess.has and with_classes,
    )


def _spelt_as(labels: Sequence[str], teacher: TeacherFacts) -> TeacherFacts:
    """A teacher's labels as the data spell them, where only capitals differ."""
    spelt = {label.lower(): label for label in labels}
    own = [label.lower() for label in teacher.labels or []]
    if {*spelt} != {*own} or not len(spelt) == len(own) == len(labels):
        return teacher
    return replace(teacher, labels=[spelt[label] for label in own])


def _labels(
    guess: Guess, data: str, teachers: Sequence[TeacherFacts], labels: list[str]
) -> tuple[list[str], str]:
    """The task's labels, in the order of the first teacher that knows these; and whose they are."""
    named = [one for one in teachers if one.labels is not None]
    for one in named:
        _refuse_strange(one, labels, all_of_them=guess.task == "multi-label")
    if all(one.knows_in_part(labels) for one in teachers):
        known = {label for one in teachers for label in one.labels or ()}
        if unknown := [label for label in labels if label not in known]:
            raise UserError(
                f"{data}: no teacher knows {', '.join(unknown)}. Give a --teacher that does, or "
                "one without a head, which is fine-tuned; or take these rows out."
            )
    if not guess.labelled and not named:
        raise UserError(
            f"{data}: train has no labels, and no --teacher names its own. Name a teacher that "
            "does (id2label in config.json)."
        )
    more = guess.task == "token-classification"  # a tagger may know types that the data do not have
    for own in (one.labels for one in named if one.labels is not None):
        if {*own} == {*labels} or (more and {*own} > {*labels}):
            return own, "of the teachers, in their order"
    return labels, "in train" if guess.labelled else "of validation or test"


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


def _max_length(guess: Guess, teacher: TeacherFacts) -> tuple[int, str]:
    """In tokens, and where it comes from: the length that 99 of 100 examples do not exceed."""
    texts, config = [" ".join(parts) for parts in guess.texts], teacher.config
    most = _LONGEST.get(guess.task, 512)
    lengths = [math.ceil(1.4 * len(text.split())) + 3 for text in texts]
    by = "an estimate from the words"
    if config is not None:
        tokenizer = load_tokenizer(resolve_model(teacher.model))
        lengths = [len(ids) + 1 for ids in tokenizer(texts, truncation=False)["input_ids"]]
        most, by = min(most, usable_length(config) or most), f"tokens of {teacher.name}"
    wanted = int(np.quantile(lengths, 0.99))
    rounded = min(most, max(32, 8 * math.ceil(wanted / 8)))
    return rounded, f"99% of {len(lengths):,} texts have at most {wanted}: {by}"
