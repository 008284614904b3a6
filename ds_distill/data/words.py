"""Examples that are lists of words: where each word's token stands in a model's view."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from tokenizers import Regex, pre_tokenizers

from ds_distill.data.columns import as_numpy, flat_lists
from ds_distill.data.labels import LabelIds
from ds_distill.data.readers import Reader, check_text, kind_of, text_of, value_of
from ds_distill.data.span_text import check_own_text, true_offsets
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.recipe.data import Columns
from ds_distill.recipe.tags import OUTSIDE
from ds_distill.recipe.tasks import LETTER_WITHOUT_BLANKS

VERSION = 3
"""Part of the names of files that are made from words: raise it when the same rows give others."""

EXAMPLES = pa.schema(
    [
        ("words", pa.list_(pa.string())),
        ("label", pa.list_(pa.int16())),
        ("key_hi", pa.int64()),
        ("key_lo", pa.int64()),
        ("widened", pa.int32()),
    ]
)
"""Columns of converted examples: words; the class id of each one's tag, -1 where the split has no
tags; and how many of the text's spans have more than they say, see `widened_spans`."""

NO_TOKEN = -1
"""The position of a word that has no token in a view: the tokenizer drops it, or it is cut off."""


@dataclass(frozen=True)
class Words:
    """The words of N windows, R in all, one window's after the other's. A text, or the context of a
    question, that is too long for a view is several windows. A word that is in several is a row of
    each, and belongs to one of them."""

    offsets: np.ndarray
    """int64 [N + 1]: the first word of each window, and R."""
    counted: np.ndarray
    """bool [R]: whether a word belongs to its window, and has a token in the view of every model of
    the recipe. Others are rows of no loss, and those without a token count as O in every score."""
    text: np.ndarray | None = None
    """int64 [N]: the number of each window's text, ascending. None: each is the whole of one."""
    owned: np.ndarray | None = None
    """bool [R]: whether a word belongs to its window. None: all do."""
    spans: np.ndarray | None = None
    """int64 [R, 2]: of contexts: first character and end of each word."""
    answer_offsets: np.ndarray | None = None
    """int64 [N + 1]: of contexts: the first right answer of each, and A. A context's first window
    has all of them, the others none."""
    answers: np.ndarray | None = None
    """int64 [A, 2]: first character and end of each. They may overlap."""

    @staticmethod
    def of(split: datasets.Dataset) -> Words:
        """Of a prepared split; see `ds_distill.data.word_windows`."""
        offsets, counted = flat_lists(split, "counted")
        owned = flat_lists(split, "owned")[1]
        words = Words(offsets, counted & owned, as_numpy(split, "number"), owned)
        if "answer_starts" not in split.column_names:
            return words
        return replace(
            words,
            spans=_spans_of(split, "starts", "ends"),
            answer_offsets=flat_lists(split, "answer_starts")[0],
            answers=_spans_of(split, "answer_starts", "answer_ends"),
        )

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def examples(self) -> np.ndarray:
        """int64 [R]: the window of each word."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def of_examples(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of the words of some windows, int [B], in their order: int64 [n]."""
        return _of_lists(self.offsets, indices)[1]

    @property
    def firsts(self) -> np.ndarray:
        """The first window of each text: int64 [T]."""
        if self.text is None:
            return np.arange(len(self))
        return np.unique(self.text, return_index=True)[1]

    def of_whole_texts(self, chosen: np.ndarray) -> np.ndarray:
        """Of chosen windows, bool [N], those of whose text all are: bool [N]."""
        return chosen if self.text is None else ~np.isin(self.text, self.text[~chosen])

    def whole(self) -> tuple[np.ndarray, Words]:
        """The rows of the texts' words, each word once, in their order: int64 [W]; and the words of
        these T texts."""
        if self.text is None or self.owned is None:
            return np.arange(len(self.counted)), self
        rows = np.flatnonzero(self.owned)  # in the order of the texts and of their words
        _, text = np.unique(self.text, return_inverse=True)
        lengths = np.bincount(text[self.examples[rows]], minlength=len(self.firsts))
        answers = self.answer_offsets
        return rows, Words(
            np.concatenate([[0], np.cumsum(lengths)]),
            self.counted[rows],
            spans=None if self.spans is None else self.spans[rows],
            answer_offsets=None if answers is None else answers[[*self.firsts, -1]],
            answers=self.answers,
        )

    def at(self, indices: np.ndarray) -> Words:
        """Those of some windows; where they are of texts whole, in ascending order and of a text
        all."""
        offsets, rows = _of_lists(self.offsets, indices)
        of_windows = {"text": self.text}
        of_rows = {"counted": self.counted, "owned": self.owned, "spans": self.spans}
        found = {name: of[indices] for name, of in of_windows.items() if of is not None}
        found |= {name: of[rows] for name, of in of_rows.items() if of is not None}
        if self.answer_offsets is not None and self.answers is not None:
            found["answer_offsets"], kept = _of_lists(self.answer_offsets, indices)
            found["answers"] = self.answers[kept]
        return Words(offsets, **found)


