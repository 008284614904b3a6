"""Rows of questions about contexts, with the right answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ds_distill.data.readers import kind_of, text_of
from ds_distill.data.span_text import check_own_text, true_offsets
from ds_distill.data.words import words_of
from ds_distill.errors import UserError
from ds_distill.recipe.data import Columns

EXAMPLES = pa.schema(
    [
        ("text", pa.string()),
        ("text_b", pa.string()),
        ("answers", pa.list_(pa.struct([("text", pa.string()), ("start", pa.int64())]))),
        ("label", pa.int64()),
        ("key_hi", pa.int64()),
        ("key_lo", pa.int64()),
    ]
)
"""Columns of converted examples: question, context, right answers, and how many these are (-1 where
the split has none)."""


def example(
    row: Mapping[str, Any], columns: Columns, location: str, *, any_number: bool
) -> tuple[bool, str, str, list[dict[str, Any]] | None]:
    """Whether a row has answers, its question, its context, and the answers.

    any_number: whether a question may have any number of answers, all of them right together, and
        none. Else it has one or more, of which one is enough.

    Raises UserError where the row breaks a rule.
    """
    question = text_of(row, columns.question, location)
    context = text_of(row, columns.context, location)
    if any_number and not words_of(context):
        raise UserError(f"{location}: {columns.context!r} holds no word. Take the row out.")
    answers = row.get(columns.answers)
    if answers is not None:
        what = f"{location}: {columns.answers!r}"
        answers = (_spans if any_number else _answers)(_from_hub(answers, what), context, what)
    return answers is not None, question, context, answers


def _answers(answers: Any, context: str, what: str) -> list[dict[str, Any]]:
    """The answers of a row, where they are as they should be.

    what: they are, at the start of a message.
    """
    if not isinstance(answers, list):
        raise UserError(f"{what} must be a list of {{text, start}}, got {kind_of(answers)}.")
    if not answers:
        raise UserError(
            f"{what} is an empty list: questions without an answer in their context are not "
            "supported. Take the row out, or write null in every row of a split without answers."
        )
    return [_answer(answer, number, context, what) for number, answer in enumerate(answers)]


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
    keys = ("text", "start") if isinstance(answer, dict) else ()
    values: list[Any] = [answer.get(key) for key in keys]
    if list(map(type, values)) != [str, int] or not values[0]:
        raise UserError(
            f"{what}: answer {number} must have a text and a start, got {answer!r}. Correct it "
            "or take it out."
        )
    text, start = values
    there = context[start : start + len(text)] if start >= 0 else ""
    if there != text:
        raise UserError(
            f"{what}: answer {number} is {text!r}, which does not stand in the context from "
            f"character {start} on (there is {there!r}). {true_offsets(answer, context)}Correct "
            "`start`, which counts characters, or take the row out."
        )
    return {"text": text, "start": start}


def _spans(answers: Any, context: str, what: str) -> list[dict[str, Any]]:
    """Any number of answers: each {start, end}, {text, start}, or the string `start end`, where
    `;` stands between the parts of one that goes on elsewhere (as the clinical notes have them).

    what: they are, at the start of a message.
    """
    if not isinstance(answers, list):
        raise UserError(
            f"{what} must be a list of {{start, end}}, empty where nothing is right, got "
            f"{kind_of(answers)}."
        )
    spans = []
    for number, answer in enumerate(answers):
        if isinstance(answer, dict) and answer.get("end") is None:
            spans.append(_answer(answer, number, context, what))
            continue
        for start, end in _ranges(answer):
            if not (type(start) is type(end) is int and 0 <= start < end <= len(context)):
                raise UserError(
                    f"{what}: answer {number} must have a start and an end and lie in the "
                    f"{len(context)} characters of the context, got {answer!r}. "
                    f"{true_offsets(answer, context)}Correct it or take it out."
                )
            if isinstance(answer, dict):
                check_own_text(answer, context, f"{what}: answer {number}")
            spans.append({"text": context[start:end], "start": start})
    return spans


def _ranges(answer: Any) -> list[tuple[Any, Any]]:
    """First character and end of each part of an answer; of what is none, None and None."""
    if isinstance(answer, dict):
        return [(answer.get("start"), answer.get("end"))]
    if isinstance(answer, str) and re.fullmatch(r"\d+ \d+(;\d+ \d+)*", answer, re.ASCII):
        parts = (part.split(" ") for part in answer.split(";"))
        return [(int(start), int(end)) for start, end in parts]
    return [(None, None)]
