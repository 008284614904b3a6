"""Words of texts, and spans of characters in the rows of data: the entities of a text, and the
answers in a context."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, pre_tokenizers

from ds_distill.data.readers.base import kind_of
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.recipe.tags import OUTSIDE
from ds_distill.recipe.tasks import LETTER_WITHOUT_BLANKS

VERSION = 3
"""Part of the names of files that are made from words: raise it when the same rows give others."""


def word_keys(examples: Sequence[Sequence[Any]]) -> np.ndarray:
    """Content keys of lists of words, or of lists of such lists: int64 [N, 2]. Those that differ
    have keys that differ, also where the words are the same letters cut elsewhere."""
    return content_keys([json.dumps(list(words), ensure_ascii=False) for words in examples])


def texts_of(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """The words that stand at some characters of a text."""
    return [text[start:end] for start, end in spans]


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


# ------------------------------------------------------------------------------------------- spans

Span = tuple[int, int, str]
"""First character, end and type of an entity."""

_UNITS = {
    "UTF-16 code units, as JavaScript does": ("utf-16-le", 2),
    "bytes of UTF-8": ("utf-8", 1),
}
"""What tools count in place of characters: the encoding, and the bytes of a unit."""


def entities_of(value: Any, text: str, what: str) -> list[Span]:
    """The entities of a text, in their order. Raises UserError for what are none.

    value: what a row has in the column of spans. what: it is, at the start of a message.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"{what} must be a list of {{start, end, type}}, got {kind_of(value)}.")
    spans: list[Span] = []
    for number, span in enumerate(value):
        start, end = _ends(span, text)
        kind = span.get("type") if isinstance(span, dict) else None
        if start is None or end is None or type(kind) is not str:
            raise UserError(
                f"{what}: span {number} must have a start, an end and a type, and lie in the "
                f"{len(text)} characters of the text, got {span!r}. {true_offsets(span, text)}"
                "Correct it or take it out."
            )
        _check_own_text(span, text, f"{what}: span {number}")
        spans.append((start, end, kind))
    spans.sort()
    for one, other in pairwise(spans):
        if other[0] < one[1]:
            raise UserError(
                f"{what}: the spans {one} and {other} overlap, and a word has one tag. Keep one of "
                "them."
            )
    return spans


class Tagged(NamedTuple):
    """What a text's spans are by its words."""

    tags: list[str]
    """Of each word: of the first span that holds some of its characters. A span that begins or ends
    inside of a word so has the whole word."""
    lost: list[tuple[Span, str]]
    """The spans that tags cannot tell, in whole or in part, and why."""
    widened: int
    """How many spans begin or end inside of a word, and have the whole word by their tags."""


def tagged(spans: Sequence[Span], words: Sequence[tuple[int, int]]) -> Tagged:
    """spans: in their order, of which none overlap. words: first character and end of each."""
    starts, ends = [start for start, _ in words], [end for _, end in words]
    tags, lost, widened, taken = [OUTSIDE] * len(words), [], 0, 0
    for span in spans:
        start, end, kind = span
        first, after = bisect_right(ends, start), bisect_left(starts, end)
        if first == after:
            lost.append((span, "holds no word"))
            continue
        if first < taken:
            lost.append((span, "shares a word with the span before it, and a word has one tag"))
        for word in range(max(first, taken), after):
            tags[word] = f"{'I' if word > max(first, taken) else 'B'}-{kind}"
        widened += starts[first] < start or end < ends[after - 1]
        taken = max(taken, after)
    return Tagged(tags, lost, widened)


# ----------------------------------------------------------------------------------- answers


def answers_of(answers: Any, context: str, what: str) -> list[dict[str, Any]]:
    """The answers to a question, {text, start} each, one or more, of which one is enough. Raises
    UserError for others.

    answers: what a row has. what: it is, at the start of a message.
    """
    answers = _from_hub(answers, what)
    if not isinstance(answers, list):
        raise UserError(f"{what} must be a list of {{text, start}}, got {kind_of(answers)}.")
    if not answers:
        raise UserError(
            f"{what} is an empty list: questions without an answer in their context are not "
            "supported. Take the row out, or write null in every row of a split without answers."
        )
    return [_answer(answer, number, context, what) for number, answer in enumerate(answers)]