def _spans_of(split: datasets.Dataset, starts: str, ends: str) -> np.ndarray:
    """int64 [..., 2]"""
    both = [flat_lists(split, name)[1] for name in (starts, ends)]
    return np.stack(both, axis=1).astype(np.int64)


def _of_lists(offsets: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some lists, int [B], of those that begin at `offsets`, int64 [N + 1]: where each then begins,
    int64 [B + 1], and the numbers of their values, int64 [n]. It looks at these lists alone:
    differences over all N would be most of a micro-batch's time."""
    lengths = offsets[indices + 1] - offsets[indices]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return ends, np.repeat(offsets[indices] - ends[:-1], lengths) + np.arange(ends[-1])


def word_keys(examples: Sequence[Sequence[Any]]) -> np.ndarray:
    """Content keys of lists of words, or of lists of such lists: int64 [N, 2]. Those that differ
    have keys that differ, also where the words are the same letters cut elsewhere."""
    return content_keys([json.dumps(list(words), ensure_ascii=False) for words in examples])


@dataclass(frozen=True)
class WordColumns:
    """Where the rows of a file have their words and tags."""

    words: str
    """A list of words, or a text."""
    tags: str
    """A list of tags, one for each word; or of spans of the text."""
    in_text: bool
    """Whether it is a text with spans."""

    @staticmethod
    def of(columns: Columns, present: Collection[str]) -> WordColumns:
        """present: the names of the file's columns."""
        if columns.tokens not in present and columns.text in present:
            return WordColumns(columns.text, columns.spans, in_text=True)
        return WordColumns(columns.tokens, columns.tags, in_text=False)

    def words_in(self, row: Mapping[str, Any], location: str) -> list[str]:
        """The words of a row. Raises UserError where there is none."""
        if not self.in_text:
            return _words(row, self.words, location)
        words: list[str] = self.words_of_row(text_of(row, self.words, location))
        if not words:
            raise UserError(f"{location}: {self.words!r} holds no word. Take the row out.")
        return words

    def example(
        self, row: Mapping[str, Any], location: str, ids: LabelIds | None, lost: list[Lost]
    ) -> tuple[bool, list[str], list[int], int]:
        """Whether a row has tags, its words, class ids, and how many of its spans have more than
        they say. Raises UserError where it breaks a rule.

        ids: None where no tags are read. lost: spans that are are put here.
        """
        words = self.words_in(row, location)
        tags = None if ids is None else row.get(self.tags)
        if ids is None or tags is None:
            return False, words, [-1] * len(words), 0
        widened = 0
        if self.in_text:
            spans = self.spans_in(row, tags, location)
            lost += [(location, *one) for one in lost_spans(*spans)]
            tags, widened = tags_of_spans(*spans), widened_spans(*spans)
        return True, words, _tags(tags, words, self, ids, location), widened

    def tags_in(self, row: Mapping[str, Any], value: Any, location: str) -> list[str]:
        """A tag for each word of a row's text, by spans of it. Raises UserError for others, and for
        spans that would be lost.

        value: what stands in the column of spans.
        """
        spans, words = self.spans_in(row, value, location)
        refuse_lost([(location, *lost) for lost in lost_spans(spans, words)], self)
        return tags_of_spans(spans, words)

    def spans_in(
        self, row: Mapping[str, Any], value: Any, location: str
    ) -> tuple[list[Span], list[tuple[int, int]]]:
        """The spans of a row's text, in their order, and its words. Raises UserError for what is
        none."""
        text = text_of(row, self.words, location)
        return _spans(value, text, self, location), words_of(text)

    def words_of_row(self, value: Any) -> Any:
        """The words of a row's value, where it is as it should be."""
        if self.in_text and isinstance(value, str):
            return [value[start:end] for start, end in words_of(value)]
        return value


def words_of(text: str) -> list[tuple[int, int]]:
    """The words of a text, first character and end: what stands between white space, and each
    punctuation mark, as BERT's tokenizers cut it before they look at their vocabulary; and each
    letter of a script that is written without blanks, or a sentence would be a word."""
    return [span for _, span in _CUT.pre_tokenize_str(text)]


_CUT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.BertPreTokenizer(),
        pre_tokenizers.Split(Regex(LETTER_WITHOUT_BLANKS), "isolated"),
    ]
)


def entity_tags(reader: Reader, columns: WordColumns) -> list[str]:
    """O, and B- and I- of each type of a file's spans, sorted. Raises UserError for a row whose
    spans are not as they should be."""
    types: set[str] = set()
    for location, row in reader.rows([columns.words, columns.tags]):
        text = text_of(row, columns.words, location)
        types.update(kind for _, _, kind in _spans(row.get(columns.tags), text, columns, location))
    return [OUTSIDE, *(f"{part}-{kind}" for kind in sorted(types) for part in "BI")]


