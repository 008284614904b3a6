"""Masked-LMs of unlike vocabularies judged on the same words, and what a model weighs."""

from __future__ import annotations

import gzip
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers import logging as transformers_logging

RATE = 0.15
"""Share of the words that are hidden."""
ROOM = 62
"""Pieces of the teacher's in a window: as long as the windows of the trainings."""
BATCH = 16
TIMED = 30
"""Windows of which the latency is the median."""


@dataclass(frozen=True)
class Window:
    words: list[str]
    """As BERT splits a text, before any vocabulary: no vocabulary moves their ends."""
    hidden: list[int]
    """Places of the words that a model has to tell."""


def windows(file: Path, documents: int, tokenizer: PreTrainedTokenizerFast) -> list[Window]:
    """Of the first documents of a text file, one a line; the same for all models.

    tokenizer: the teacher's. Words that it does not know are never hidden.
    """
    backend = tokenizer.backend_tokenizer
    found = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        texts = [line for line, _ in zip(lines, range(documents), strict=False)]
    for text in texts:
        normal = backend.normalizer.normalize_str(text.strip())
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
        for part in _parts(words, tokenizer):
            known = [n for n, word in enumerate(part) if _pieces(word, tokenizer)]
            draw = random.Random(f"{len(found)}")
            hidden = sorted(draw.sample(known, round(RATE * len(known))))
            if hidden:
                found.append(Window(part, hidden))
    return found


def _parts(words: list[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[str]]:
    part: list[str] = []
    room = ROOM
    for word in words:
        length = len(tokenizer.tokenize(word))
        if part and length > room:
            yield part
            part, room = [], ROOM
        part, room = [*part, word], room - length
    if part:
        yield part


def _pieces(word: str, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """None of a word that the vocabulary cannot write."""
    pieces = tokenizer.tokenize(word)
    return [] if tokenizer.unk_token in pieces else pieces


@torch.no_grad()
def judged(model: str, found: list[Window], teacher: PreTrainedTokenizerFast) -> dict[str, float]:
    """How well a masked-LM tells hidden words, of which all pieces are hidden at once.

    nats_per_character: -log of the probability of all pieces, by characters of the hidden words.
        Vocabularies that have a word whole and in pieces are comparable by it; but the latter is
        told by the number of masks how many pieces there are.
    perplexity_of_known: of the hidden words that are one token of the teacher's vocabulary.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForMaskedLM.from_pretrained(model).eval()
    nats, characters, known, known_nats = 0.0, 0, 0, 0.0
    for first in range(0, len(found), BATCH):
        batch = found[first : first + BATCH]
        texts = [one.words for one in batch]
        inputs = tokenizer(texts, is_split_into_words=True, padding=True, return_tensors="pt")
        places = [
            (row, at, word)
            for row, one in enumerate(batch)
            for at, word in enumerate(inputs.word_ids(row))
            if word in one.hidden
        ]
        rows, columns = (torch.tensor(each) for each in list(zip(*places, strict=True))[:2])
        labels = inputs["input_ids"][rows, columns]
        inputs["input_ids"][rows, columns] = tokenizer.mask_token_id
        states = net.base_model(**inputs).last_hidden_state[rows, columns]
        losses = torch.nn.functional.cross_entropy(net.cls(states), labels, reduction="none")
        nats += losses.sum().item()
        characters += sum(len(one.words[word]) for one in batch for word in one.hidden)
        for (row, _, word), loss in zip(places, losses.tolist(), strict=True):
            if len(_pieces(batch[row].words[word], teacher)) == 1:
                known, known_nats = known + 1, known_nats + loss
    return {
        "nats_per_character": nats / characters,
        "perplexity_of_known": math.exp(known_nats / known),
        "known": known,
        "characters": characters,
    }


@torch.no_grad()
def weight(model: str, teacher: str, found: list[Window]) -> dict[str, Any]:
    """Parameters of an encoder without head, and how much faster than the teacher's it is: medians
    of single windows, of which each is read by both, one after the other."""
    transformers_logging.set_verbosity_error()  # of heads that an encoder does without
    nets = [
        AutoModel.from_pretrained(one, add_pooling_layer=False).eval() for one in (model, teacher)
    ]
    tokenizers = [AutoTokenizer.from_pretrained(one) for one in (model, teacher)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for window in found[:TIMED]:
        for net, tokenizer, taken in zip(nets, tokenizers, seconds, strict=True):
            inputs = tokenizer(window.words, is_split_into_words=True, return_tensors="pt")
            began = time.perf_counter()
            net(**inputs)
            taken.append(time.perf_counter() - began)
    own, other = map(statistics.median, seconds)
    all_of_it = nets[0].num_parameters()
    embeddings = sum(parameter.numel() for parameter in nets[0].embeddings.parameters())
    return {
        "parameters": all_of_it,
        "without_embeddings": all_of_it - embeddings,
        "milliseconds": 1e3 * own,
        "speed_up": other / own,
    }
