"""Groups: examples that belong together, of which none may be on the other side of a split.

Two examples are of one group where they have a mark in common, or where a chain of others joins
them. The marks are the column that the recipe names (a document, a patient, a file of docstrings),
and the text itself without case and white space: near-copies are one group always. And what else
the data name beside an example: the teacher that the routing policy `column` follows, and an id, by
which a teacher's file of predictions may say what it is of.

Routing that was fitted on a split (temperatures, a gate) looks too good on it, and so does every
student that follows it. So where an expertise phase reads the split by which epochs and students
are chosen, each of its examples is in one of two parts, one to fit on and the other to choose by.
Both have as many of each class, and groups are whole.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ds_distill.data.columns import (
    BATCH,
    arrow_column,
    as_numpy,
    build_once,
    example_keys,
    write_columns,
)
from ds_distill.errors import UserError
from ds_distill.keys import content_keys, distinct_keys, hash_keys, name_id, numbered_keys

VERSION = 2
"""Part of the files' names: raise it when the same examples get other marks."""

MARKS = ("copy", "group")
"""Columns of marks, int64: hashes of the text as near-copies have it, and of the named group; of
an example that is in none the former again."""

FEWEST = 30
"""Groups from which on a bootstrap's 95% interval holds the truth nearly as often as it says: of 10
it does in 89% of cases."""

_SCHEMA = pa.schema([(name, pa.int64()) for name in MARKS])

_MARK, _ORDER, _PART = 109, 111, 112
"""Purposes of hashes: marks; the order in which groups are assigned, and to which part."""


@dataclass(frozen=True)
class Groups:
    """What N examples have in common."""

    keys: np.ndarray
    """int64 [N, 2], content keys."""
    marks: np.ndarray
    """int64 [N, M]: examples with the same value in a column are of one group."""

    @staticmethod
    def of(data: datasets.Dataset) -> Groups:
        """data: a split with the columns `MARKS`, or without: then copies of a text alone are one
        group."""
        marked = [name for name in MARKS if name in data.column_names] or ["key_hi"]
        marks = np.stack([as_numpy(data, name) for name in marked], axis=1)
        return Groups(example_keys(data), marks)

    @staticmethod
    def joined(parts: Sequence[Groups]) -> Groups:
        """Those of several splits, as if they were one."""
        return Groups(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.marks for part in parts]),
        )

    def __len__(self) -> int:
        """N."""
        return len(self.keys)

    @cached_property
    def group_keys(self) -> np.ndarray:
        """The smallest key in the group of each example, whatever their order: int64 [N, 2]. An
        example alone has its own."""
        number = components(self.marks)
        order = np.lexsort((self.keys[:, 1], self.keys[:, 0], number))
        firsts = order[np.unique(number[order], return_index=True)[1]]
        return self.keys[firsts][number]

    def touch(self, others: Groups) -> np.ndarray:
        """Whether the group of each example has one of the others in it: bool [N]."""
        number = components(Groups.joined([self, others]).marks)
        return np.isin(number[: len(self)], number[len(self) :])


def components(marks: np.ndarray) -> np.ndarray:
    """The number of each example's group, from 0 on: int64 [N]. Near-linear in N.

    marks: int64 [N, M], see `Groups`.
    """
    nodes, count = [], 0  # one for each value of each column; an example joins its own
    for column in marks.T:
        values, number = np.unique(column, return_inverse=True)
        nodes.append(number + count)
        count += len(values)
    one = np.concatenate([nodes[0]] * (len(nodes) - 1) or [nodes[0]])
    other = np.concatenate(nodes[1:] or [nodes[0]])
    edges = coo_array((np.ones(len(one), dtype=bool), (one, other)), shape=(count, count))
    numbers = connected_components(edges, directed=False)[1][nodes[0]]
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)


# ------------------------------------------------------------------------------- where from


def with_marks(data: datasets.Dataset, cache_folder: Path) -> datasets.Dataset:
    """Examples with the columns `MARKS`, made once and then read from a file.

    data: with `text` and perhaps `text_b`, or with `words`. Where questions have `answers`, what
        they have in common is their context, `text_b`. `group`, int64, may be there, null where an
        example is in none.
    """
    if "copy" in data.column_names:
        return data
    digest = xxhash.xxh3_128_hexdigest(f"{VERSION} {data._fingerprint}".encode())
    path = build_once(cache_folder / f"marks-{digest}.arrow", lambda path: _write(data, path))
    rest = data.remove_columns("group") if "group" in data.column_names else data
    return datasets.concatenate_datasets([rest, datasets.Dataset.from_file(str(path))], axis=1)