def _words(row: Mapping[str, Any], name: str, location: str) -> list[str]:
    words = value_of(row, name, location)
    if not isinstance(words, list) or not words:
        raise UserError(
            f"{location}: {name!r} must be a list of words, at least one, got "
            f"{'an empty list' if words == [] else kind_of(words)}. Write the words as a list of "
            "texts, or take the row out."
        )
    for number, word in enumerate(words):
        check_text(word, f"{location}: word {number} of {name!r}")
    return words


Span = tuple[int, int, str]
"""First character, end and type of an entity."""

Lost = tuple[str, Span, str]
"""Where a span is that tags cannot tell, the span, and why."""


def _spans(value: Any, text: str, columns: WordColumns, location: str) -> list[Span]:
    """The entities of a text, in their order."""
    if value is None:
        return []
    what = f"{location}: {columns.tags!r}"
    if not isinstance(value, list):
        raise UserError(f"{what} must be a list of {{start, end, type}}, got {kind_of(value)}.")
    spans: list[Span] = []
    for number, span in enumerate(value):
        values: list[Any] = [span.get(key) for key in _SPAN] if isinstance(span, dict) else []
        if list(map(type, values)) != [int, int, str] or not 0 <= values[0] < values[1] <= len(
            text
        ):
            raise UserError(
                f"{what}: span {number} must have a start, an end and a type, and lie in the "
                f"{len(text)} characters of the text, got {span!r}. {true_offsets(span, text)}"
                "Correct it or take it out."
            )
        check_own_text(span, text, f"{what}: span {number}")
        spans.append((values[0], values[1], values[2]))
    spans.sort()
    for one, other in pairwise(spans):
        if other[0] < one[1]:
            raise UserError(
                f"{what}: the spans {one} and {other} overlap, and a word has one tag. Keep one of "
                "them."
            )
    return spans


_SPAN = ("start", "end", "type")


def tags_of_spans(spans: list[Span], words: list[tuple[int, int]]) -> list[str]:
    """A tag for each word: of the first span that holds some of its characters. A span that begins
    or ends inside of a word so has the whole word."""
    tags, last = [], None
    for start, end in words:
        here = next((span for span in spans if span[0] < end and start < span[1]), None)
        tags.append(OUTSIDE if here is None else f"{'I' if here == last else 'B'}-{here[2]}")
        last = here
    return tags


def lost_spans(spans: list[Span], words: list[tuple[int, int]]) -> Iterator[tuple[Span, str]]:
    """The spans that tags cannot tell, in whole or in part, and why."""
    taken = 0
    for span, (first, after) in zip(spans, _held(spans, words), strict=True):
        if first == after:
            yield span, "holds no word"
        elif first < taken:
            yield span, "shares a word with the span before it, and a word has one tag"
        taken = max(taken, after)


def widened_spans(spans: list[Span], words: list[tuple[int, int]]) -> int:
    """How many spans begin or end inside of a word, and have the whole word by their tags."""
    held = zip(spans, _held(spans, words), strict=True)
    return sum(
        words[first][0] < start or end < words[after - 1][1]
        for (start, end, _), (first, after) in held
        if first < after
    )


def _held(spans: list[Span], words: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first word that has a character of each span, and the one after the last."""
    starts, ends = [start for start, _ in words], [end for _, end in words]
    return [(bisect_right(ends, start), bisect_left(starts, end)) for start, end, _ in spans]


def refuse_lost(lost: Sequence[Lost], columns: WordColumns) -> None:
    """Raises UserError where there is one."""
    if not lost:
        return
    (location, span, why), *others = lost
    locations = list(dict.fromkeys(other for other, _, _ in others))
    dots = ", ..." if len(locations) > _SHOWN else ""
    more = f" {len(others):,} more are lost so: {', '.join(locations[:_SHOWN])}{dots}."
    raise UserError(
        f"{location}: {columns.tags!r}: the span {span} {why}, so it would be lost. Correct its "
        f"ends, join it with the other, or take one out.{more if others else ''}"
    )


_SHOWN = 3
"""Locations that are named in a message, beside the first."""


def _tags(
    value: Any, words: list[str], columns: WordColumns, ids: LabelIds, location: str
) -> list[int]:
    if not isinstance(value, list) or len(value) != len(words):
        got = f"{len(value)} of them" if isinstance(value, list) else kind_of(value)
        raise UserError(
            f"{location}: {columns.tags!r} must be a list of one tag for each of the "
            f"{len(words)} words in {columns.words!r}, got {got}. Correct the row or take it "
            "out."
        )
    tags = [ids.of_value(tag, location) for tag in value]
    if min(tags) < 0:
        raise UserError(
            f"{location}: word {tags.index(-1)} has no tag in {columns.tags!r}. Give each word of "
            "a row a tag, or write null in place of the whole list."
        )
    return tags