def parts_of(answers: Any, context: str, what: str) -> list[dict[str, Any]]:
    """The same of any number of answers, all of them right together, or none: each {start, end},
    {text, start}, or the string `start end`, where `;` stands between the parts of one that goes on
    elsewhere (as the clinical notes have them)."""
    answers = _from_hub(answers, what)
    if not isinstance(answers, list):
        raise UserError(
            f"{what} must be a list of {{start, end}}, empty where nothing is right, got "
            f"{kind_of(answers)}."
        )
    found = []
    for number, answer in enumerate(answers):
        if isinstance(answer, dict) and answer.get("end") is None:
            found.append(_answer(answer, number, context, what))
            continue
        for part in _parts(answer):
            start, end = _ends(part, context)
            if start is None:
                raise UserError(
                    f"{what}: answer {number} must have a start and an end and lie in the "
                    f"{len(context)} characters of the context, got {answer!r}. "
                    f"{true_offsets(answer, context)}Correct it or take it out."
                )
            _check_own_text(part, context, f"{what}: answer {number}")
            found.append({"text": context[start:end], "start": start})
    return found


def _from_hub(answers: Any, what: str) -> Any:
    """{text: [...], answer_start: [...]} as a list of answers; all else as it is."""
    if not isinstance(answers, dict) or not {"text", "answer_start"} <= answers.keys():
        return answers
    texts, starts = answers["text"], answers["answer_start"]
    if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
        raise UserError(
            f"{what}: `text` and `answer_start` must be lists as long as each other, got "
            f"{answers!r}. Give each text its start."
        )
    return [{"text": text, "start": at} for text, at in zip(texts, starts, strict=True)]


def _answer(answer: Any, number: int, context: str, what: str) -> dict[str, Any]:
    text, start = (answer.get("text"), answer.get("start")) if isinstance(answer, dict) else ("", 0)
    if type(text) is not str or type(start) is not int or not text:
        raise UserError(
            f"{what}: answer {number} must have a text and a start, got {answer!r}. Correct it "
            "or take it out."
        )
    there = context[start : start + len(text)] if start >= 0 else ""
    if there != text:
        raise UserError(
            f"{what}: answer {number} is {text!r}, which does not stand in the context from "
            f"character {start} on (there is {there!r}). {true_offsets(answer, context)}Correct "
            "`start`, which counts characters, or take the row out."
        )
    return {"text": text, "start": start}


def _parts(answer: Any) -> list[Any]:
    """{start, end} of each part of a string; else the answer as it is."""
    if not (isinstance(answer, str) and re.fullmatch(r"\d+ \d+(;\d+ \d+)*", answer, re.ASCII)):
        return [answer]
    parts = (part.split(" ") for part in answer.split(";"))
    return [{"start": int(start), "end": int(end)} for start, end in parts]


# --------------------------------------------------------------------------------- characters


def _ends(span: Any, text: str) -> tuple[int, int] | tuple[None, None]:
    """First character and end of {start, end}, where both are there and lie in the text."""
    start, end = (span.get("start"), span.get("end")) if isinstance(span, dict) else (None, None)
    if type(start) is type(end) is int and 0 <= start < end <= len(text):
        return start, end
    return None, None


def _check_own_text(span: dict[str, Any], text: str, what: str) -> None:
    """Raises UserError for a span, {start, end} and perhaps its own text, that has another one than
    the characters from its start up to its end. what: it is, at the start of a message."""
    its_text, there = span.get("text"), text[span["start"] : span["end"]]
    if its_text not in (None, there):
        raise UserError(
            f"{what} is {its_text!r}, and its characters {span['start']} to {span['end']} are "
            f"{there!r}. {true_offsets(span, text)}Correct the numbers, which count characters, or "
            "take the text out."
        )


def true_offsets(span: Any, text: str) -> str:
    """A sentence on where a span's own text stands, where it has one and that does: its start may
    count other units than characters."""
    start, its_text = (span.get("start"), span.get("text")) if isinstance(span, dict) else (0, None)
    if type(start) is not int or not isinstance(its_text, str) or not its_text:
        return ""
    for unit, (encoding, size) in _UNITS.items():
        before = text.encode(encoding)[: max(start, 0) * size].decode(encoding, errors="ignore")
        at, units = len(before), len(before.encode(encoding)) // size
        if at != start == units and text.startswith(its_text, at):
            return f"It counts {unit}: in characters it is {at} to {at + len(its_text)}. "
    at = text.find(its_text, max(start, 0))
    at = text.find(its_text) if at < 0 else at
    return f"It stands at {at} to {at + len(its_text)}, exclusive. " if at >= 0 else ""
