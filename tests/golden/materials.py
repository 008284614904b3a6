"""Texts and a tiny model from a seed: the same on every machine, and of nothing of ds_distill."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TOPICS = {
    "animal": "cat dog horse tiger sparrow whale fox rabbit wolf bear",
    "food": "bread soup apple cheese rice noodle cake salad bean olive",
    "music": "drum flute violin song choir guitar melody organ piano trumpet",
    "weather": "rain snow wind storm fog hail thunder cloud frost sun",
}
FILLERS = (
    "the a we they saw had near after before under with of some very old new big small day "
    "night morning today again never often house road river and but then there was is"
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

DOCUMENTS = {"train": 20, "validation": 80, "transfer": 20, "test": 40}
"""Of three texts each."""

STRAY = 0.3
"""Share of the single-label texts that hold a word of another topic, too."""

Row = dict[str, Any] | str
"""Of a file of JSON lines, or a line."""


def write_materials(folder: Path) -> None:
    """single-label/ (jsonl, transfer without labels), masked-lm/ (a text a line), words/ (lists of
    words with tags), regression/ (tsv, pairs), questions/ (with contexts), spans/ (the same with
    any number of answers), multi-label/ (any number of labels), groups/ (documents of three texts
    each, and what somebody says of most), model/ (a BERT of two layers, 32
    wide, that knows no more than these words) and model-of-letters/ (one that reads them letter by
    letter)."""
    first = random.Random(0)
    for name, (row, ending, seed, sizes) in KINDS.items():
        draw = first if seed == 0 else random.Random(seed)
        for split, size in sizes.items():
            rows = [row(draw, number, split) for number in range(size)]
            header = ["text_a\ttext_b\tlabel"] if ending == "tsv" else []
            write_rows(folder / name / f"{split}.{ending}", [*header, *rows])
    write_groups(folder / "groups", random.Random(11))
    tags = ["O", *(f"{part}-{topic}" for topic in ("animal", "food") for part in "BI")]
    for name in ("single-label", "multi-label", "groups", "words"):
        labels = tags if name == "words" else list(TOPICS)
        (folder / name / "labels.json").write_text(json.dumps(labels))
    write_model(folder / "model", [*FILLERS.split(), *" ".join(TOPICS.values()).split()])
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    write_model(folder / "model-of-letters", [*letters, *(f"##{letter}" for letter in letters)])


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(lines) + "\n")


def fillers(draw: random.Random, least: int, most: int) -> list[str]:
    return draw.choices(FILLERS.split(), k=draw.randint(least, most))


def single_label(draw: random.Random, number: int, split: str) -> Row:
    topic = list(TOPICS)[number % len(TOPICS)]
    words = draw.choices(TOPICS[topic].split(), k=2)
    if draw.random() < STRAY:
        other = draw.choice([name for name in TOPICS if name != topic])
        words += draw.choices(TOPICS[other].split(), k=1)
    words += fillers(draw, 3, 9)
    draw.shuffle(words)
    return {"text": " ".join(words), **({} if split == "transfer" else {"label": topic})}


def masked_lm(draw: random.Random, number: int, split: str) -> Row:
    """A text repeats one word, so that a masked token can be predicted from the others."""
    return " ".join([draw.choice(" ".join(TOPICS.values()).split())] * draw.randint(6, 12))


def tagged_words(draw: random.Random, number: int, split: str) -> Row:
    """Some words of a topic are an entity of it."""
    words = fillers(draw, 3, 6)
    tagged = [(word, "O") for word in words]
    for topic in draw.sample(["animal", "food"], k=draw.randint(0, 2)):
        found = draw.choices(TOPICS[topic].split(), k=draw.randint(1, 2))
        names = [f"{'I' if at else 'B'}-{topic}" for at in range(len(found))]
        at = draw.randint(0, len(words))
        while at < len(tagged) and tagged[at][1].startswith("I-"):
            at += 1
        tagged[at:at] = zip(found, names, strict=True)
    tokens, tags = zip(*tagged, strict=True)
    return {"tokens": tokens, "tags": tags}


def regression(draw: random.Random, number: int, split: str) -> Row:
    """Pairs of texts of two words each; the number is the share of words that are of one topic."""
    of_topic = [draw.random() < 0.5 for _ in range(4)]
    topics = list(TOPICS.values())
    words = [draw.choice(topics[0 if one else 1].split()) for one in of_topic]
    return f"{words[0]} {words[1]}\t{words[2]} {words[3]}\t{sum(of_topic) / 4}"


def question(draw: random.Random, number: int, split: str) -> Row:
    """A context holds an animal and a food; a question asks for one of them. Each tenth context is
    longer than a window."""
    words = fillers(draw, 24, 40) if number % 10 == 0 else fillers(draw, 2, 8)
    for topic in draw.sample(["animal", "food"], k=2):
        words.insert(draw.randint(0, len(words)), draw.choice(TOPICS[topic].split()))
    asked, topic = draw.choice([("we saw", "animal"), ("they had", "food")])
    [text] = (word for word in words if word in TOPICS[topic].split())
    answers = [{"text": text, "start": start_of(words, words.index(text))}]
    return {"question": asked, "context": " ".join(words), "answers": answers}


def start_of(words: list[str], at: int) -> int:
    """The character at which a word begins."""
    return len(" ".join([*words[:at], ""]))


def spans(draw: random.Random, number: int, split: str) -> Row:
    """A context holds up to three animals, and a question asks for all of them or for none."""
    words = fillers(draw, 2, 12)
    for _ in range(draw.randint(0, 3)):
        words.insert(draw.randint(0, len(words)), draw.choice(TOPICS["animal"].split()))
    asked = draw.choice(["we saw", "they had"])
    animals = [at for at, word in enumerate(words) if word in TOPICS["animal"].split()]
    starts = {at: start_of(words, at) for at in animals if asked == "we saw"}
    answers = [{"start": start, "end": start + len(words[at])} for at, start in starts.items()]
    return {"question": asked, "context": " ".join(words), "answers": answers}


def multi_label(draw: random.Random, number: int, split: str) -> Row:
    """A text is of all topics that have a word in it, of none to three."""
    topics = sorted(draw.sample(list(TOPICS), k=draw.randint(0, 3)))
    words = fillers(draw, 3, 9)
    words += [draw.choice(TOPICS[topic].split()) for topic in topics]
    draw.shuffle(words)
    return {"text": " ".join(words), "label": topics}


EACH = {"train": 240, "validation": 240, "transfer": 240, "test": 240}
KINDS: dict[str, tuple[Callable[[random.Random, int, str], Row], str, int, dict[str, int]]] = {
    "single-label": (single_label, "jsonl", 0, EACH),
    "masked-lm": (masked_lm, "txt", 0, {"train": 160, "validation": 40, "test": 120}),
    "words": (tagged_words, "jsonl", 0, {"train": 160, "test": 120}),
    "regression": (regression, "tsv", 1, {"train": 200, "validation": 40, "test": 120}),
    "questions": (question, "jsonl", 2, {"train": 200, "test": 60}),
    "spans": (spans, "jsonl", 3, {"train": 160, "test": 60}),
    "multi-label": (multi_label, "jsonl", 4, {"train": 200, "validation": 160, "test": 120}),
}
"""A row, the file's ending, the seed (those of 0 go on from each other) and the rows of a split."""


def write_groups(folder: Path, draw: random.Random) -> None:
    """The texts of a document differ in one word and have one label, by lot; so have the logits of
    answers.jsonl, which lacks each fifth document of transfer and test."""
    words, answers = " ".join(TOPICS.values()).split(), list[Row]()
    for split, size in DOCUMENTS.items():
        rows = list[Row]()
        for number in range(size):
            label, document = draw.choice(list(TOPICS)), f"{split} {number}"
            said = [round(draw.gauss(0.0, 2.0), 3) for _ in TOPICS]
            same = draw.sample(words, k=6)
            for other in draw.sample(FILLERS.split(), k=3):
                text = " ".join([*same, other])
                rows.append({"text": text, "label": label, "document": document})
                if split == "validation" or number % 5:
                    answers.append({"text": text, "logits": said})
        write_rows(folder / f"{split}.jsonl", rows)
    write_rows(folder / "answers.jsonl", answers)


def write_model(folder: Path, known: list[str]) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    words = dict.fromkeys([*SPECIAL, *known])
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.1,  # so narrow a model hardly learns from the usual 0.02
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
