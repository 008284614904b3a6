"""What is no mistake, and better known before a run: of phases, and of the classes of examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import datasets
import numpy as np
import pyarrow as pa

from ds_distill.check.models import Models, lacks_flashdeberta
from ds_distill.data.columns import arrow_column, as_numpy, flat_values
from ds_distill.data.sources import Source
from ds_distill.data.validation_split import CHOOSING_SPLIT
from ds_distill.errors import short
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import shippable, trained_on


def trained_on_what_chooses(recipe: Recipe) -> list[str]:
    """A note where models are trained on the split that chooses."""
    tasks = recipe.tasks_by_name
    seen = list(
        dict.fromkeys(n for task in tasks for n in trained_on(recipe, task, CHOOSING_SPLIT))
    )
    if not seen:
        return []
    verb = "is" if len(seen) == 1 else "are"
    return [
        f"{', '.join(seen)} {verb} trained on split {CHOOSING_SPLIT!r}, by which epochs and the "
        "student to ship are chosen: accuracy on what a model was trained on says nothing of it. "
        "It is shipped only if there is no other student."
    ]


def ships_the_last(recipe: Recipe, sources: Mapping[str, Source]) -> list[str]:
    """A note where there are several students, and nothing chooses between them."""
    found = shippable(recipe, CHOOSING_SPLIT)
    if len(found) < 2:
        return []
    number, last = found[-1]
    source = sources[recipe.task_name(recipe.phases[number])]
    if CHOOSING_SPLIT in source.splits:
        return []
    return [
        f"the students are {', '.join(name for _, name in found)}, and there is no split "
        f"{CHOOSING_SPLIT!r} to choose by: the last, {last}, is shipped. ships=NAME says another."
    ]


def padding_notes(recipe: Recipe, models: Models) -> Iterator[str]:
    if recipe.padding == "never":
        for location, config in models.configs.items():
            if lacks_flashdeberta(config):
                yield (
                    f"padding=never: on a GPU {location} ({config.model_type}) needs the package "
                    "flashdeberta, which is not installed."
                )


SHOWN = 20
"""Classes named in a line."""

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
    """Classes of single examples, as where each text has a label of its own; classes without an
    example, and copies of a text with other labels.

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