def _write(data: datasets.Dataset, path: Path) -> None:
    fields = [name for name in ("words", "text", "text_b", "answers") if name in data.column_names]
    fields = ["text_b"] if "answers" in fields else fields
    named = ["group"] if "group" in data.column_names else []

    def batches() -> Iterator[list[Any]]:
        for table in data.select_columns([*fields, *named]).with_format("arrow").iter(BATCH):
            copies = pa.array(copy_marks(*(table[name].to_pylist() for name in fields)))
            yield [copies, pc.coalesce(*(table[name] for name in named), copies)]

    write_columns(path, _SCHEMA, batches(), "looks for near-copies")


def copy_marks(*fields: Sequence[Any]) -> np.ndarray:
    """The same for examples that differ in case and white space alone: int64 [N].

    fields: of each example a text or a list of words, one or two.
    """
    plain = [[plain_text(text) for text in field] for field in fields]
    return hash_keys(content_keys(*plain), _MARK)


def plain_text(text: str | list[str]) -> str:
    """In Unicode's compatibility form, without case, and with one space for white space; a text of
    nothing else as it is."""
    text = text if isinstance(text, str) else " ".join(text)
    # Punctuation stays: "C" is not "C#", and ":)" is all that tells some texts from others.
    folded = (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold()
    return " ".join(folded.split()) or text


# ------------------------------------------------------------------------------- into parts


def strata_of(labels: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The number of what each unit is: its class, or the set of its classes. int64 [N], -1 without
    labels.

    labels: int64 [R], or [N, L] of 0 and 1; -1 where there are none. offsets: int64 [N + 1]: the
        first row of each one, and R.
    """
    if len(labels) >= len(offsets):
        has = np.zeros((len(offsets) - 1, labels.max(initial=0) + 1), dtype=np.int64)
        owners, labelled = np.repeat(np.arange(len(has)), np.diff(offsets)), labels >= 0
        has[owners[labelled], labels[labelled]] = 1
        labels = np.where(has.any(axis=1, keepdims=True), has, -1)
    if labels.ndim == 1:
        return labels
    sets = np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    return np.where((labels >= 0).all(axis=1), sets, -1)


def assigned(group_keys: np.ndarray, strata: np.ndarray, parts: int, *stream: int) -> np.ndarray:
    """The part of each example, from 0 to `parts` - 1: int64 [N]. Groups are whole, and each part
    has as many of each stratum as that allows: a group is of the stratum that most of its examples
    are of, and those of a stratum are assigned in turns, the large ones first. In a turn each of
    `parts` groups comes to another part, which one by a hash of its key and the stream; so the
    parts do not depend on the order of the examples.

    group_keys: int64 [N, 2], see `Groups.group_keys`. strata: int64 [N], see `strata_of`.
    """
    group, keys = numbered_keys(group_keys), group_keys[distinct_keys(group_keys)]
    sizes = np.bincount(group, weights=strata >= 0, minlength=len(keys))
    stratum = _most_frequent(group, strata)
    order = np.lexsort((hash_keys(keys, *stream, _ORDER), -sizes, stratum))
    ordered = stratum[order]
    starts = np.searchsorted(ordered, ordered)  # the first position of each one's stratum
    turn = np.empty(len(order), dtype=np.int64)
    turn[order] = (np.arange(len(order)) - starts) // parts
    order = np.lexsort((hash_keys(keys, *stream, _PART), turn, stratum))
    part = np.empty(len(order), dtype=np.int64)
    part[order] = np.arange(len(order)) % parts
    return part[group]


def _most_frequent(group: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """The stratum that most labelled examples of each group are of, of equals the first: int64 [G];
    -1 without any. group: int64 [N], numbers from 0 on."""
    order = np.lexsort((strata, group))
    pairs = np.stack([group, strata], axis=1)[order]
    begins = np.flatnonzero(np.diff(pairs, axis=0, prepend=pairs[:1] - 1).any(axis=1))
    counts = np.diff(begins, append=len(pairs)) * (pairs[begins, 1] >= 0)
    counted = pairs[begins]
    order = np.lexsort((counted[:, 1], -counts, counted[:, 0]))
    firsts = np.unique(counted[order, 0], return_index=True)[1]
    return np.asarray(counted[order][firsts, 1])


def few_groups(split: str, group_keys: np.ndarray) -> str | None:
    """What to say of intervals over so few groups; None where they are enough.

    group_keys: int64 [N, 2], see `Groups.group_keys`, of the examples that are resampled.
    """
    groups, examples = len(np.unique(group_keys, axis=0)), len(group_keys)
    if groups >= FEWEST:
        return None
    what = f"{groups} examples" if groups == examples else f"{groups} groups of examples"
    return (
        f"split {split} has {what}, and 95% intervals over fewer than {FEWEST} are too narrow: of "
        "10 they hold the truth in 89% of cases. Take differences that are just beyond chance for "
        "undecided."
    )


# ------------------------------------------------------------------------------------------- names


TEACHER = "teacher"
"""Column of a split, str: the teacher's name; null where none is named."""

ID = ("id_hi", "id_lo")
"""Columns of a split, int64: the two halves of a hash of the example's id; null without one."""

NAMED = {"group": ("group",), "teacher": (TEACHER,), "id": ID}
"""By key of `task.data.columns`: the columns that are made of the names that stand there."""


def of_whole_example(examples: datasets.Dataset) -> dict[str, datasets.Value]:
    """The columns that a window has as its whole example has them, with their types."""
    types = {**dict.fromkeys(MARKS, "int64"), TEACHER: "string"}
    there = {*examples.column_names}
    return {name: datasets.Value(kind) for name, kind in types.items() if name in there}


def named_columns(key: str, names: list[str | None]) -> list[pa.Array]:
    """The columns `NAMED` of a key, of the names of some examples, None where one has none."""
    if key == "teacher":
        return [pa.array(names, pa.string())]
    keys = content_keys([name or "" for name in names])
    columns = [hash_keys(keys, _MARK)] if key == "group" else [keys[:, 0], keys[:, 1]]
    nothing = np.array([name is None for name in names])
    return [pa.array(column, mask=nothing) for column in columns]


def teacher_names(split: datasets.Dataset) -> tuple[list[str], np.ndarray] | None:
    """The names that stand in a split, and of each of its N examples the number of its name, int64
    [N], -1 where none is named. None where the split has no such column."""
    if TEACHER not in split.column_names:
        return None
    column = arrow_column(split, TEACHER)
    encoded = pc.dictionary_encode(column.combine_chunks())
    numbers = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), numbers.astype(np.int64)


def teacher_ids(split: datasets.Dataset) -> np.ndarray | None:
    """The `name_id` of the teacher of each example, 0 where none is named: int64 [N]. None where
    the split has no such column."""
    named = teacher_names(split)
    if named is None:
        return None
    names, numbers = named
    return np.array([*map(name_id, names), 0], dtype=np.int64)[numbers]


CHOOSING_SPLIT = "validation"
"""The split by which epochs and students are chosen."""

PART = 104
"""Purpose of the hashes by which groups are assigned to the two parts."""

FEWEST_EXAMPLES = 20
"""Labelled examples that a fit needs, for five folds."""


def fitting_part(strata: np.ndarray, groups: Groups, split: str, seed: int) -> np.ndarray:
    """Indices of a split's labelled examples that may be fitted on, ascending: about half of them
    in the choosing split, all of them in any other.

    strata: int64 [N], see `strata_of`. groups: of the split's N examples.

    Raises UserError when they are too few.
    """
    chosen = labelled = strata >= 0
    part = ""
    if split == CHOOSING_SPLIT:
        chosen = labelled & _fits(strata, groups, seed)
        part = f" of which {chosen.sum()} may be fitted on (the others choose epochs and students),"
    if chosen.sum() < FEWEST_EXAMPLES:
        raise UserError(
            f"split {split!r} has {labelled.sum()} labelled examples,{part} but "
            f"fitting the routing needs at least {FEWEST_EXAMPLES}. Add examples to it, or name "
            "a larger split, e.g. phases.expertise.split=train."
        )
    return np.flatnonzero(chosen)


def choosing_part(
    strata: np.ndarray, groups: Groups, fitted: Mapping[str, Groups], seed: int
) -> np.ndarray:
    """Indices of the choosing split's examples that choose, ascending: those of whose groups
    nothing is fitted on.

    strata, groups: as in `fitting_part`, of the choosing split.
    fitted: groups of each split that an expertise phase reads, by the split's name.

    Raises UserError when there are none.
    """
    free = np.ones(len(strata), dtype=bool)
    for split, others in fitted.items():
        free &= ~(_fits(strata, groups, seed) if split == CHOOSING_SPLIT else groups.touch(others))
    if fitted and not (free & (strata >= 0)).any():
        raise UserError(
            f"split {CHOOSING_SPLIT!r}: routing is fitted on all of its {len(strata)} examples "
            f"(in split {', '.join(fitted)}), so none is left to choose epochs and students. "
            "Add examples to it, or name another split with phases.expertise.split=NAME."
        )
    return np.flatnonzero(free)


def _fits(strata: np.ndarray, groups: Groups, seed: int) -> np.ndarray:
    """Whether each example is in the fitting part: bool [N]."""
    return assigned(groups.group_keys, strata, 2, seed, PART) == 0
