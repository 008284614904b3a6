"""Windows of words as they are defined, by a tokenizer's own calls: each window is tokenised as it
is read, and its words are found by the numbers that the tokenizer gives."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ds_distill.data.spans import words_of
from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.data.word_tokens import NO_TOKEN, owners, ranges

Tokenizers = list[PreTrainedTokenizerBase]


def encode_words(
    tokenizer: PreTrainedTokenizerBase,
    examples: list[list[str]],
    max_length: int,
    questions: list[list[str]] | None = None,
) -> BatchEncoding:
    """The tokens of lists of words, with special tokens, truncated; of pairs the second alone."""
    pairs = questions is not None
    return tokenizer(
        questions if pairs else examples,
        examples if pairs else None,
        is_split_into_words=True,
        truncation="only_second" if pairs else True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=pairs,
    )


def places(encoded: BatchEncoding, words: int, part: int) -> tuple[list[int], list[int]]:
    """The position of the first token of each word, and how many it has."""
    first, counts = [NO_TOKEN] * words, [0] * words
    both = zip(encoded.word_ids(0), encoded.sequence_ids(0), strict=True)
    for position, (word, of) in enumerate(both):
        if word is not None and of == part:
            first[word] = position if counts[word] == 0 else first[word]
            counts[word] += 1
    return first, counts


def first_tokens(encoded: BatchEncoding, words: int, part: int = 0) -> list[int]:
    return places(encoded, words, part)[0]


def token_counts(tokenizer: PreTrainedTokenizerBase, words: list[str]) -> np.ndarray:
    """Tokens of each word, without special ones."""
    encoded = tokenizer([words], is_split_into_words=True, add_special_tokens=False)
    return np.array(places(encoded, len(words), 0)[1], dtype=np.int64)


def columns(
    tokenizers: Tokenizers, max_length: int, words: list[str], question: list[str] | None = None
) -> dict[str, Any]:
    """A window's tokens, and which of its words have one in every view."""
    found: dict[str, Any] = {}
    counted = np.ones(len(words), dtype=bool)
    for tokenizer in tokenizers:
        asked = None if question is None else [question]
        encoded = encode_words(tokenizer, [words], max_length, asked)
        first, counts = places(encoded, len(words), int(question is not None))
        counted &= np.array(first, dtype=np.int64) != NO_TOKEN
        of_one = {name: encoded[name][0] for name in encoded}
        of_one |= {"places": first, "token_counts": counts}
        name = tokens_fingerprint(tokenizer)
        found |= {f"{name}:{column}": values for column, values in of_one.items()}
    return {**found, "counted": counted.tolist()}


def windows_of_text(
    tokenizers: Tokenizers, max_length: int, words: list[str]
) -> list[dict[str, Any]]:
    rooms = [max_length - tokenizer.num_special_tokens_to_add() for tokenizer in tokenizers]
    rows = []
    for first, end, owned in _windows(tokenizers, words, rooms):
        here = columns(tokenizers, max_length, words[first:end])
        rows.append({**here, "words": words[first:end], "owned": owned})
    return rows


def windows_of_context(
    tokenizers: Tokenizers, max_length: int, question: str, context: str
) -> list[dict[str, Any]]:
    asked = [question[start:end] for start, end in words_of(question)]
    words = [context[start:end] for start, end in words_of(context)]
    of_asked = [token_counts(tokenizer, asked) for tokenizer in tokenizers]
    while any(counts[: len(asked)].sum() > max_length // 2 for counts in of_asked):
        asked = asked[:-1]
    rooms = [
        max_length - tokenizer.num_special_tokens_to_add(pair=True) - counts[: len(asked)].sum()
        for tokenizer, counts in zip(tokenizers, of_asked, strict=True)
    ]
    rows = []
    for first, end, owned in _windows(tokenizers, words, rooms):
        here = columns(tokenizers, max_length, words[first:end], asked)
        here |= {"question": asked, "words": words[first:end], "first": first, "owned": owned}
        rows.append(here)
    return rows


def _windows(
    tokenizers: Tokenizers, words: list[str], rooms: list[int]
) -> list[tuple[int, int, list[bool]]]:
    counts = [token_counts(tokenizer, words) for tokenizer in tokenizers]
    found = list(ranges([np.concatenate([[0], np.cumsum(of_one)]) for of_one in counts], rooms))
    owner = owners(found, len(words))
    return [
        (first, end, (owner[first:end] == number).tolist())
        for number, (first, end) in enumerate(found)
    ]


def windows_of_question(
    tokenizer: PreTrainedTokenizerBase, max_length: int, overlap: int, question: str, context: str
) -> list[tuple[str, str, int]] | None:
    """Question, text and its first character of each window, each text by a call of its own; None
    where a word between blanks has no room in one, and is cut."""

    def spans_of(text: str) -> list[tuple[int, int]]:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(start, end) for start, end in found["offset_mapping"]]

    def fits(text: str) -> bool:
        return len(tokenizer(question, text)["input_ids"]) <= max_length

    while len(of_question := spans_of(question)) > max_length // 2:
        until = of_question[max_length // 2 - 1][1]
        question = question[: min(until, len(question) - 1)]
    if fits(context):
        return [(question, context, 0)]
    words = [found.span() for found in re.finditer(r"[^ \t\n\r]+", context)]
    if not all(fits(context[start:end]) for start, end in words):
        return None
    lasts = [max(end - 1, start) for start, end in spans_of(context)]
    found, first, reached = [], 0, 0
    while words:
        start, end = words[first][0], first + 1
        while end < len(words) and fits(context[start : words[end][1]]):
            end += 1
        text = context[start : words[end - 1][1]]
        if text.strip() and end > reached:
            reached = end
            found.append((question, text, start))
        if end == len(words):
            break
        first += 1
        while (
            first < end
            and sum(words[first - 1][1] <= n < words[end - 1][1] for n in lasts) > overlap
        ):
            first += 1
    return found or [(question, "", 0)]
