"""What is wrong with the data of a recipe's task: its splits, whether metrics have a value on them,
and the teachers that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ds_distill.check.labels import class_mistakes, label_notes, partial_mistakes
from ds_distill.check.predictions import Predictions
from ds_distill.data.columns import arrow_column, as_numpy, example_keys, flat_values, labels_of
from ds_distill.data.groups import (
    CHOOSING_SPLIT,
    Groups,
    choosing_part,
    fitting_part,
    strata_of,
    teacher_names,
)
from ds_distill.data.sources import Source, has_labels
from ds_distill.data.tokenizer import share_cut
from ds_distill.errors import Mistake, UserError, collecting, did_you_mean, located, short
from ds_distill.keys import among_keys
from ds_distill.models.configuration import check_head
from ds_distill.models.labels import LabelMap, label_map, tag_map
from ds_distill.process.activity import mark
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import Step, steps
from ds_distill.recipe.metrics import METRICS, reported_metrics
from ds_distill.recipe.phases import FineTune, PhaseSettings, TrainingPhase
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.tags import OUTSIDE
from ds_distill.recipe.tasks import TASKS, metric_of
from ds_distill.recipe.training import Training

WORTH_A_NOTE = 0.05
"""Share of tokens that are cut."""


_AT_ONCE = 10_000
"""Texts that are looked at together, so that no copy of all is made."""


class Data:
    """The splits that the phases of a recipe's task use, each read once."""

    def __init__(self, recipe: Recipe, task_name: str, sources: Mapping[str, Source]) -> None:
        """sources: of all tasks, by task."""
        self.recipe = recipe
        self.task_name, self.task = task_name, recipe.tasks_by_name[task_name]
        self.source, self._sources = sources[task_name], sources
        self._read: dict[str, datasets.Dataset] = {}

    def mistakes(self, teachers: dict[str, PreTrainedConfig]) -> list[Mistake]:
        """teachers: configurations of those that can be read, by name."""
        found = list(self._splits())
        labels: list[str] | None = None
        with collecting(found):
            labels = self.source.labels
        if labels is None or not self._read:
            return found  # the rest is about labels, which may be others
        found += self._named_labels(labels)
        found += class_mistakes(self.recipe, self.task_name, labels)
        found += self._metric(labels)
        found += self._pairs()
        found += named_teacher_mistakes(self.recipe, self.task_name, self.source, self._read)
        if not found and labels:
            found += self._parts()
        found += self._ready_teachers(labels, teachers)
        return [*found, *self._predictions.mistakes()]

    def notes(self, teachers: dict[str, PreTrainedConfig]) -> list[str]:
        """What is no mistake, and better known before a run.

        teachers: as of `mistakes`, which found none.
        """
        return [
            *self.label_notes(teachers),
            *class_notes(self.source, self._read, self._class_counts),
            *self._empty_texts(),
            *self._widened_spans(),
            *self._shared_examples(),
            *self._predictions.notes(),
        ]

    @property
    def _predictions(self) -> Predictions:
        return Predictions(self.recipe, self.task_name, self.source, self._read)

    def class_lines(self) -> Iterator[str]:
        """How many examples, or words, each class has in each labelled split."""
        noun = "words" if self.task.of_words else "examples"
        return count_lines(self.task.location, noun, self.source.labels, self._class_counts)

    @cached_property
    def _class_counts(self) -> dict[str, np.ndarray]:
        labels = self.source.labels
        counts = {split: class_counts(data, labels) for split, data in self._read.items()}
        return {split: found for split, found in counts.items() if found is not None}

    @property
    def _phases(self) -> list[tuple[str, PhaseSettings]]:
        return self.recipe.named_phases(self.task_name)

    def label_notes(self, teachers: dict[str, PreTrainedConfig]) -> list[str]:
        """Of the labels of teachers that run without training. Reads no split."""
        if not self.source.labels:
            return []
        untrained = untrained_teachers(self.recipe, self.task_name)
        ready = {name: teachers[name] for name in untrained if name in self.recipe.encoders}
        return label_notes(self.recipe, self.task_name, self.source.labels, ready)

    def _splits(self) -> Iterator[Mistake]:
        """Splits that are not there or cannot be read."""
        needs: dict[str, bool] = {}  # split -> whether it needs labels
        missing: set[str] = set()
        for name, phase in self._phases:
            reads = list(phase.reads)
            if isinstance(phase, Training) and phase.keep == "best":
                reads.append((CHOOSING_SPLIT, True))
            for split, need in reads:
                if split in self.source.splits:
                    needs[split] = needs.get(split, False) or need
                elif split not in missing:
                    missing.add(split)
                    yield Mistake(f"phases.{name}", self._no_split(split, name, phase))
            if phase.makes == "student" and CHOOSING_SPLIT in self.source.splits:
                needs.setdefault(CHOOSING_SPLIT, False)  # scores the teachers
        for split, need in needs.items():
            found: list[Mistake] = []
            with collecting(found):
                self._read[split] = self.source.read(split, need and self.task.reads_labels)
            yield from found

    def _no_split(self, split: str, name: str, phase: PhaseSettings) -> str:
        path, key = self.task.data.path, f"{self.task.location}.data"
        there = ", ".join(self.source.splits)
        if split not in (one for one, _ in phase.reads):
            return (
                f"keep=best needs a validation split, and {path} has {there}. Add one, or set "
                "training.keep=last."
            )
        choice = "splits=[NAME]" if "splits" in type(phase).model_fields else "split=NAME"
        other = f"say where it is with {key}.splits.{split}=NAME"
        if Path(path).expanduser().is_file():
            other = f"give a folder with a file for each split, {key}.path=FOLDER"
        return (
            f"there is no split {split!r} in {path}; it has {there}. Choose one with "
            f"phases.{name}.{choice}, or {other}."
        )

    def _named_labels(self, labels: list[str]) -> Iterator[Mistake]:
        """Classes that phases name, and the task or the split that they train on has not."""
        for name, phase in self._phases if labels else ():
            yield from label_mistakes(name, phase, labels)
            if not isinstance(phase, FineTune) or phase.focus is None:
                continue
            counts = self._class_counts.get(phase.split, np.ones(len(labels)))
            for label in phase.focus.classes:
                if label in labels and counts[labels.index(label)] == 0:
                    yield Mistake(
                        f"phases.{name}.focus.classes",
                        f"split {phase.split!r} has no example of {label!r}. Name classes that it "
                        "has, or take focus out.",
                    )

    def _metric(self, labels: list[str]) -> Iterator[Mistake]:
        """A metric that names labels which the task has not, or has no label to be about; and one
        without a value on a split that chooses or judges, which a run would find after its
        trainings."""
        mistakes = list(metric_of(self.task)(self.task.metric, labels).label_mistakes())
        at = f"{self.task.location}.metric"
        yield from (Mistake(f"{at}.{key}" if key else at, what) for key, what in mistakes)
        if mistakes:
            return
        judging: dict[str, str] = {}  # split -> the first phase that computes metrics on it
        for name, phase in self._phases:
            splits = [CHOOSING_SPLIT] if isinstance(phase, Training) else []
            if phase.makes in ("evaluation", "expertise"):
                splits = [split for split, _ in phase.reads]
            for split in splits:
                judging.setdefault(split, name)
        for split, name in judging.items():
            if split in self._read:
                remedy = "it, or take another split"
                yield from self._no_value(f"split {split!r}", name, self._read[split], remedy)

    def _no_value(
        self, where: str, phase: str, data: datasets.Dataset, remedy: str
    ) -> Iterator[Mistake]:
        """The first metric that a phase reports which has no value on some examples.

        where: which they are. remedy: what to add some to.
        """
        over, task, labels = self.task.over, self.task, self.source.labels
        counts = class_counts(data, labels)
        if task.numbers and has_labels(data):
            counts = np.unique(as_numpy(data, "label"), return_counts=True)[1]
        if counts is None:
            return
        examples = int(counts.sum()) if "words" in data.column_names else len(data)
        for name, settings in reported_metrics(over, task.metric, labels).items():
            metric = METRICS[over][name](settings, labels)
            if (why := metric.no_value(counts, examples)) is not None:
                other = f", or another metric with {task.location}.metric=NAME"
                yield Mistake(
                    f"phases.{phase}",
                    f"metric {metric.name} has no value on {where}: {why}. Add examples to "
                    f"{remedy}{'' if over in metric.reported else other}.",
                )
                return  # of others the reason is the same

    def _pairs(self) -> Iterator[Mistake]:
        """Pairs of texts, where long texts are to be split."""
        at, splits_up = self.task.location, self.task.of_vocabulary and not self.task.cuts
        pairs = [split for split, data in self._read.items() if "text_b" in data.column_names]
        if splits_up and pairs:
            yield Mistake(
                f"{at}.long=split",
                f"the examples of split {pairs[0]!r} are pairs of texts, and only single texts can "
                f"be split. Set {at}.long=cut, or choose one column with "
                f"{at}.data.columns.text=NAME.",
            )

    def _parts(self) -> Iterator[Mistake]:
        """Too little for what fits, or nothing left for what chooses; a metric without a value on
        one of these parts."""
        seed, fitted, parts = self.recipe.seed, dict[str, Groups](), []
        first = {phase.makes: name for name, phase in reversed(self._phases)}
        trains = [name for name, phase in self._phases if isinstance(phase, Training)]
        try:
            for split in self.recipe.fitted_splits(self.task_name):
                data = self._read[split]
                fitted[split] = Groups.of(data)
                fits = fitting_part(_strata(data), fitted[split], split, seed)
                parts.append(
                    (f"{split!r} that is fitted on", first["expertise"], data.select(fits))
                )
            if CHOOSING_SPLIT in self.source.splits and trains:
                data = self.source.read(CHOOSING_SPLIT)
                chooses = choosing_part(_strata(data), Groups.of(data), fitted, seed)
                parts.append((f"{CHOOSING_SPLIT!r} that chooses", trains[0], data.select(chooses)))
        except UserError as error:
            yield from error.mistakes
            return
        remedy = "the split, of other groups where its examples have groups"
        for which, phase, data in parts:
            yield from self._no_value(f"the part of split {which}", phase, data, remedy)

    def _ready_teachers(
        self, labels: list[str], configs: dict[str, PreTrainedConfig]
    ) -> Iterator[Mistake]:
        """Teachers that run without training must have a head of the task already."""
        recipe, found = self.recipe, list[Mistake]()
        maps: dict[str, LabelMap | None] = {}
        for name, first in untrained_teachers(recipe, self.task_name).items():
            if name not in configs:
                continue
            reference = resolve_model(recipe.encoders[name], recipe.models_folder)
            used = located(f"used by phase {first!r} without training")
            with collecting(found, f"teachers.{name}"), used:
                check_head(reference, configs[name], TASKS[self.task.type])
                if labels:
                    given = recipe.teachers[name].labels
                    maps[name] = label_map(reference, configs[name], self.task, labels, given)
        for teacher, (head, first) in _teachers_of_other_tags(recipe, self.task_name).items():
            maps[teacher] = tag_map(self._sources[head].labels, labels)
            tags = maps[teacher]
            if tags is not None and not any(labels[number] != OUTSIDE for number in tags.known):
                what = (
                    f"trained on task {head!r}, and has none of the tags of task "
                    f"{self.task_name!r}, on which phase {first!r} runs it. Name the tags of one "
                    f"entity type alike: one has {', '.join(self._sources[head].labels)}, the "
                    f"other {', '.join(labels)}."
                )
                found.append(Mistake(f"teachers.{teacher}", what))
        yield from found
        if not found:
            lacking = self._predictions.lacking
            yield from partial_mistakes(recipe, self.task_name, labels, maps, lacking)

    def _empty_texts(self) -> Iterator[str]:
        for split, data in self._read.items():
            if "words" in data.column_names:
                continue
            count = 0
            for part in data.select_columns("text").with_format("arrow").iter(_AT_ONCE):
                mark("looks for empty texts")
                texts = part["text"]
                empty = pc.or_(pc.equal(pc.binary_length(texts), 0), pc.utf8_is_space(texts))
                count += pc.sum(empty).as_py() or 0
            if count:
                yield (
                    f"{count:,} of {len(data):,} texts of split {split!r} are empty. They count as "
                    "examples all the same."
                )

    def _widened_spans(self) -> Iterator[str]:
        for split, data in self._read.items():
            if "widened" not in data.column_names:
                continue
            counts = as_numpy(data, "widened")
            texts = np.flatnonzero(counts)
            if len(texts):
                row = data[int(texts[0])]
                key = row["key_hi"], row["key_lo"]
                location = self.source.locations(split, {key}).get(key)
                at = f", e.g. {location}" if location else ""
                yield (
                    f"{counts.sum():,} spans in {len(texts):,} of the {len(data):,} texts of split "
                    f"{split!r} begin or end inside of a word{at}: they have the whole word, also "
                    "in scores."
                )

    def cut_texts(self, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
        """How much of the texts is longer than the task's maximum. tokenizer: the student's."""
        if tokenizer is None or not self.task.cuts:
            return
        at, most = self.task.location, self.task.max_length
        split_up = f", or split long texts with {at}.long=split"
        fix = f"Raise {at}.max_length{split_up if self.task.of_vocabulary else ''}."
        for split, data in self._read.items():
            share = share_cut(data, tokenizer, most)
            if share >= WORTH_A_NOTE:
                yield (
                    f"{share:.0%} of the tokens of split {split!r} are thrown away, because "
                    f"{at}.max_length={most} cuts long texts. {fix}"
                )

    def _shared_examples(self) -> Iterator[str]:
        """Texts that judge or choose, and stand in a split that trains or chooses, too."""
        judges = [phase for _, phase in self._phases if phase.makes == "evaluation"]
        judging = {split for phase in judges for split, _ in phase.reads}
        rank = {split: (split not in judging, split != CHOOSING_SPLIT) for split in self._read}
        keys = {split: example_keys(data) for split, data in self._read.items()}
        for judge, seen in combinations(sorted(keys, key=lambda split: rank[split]), 2):
            shared = among_keys(keys[judge], keys[seen]).sum()
            if rank[judge] == (True, True) or not shared:
                continue
            share = f"{shared:,} of the {len(keys[judge]):,} examples"
            if shared == len(keys[judge]) == len(keys[seen]):
                share = f"all {shared:,} examples"
            yield (
                f"{share} of split {judge!r} stand in {seen!r}, too: figures on them are too "
                "good for a model that has seen them."
            )


def untrained_teachers(recipe: Recipe, task: str) -> dict[str, str]:
    """Teachers that a phase of a task runs before any phase trains them, and the first such phase.
    With several tasks an evaluation leaves out what has no head of the task."""
    found: dict[str, str] = {}
    for step, teacher in _running(recipe, task, evaluated=len(recipe.tasks_by_name) == 1):
        if step.model(teacher).made_by is None:
            found.setdefault(teacher, step.name)
    return found


def _teachers_of_other_tags(recipe: Recipe, task: str) -> dict[str, tuple[str, str]]:
    """Teachers that a phase of a task of words runs after they were trained on another such task:
    that task, and the phase."""
    found: dict[str, tuple[str, str]] = {}
    for step, teacher in _running(recipe, task, evaluated=False):
        head = step.model(teacher).head or task
        if head != task and recipe.takes_head(task, head):
            found.setdefault(teacher, (head, step.name))
    return found


def _running(recipe: Recipe, task: str, *, evaluated: bool) -> Iterator[tuple[Step, str]]:
    """The phases of a task that run teachers, and each of these. evaluated: also evaluations."""
    for step in steps(recipe):
        runs = step.phase.runs_teachers and (evaluated or step.phase.makes != "evaluation")
        for teacher in step.teachers if runs and step.task_name == task else ():
            yield step, teacher


def _strata(data: datasets.Dataset) -> np.ndarray:
    """What each example is: int64 [N]; see `strata_of`."""
    return strata_of(*labels_of(data))


def named_teacher_mistakes(
    recipe: Recipe, task_name: str, source: Source, read: Mapping[str, datasets.Dataset]
) -> Iterator[Mistake]:
    """Of each phase of a task that follows the teachers that its examples name: that they name
    none, or one that the phase has not, or that an earlier phase may have left out.

    read: the splits that could be read.
    """
    for step in steps(recipe):
        for key, part in step.phase.parts() if step.task_name == task_name else ():
            if not part.all_needs().teacher_ids or not isinstance(step.phase, TrainingPhase):
                continue
            at, split = f"{step.location}.{key}", step.phase.split
            follows = f"{part.part_name} follows the teacher that each example names, and"
            leaves = [one.name for one in step.earlier_of_task() if one.phase.leaves_out_teachers]
            if leaves and step.phase.followed is None:
                yield Mistake(
                    at,
                    f"{follows} phases.{leaves[-1]} may leave it out. Set follow: "
                    f"[{', '.join(step.teachers)}], or take leave_out out.",
                )
            named = teacher_names(read[split]) if split in read else ([], None)
            if named is None:
                column = f"{source.task.location}.data.columns.teacher"
                yield Mistake(
                    at,
                    f"{follows} those of split {split!r} name none. Set {column} to the column "
                    "that has the names.",
                )
                continue
            for number, name in enumerate(named[0]):
                if name not in step.teachers:
                    rows = np.flatnonzero(named[1] == number)
                    where = _location(source, read[split], split, rows)
                    yield Mistake(
                        at,
                        f"{part.part_name}: {where}: {name!r} is no teacher of this phase, which "
                        f"has {', '.join(step.teachers)}.{did_you_mean(name, step.teachers)} "
                        "Correct the name, or leave it out: such an example follows all teachers "
                        "alike.",
                    )


def _location(source: Source, data: datasets.Dataset, split: str, rows: np.ndarray) -> str:
    """Where the first of some examples of a split stands, and how many more there are."""
    first = data[int(rows[0])]
    key = first["key_hi"], first["key_lo"]
    where = source.locations(split, {key}).get(key, f"split {split!r}")
    return where if len(rows) == 1 else f"{where} and {len(rows) - 1:,} more"


# --------------------------------------------------------------------------------- classes

SHOWN = 20
"""Classes named in a line."""

PAIRS = 5
"""Pairs of labels named in a note."""

_BATCH = 100_000


def class_counts(data: datasets.Dataset, labels: Sequence[str]) -> np.ndarray | None:
    """Examples of each class, or words: int64 [C]; None for a split without labels, and where these
    are no classes.

    data: as `Source.read` gives them. labels: the task's.
    """
    if not labels or "answers" in data.column_names:
        return None  # numbers, or places in the text
    column = arrow_column(data, "label")
    found = flat_values(column)
    if not (found >= 0).any():
        return None  # -1 of each text, also in a task of many labels
    if pa.types.is_fixed_size_list(column.type):  # of each class, whether an example has it
        return np.asarray((found.reshape(-1, len(labels)) == 1).sum(axis=0))
    return np.bincount(found[found >= 0], minlength=len(labels))


def count_lines(
    where: str, noun: str, labels: Sequence[str], counts: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """A line for each split: its classes, the commonest first. where: the task, for messages."""
    for split, of_split in counts.items():
        order = np.argsort(-of_split, kind="stable")
        named = [f"{labels[number]} {of_split[number]:,}" for number in order[:SHOWN]]
        more = len(order) - len(named)
        yield (
            f"{where}, split {split}, {noun} of each class: {', '.join(named)}"
            + (f" and {more:,} more classes" if more else "")
            + "."
        )


def class_notes(
    source: Source, splits: Mapping[str, datasets.Dataset], counts: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Classes of single examples, as where each text has a label of its own; names that may be one
    class, classes without an example, and copies of a text with other labels.

    splits: those that are read. counts: of those that are labelled, see `class_counts`.
    """
    labels = source.labels
    of_words = any("words" in data.column_names for data in splits.values())
    total = sum(counts.values(), np.zeros(len(labels), dtype=np.int64))
    alone = int((total <= 1).sum())
    if counts and alone > len(labels) / 2 and not of_words:
        yield (
            f"{alone:,} of the {len(labels):,} classes have one example or none, from which "
            "nothing of them can be learnt: is the column of labels one of texts, numbers or names?"
        )
    by_form: dict[str, list[str]] = {}
    for label, count in zip(labels, total.tolist(), strict=True):
        form = " ".join(label.split()).casefold()
        by_form.setdefault(form, []).append(f"{label!r} ({count:,})")
    if near := [" and ".join(alike) for alike in by_form.values() if len(alike) > 1]:
        more = f"; and {len(near) - PAIRS:,} more" if len(near) > PAIRS else ""
        yield (
            f"labels that differ in case or blanks alone: {'; '.join(near[:PAIRS])}{more}. If each "
            "is one class, correct the rows."
        )
    for split, of_split in counts.items():
        lacking = [labels[number] for number in np.flatnonzero(of_split == 0).tolist()]
        if lacking:
            shown = ", ".join(lacking[:SHOWN]) + (", ..." if len(lacking) > SHOWN else "")
            yield f"split {split!r} has no example of {len(lacking):,} of the classes: {shown}."
    if not of_words:
        yield from _contradictions({split: splits[split] for split in counts})


def _contradictions(splits: Mapping[str, datasets.Dataset]) -> Iterator[str]:
    """One note, of texts that stand in the data more than once, with other labels."""
    keys, codes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for data in splits.values():
        keys.append(as_numpy(data, "key_hi"))  # half of a key tells texts apart well enough
        column = arrow_column(data, "label")
        codes += (_codes(column.slice(at, _BATCH)) for at in range(0, len(column), _BATCH))
    _, first, group = np.unique(np.concatenate(keys), return_index=True, return_inverse=True)
    code = np.concatenate(codes)
    differs = np.zeros(len(first), dtype=bool)
    differs[group[code != code[first[group]]]] = True
    if differs.any():
        every = datasets.concatenate_datasets([*splits.values()]).select_columns("text")
        text = short(every[int(first[differs].min())]["text"])
        yield (
            f"{differs.sum():,} text(s) stand in the data more than once, with other labels "
            f"({differs[group].sum():,} examples), such as {text}. One of the labels is wrong, or "
            "the text does not say which is right."
        )


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each example's label or set of labels: int64 [n]."""
    rows = flat_values(column).reshape(len(column), -1).astype(np.int64)
    if rows.shape[1] == 1:
        return rows[:, 0]
    weights = np.random.default_rng(0).integers(2**62, size=rows.shape[1])
    with np.errstate(over="ignore"):
        return np.asarray((rows * weights).sum(axis=1))


def label_mistakes(name: str, phase: PhaseSettings, labels: Sequence[str]) -> Iterator[Mistake]:
    """Classes that a phase names, and the task has not."""
    for key, named in phase.labels_named().items():
        for label in named:
            if label not in labels:
                yield Mistake(
                    f"phases.{name}.{key}",
                    f"there is no label {label!r}; the task has {', '.join(labels)}. Name "
                    "classes of the task.",
                )
