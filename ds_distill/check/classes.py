"""The classes of a task's examples: how many each split has, and what looks like a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, takewhile

import datasets
import numpy as np
import pyarrow as pa

from ds_distill.data.columns import arrow_column, as_numpy, flat_values
from ds_distill.data.sources import Source

SHOWN = 20
"""Classes named in a line."""

PAIRS = 5
"""Pairs of labels named in a note."""

TEXTS = 3
"""Texts named in a note."""

RARE = 0.05
"""Of a class's examples as many another one may have at most to be taken for its misspelling."""

LONG_ENOUGH = 4
"""Letters of a name in which one may be a typing error: `no` and `not` are two words."""

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
    near = list(near_labels(labels, total, tags=of_words))
    if near:
        named = []
        for rare, frequent, how in near[:PAIRS]:
            location = None if of_words else _location(source, splits, rare)
            at = f", e.g. {location}" if location else ""
            named.append(
                f"{labels[rare]!r} ({total[rare]:,}{at}) and {labels[frequent]!r} "
                f"({total[frequent]:,}) differ in {how}"
            )
        more = f"; and {len(near) - PAIRS:,} more pairs" if len(near) > PAIRS else ""
        yield f"labels that may be one class: {'; '.join(named)}{more}. If so, correct the rows."
    for split, of_split in counts.items():
        lacking = [labels[number] for number in np.flatnonzero(of_split == 0).tolist()]
        if lacking:
            shown = ", ".join(lacking[:SHOWN]) + (", ..." if len(lacking) > SHOWN else "")
            yield f"split {split!r} has no example of {len(lacking):,} of the classes: {shown}."
    if not of_words:
        yield from _contradictions(source, labels, {split: splits[split] for split in counts})


def near_labels(
    labels: Sequence[str], counts: np.ndarray, *, tags: bool
) -> Iterator[tuple[int, int, str]]:
    """Pairs of labels that may be one, the rarer first, and how they differ.

    counts: int64 [C], examples of each. tags: whether they are tags of words, such as B-PER and
        I-PER, which a letter tells apart.
    """
    plain = [" ".join(label.split()).casefold() for label in labels]
    by_form: dict[str, list[int]] = {}
    for number, form in enumerate(plain):
        by_form.setdefault(form, []).append(number)
        # Two names one letter apart have a form in common from which a letter is gone, or all.
        if not tags and len(form) >= LONG_ENOUGH:
            for at in range(len(form)):
                by_form.setdefault(f"\0{form[:at]}{form[at + 1 :]}", []).append(number)
            by_form.setdefault(f"\0{form}", []).append(number)
    seen: set[tuple[int, int]] = set()
    for numbers in by_form.values():
        for pair in combinations(dict.fromkeys(numbers), 2):
            if pair in seen:
                continue
            seen.add(pair)
            rare, frequent = sorted(pair, key=lambda number: int(counts[number]))
            if plain[rare] == plain[frequent]:
                yield rare, frequent, "case or blanks alone"
            elif counts[rare] <= RARE * counts[frequent] and _is_one_letter(
                plain[rare], plain[frequent]
            ):
                yield rare, frequent, "one letter"


def _is_one_letter(one: str, other: str) -> bool:
    """Whether a letter was left out, added or replaced: no digit, and no word of one letter."""
    shorter, longer = sorted((one, other), key=len)
    alike = (a == b for a, b in zip(shorter, longer, strict=False))
    at, replaced = sum(takewhile(bool, alike)), len(one) == len(other)
    changed = longer[at : at + 1] + (shorter[at : at + 1] if replaced else "")
    beside = longer[:at][-1:] + longer[at + 1 : at + 2]
    return longer[at + 1 :] == shorter[at + replaced :] and changed.isalpha() and beside.isalpha()


def _location(source: Source, splits: Mapping[str, datasets.Dataset], label: int) -> str | None:
    """Where the first example of a label stands."""
    for split, data in splits.items():
        column = arrow_column(data, "label")
        rows = flat_values(column).reshape(len(column), -1)
        has = rows[:, label] == 1 if rows.shape[1] > 1 else rows[:, 0] == label
        if has.any():
            row = data[int(has.argmax())]
            key = row["key_hi"], row["key_lo"]
            return source.locations(split, {key}).get(key, f"in split {split}")
    return None


def _contradictions(
    source: Source, labels: Sequence[str], splits: Mapping[str, datasets.Dataset]
) -> Iterator[str]:
    """One note, of texts that stand in the data more than once, with other labels."""
    keys, codes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for data in splits.values():
        keys.append(as_numpy(data, "key_hi"))  # half of a key tells texts apart well enough
        column = arrow_column(data, "label")
        codes += (_codes(column.slice(at, _BATCH)) for at in range(0, len(column), _BATCH))
    key, code = np.concatenate(keys), np.concatenate(codes)
    if not len(key):
        return
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(key[order]) != 0])
    least, most = (reduce.reduceat(code[order], starts) for reduce in (np.minimum, np.maximum))
    copies = np.diff(np.r_[starts, len(order)])
    bad = np.flatnonzero(least != most)
    if not len(bad):
        return
    bad = bad[np.argsort(order[starts[bad]])]  # of each the first comes first
    shown = "; ".join(
        _copies(source, labels, splits, order[starts[at] : starts[at] + copies[at]])
        for at in bad[:TEXTS]
    )
    yield (
        f"{len(bad):,} text(s) stand in the data more than once, with other labels "
        f"({copies[bad].sum():,} examples): {shown}. One of the labels is wrong, or the text does "
        "not say which is right."
    )


def _copies(
    source: Source,
    labels: Sequence[str],
    splits: Mapping[str, datasets.Dataset],
    rows: np.ndarray,
) -> str:
    """Where the copies of a text stand, and their labels. rows: of all splits, one after the
    other."""
    found, start = [], 0
    for split, data in splits.items():
        here = rows[(rows >= start) & (rows < start + len(data))] - start
        start += len(data)
        if not len(here):
            continue
        examples = data.select(here.tolist())
        key = examples[0]["key_hi"], examples[0]["key_lo"]
        locations = source.all_locations(split, {key: len(here)}).get(key, [])
        locations += [f"split {split}"] * (len(here) - len(locations))
        for location, row in zip(locations, examples, strict=True):
            found.append(f"{location} {_named(row['label'], labels)}")
    return ", ".join(found[: 2 * TEXTS]) + (", ..." if len(found) > 2 * TEXTS else "")


def _named(label: int | list[int], labels: Sequence[str]) -> str:
    if isinstance(label, int):
        return labels[label]
    return f"[{', '.join(name for name, has in zip(labels, label, strict=True) if has == 1)}]"


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each example's label or set of labels: int64 [n]."""
    rows = flat_values(column).reshape(len(column), -1).astype(np.int64)
    if rows.shape[1] == 1:
        return rows[:, 0]
    weights = np.random.default_rng(0).integers(2**62, size=rows.shape[1])
    with np.errstate(over="ignore"):
        return np.asarray((rows * weights).sum(axis=1))
