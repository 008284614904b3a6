"""Texts and a tiny model from a seed: the same on every machine, and of nothing of ds_distill."""

from __future__ import annotations

import json
import random
from pathlib import Path

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

SINGLE_LABEL = {"train": 240, "validation": 240, "transfer": 240, "test": 240}
REGRESSION = {"train": 200, "validation": 40, "test": 120}
MASKED_LM = {"train": 160, "validation": 40, "test": 120}
WORDS = {"train": 160, "test": 120}
QUESTIONS = {"train": 200, "test": 60}
SPANS = {"train": 160, "test": 60}
MULTI_LABEL = {"train": 200, "validation": 160, "test": 120}
DOCUMENTS = {"train": 20, "validation": 80, "transfer": 20, "test": 40}
"""Examples by split; of documents three each."""

STRAY = 0.3
"""Share of the single-label texts that hold a word of another topic, too."""


def write_materials(folder: Path) -> None:
    """single-label/ (jsonl, transfer without labels), masked-lm/ (a text a line), words/ (lists of
    words with tags), regression/ (tsv, pairs), questions/ (with contexts), spans/ (the same with
    any number of answers), multi-label/ (any number of labels), groups/ (documents of three texts
    each, and what somebody says of most), model/ (a BERT of two layers, 32
    wide, that knows no more than these words) and model-of-letters/ (one that reads them letter by
    letter)."""
    draw = random.Random(0)
    write_single_label(folder / "single-label", draw)
    write_masked_lm(folder / "masked-lm", draw)
    write_words(folder / "words", draw)
    write_regression(folder / "regression", random.Random(1))
    write_questions(folder / "questions", random.Random(2))
    write_spans(folder / "spans", random.Random(3))
    write_multi_label(folder / "multi-label", random.Random(4))
    write_groups(folder / "groups", random.Random(11))
    write_model(folder / "model", [*FILLERS.split(), *" ".join(TOPICS.values()).split()])
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    write_model(folder / "model-of-letters", [*letters, *(f"##{letter}" for letter in letters)])


def write_single_label(folder: Path, draw: random.Random) -> None:
    folder.mkdir(parents=True)
    (folder / "labels.json").write_text(json.dumps(list(TOPICS)))
    for split, size in SINGLE_LABEL.items():
        rows = []
        for number in range(size):
            topic = list(TOPICS)[number % len(TOPICS)]
            words = draw.choices(TOPICS[topic].split(), k=2)
            if draw.random() < STRAY:
                other = draw.choice([name for name in TOPICS if name != topic])
                words += draw.choices(TOPICS[other].split(), k=1)
            words += draw.choices(FILLERS.split(), k=draw.randint(3, 9))
            draw.shuffle(words)
            label = {} if split == "transfer" else {"label": topic}
            rows.append(json.dumps({"text": " ".join(words), **label}))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def write_masked_lm(folder: Path, draw: random.Random) -> None:
    """A text repeats one word, so that a masked token can be predicted from the others."""
    folder.mkdir(parents=True)
    words = " ".join(TOPICS.values()).split()
    for split, size in MASKED_LM.items():
        lines = [" ".join([draw.choice(words)] * draw.randint(6, 12)) for _ in range(size)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")


def write_regression(folder: Path, draw: random.Random) -> None:
    """Pairs of texts of two words each; the number is the share of words that are of one topic."""
    folder.mkdir(parents=True)
    topics = list(TOPICS.values())
    for split, size in REGRESSION.items():
        rows = ["text_a\ttext_b\tlabel"]
        for _ in range(size):
            of_topic = [draw.random() < 0.5 for _ in range(4)]
            words = [draw.choice(topics[0 if one else 1].split()) for one in of_topic]
            rows.append(f"{words[0]} {words[1]}\t{words[2]} {words[3]}\t{sum(of_topic) / 4}")
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")


def write_words(folder: Path, draw: random.Random) -> None:
    """Some words of a topic are an entity of it."""
    folder.mkdir()
    tags = ["O", *(f"{part}-{topic}" for topic in ("animal", "food") for part in "BI")]
    (folder / "labels.json").write_text(json.dumps(tags))
    for split, size in WORDS.items():
        rows = []
        for _ in range(size):
            words = draw.choices(FILLERS.split(), k=draw.randint(3, 6))
            tagged = [(word, "O") for word in words]
            for topic in draw.sample(["animal", "food"], k=draw.randint(0, 2)):
                found = draw.choices(TOPICS[topic].split(), k=draw.randint(1, 2))
                names = [f"{'I' if at else 'B'}-{topic}" for at in range(len(found))]
                at = draw.randint(0, len(words))
                while at < len(tagged) and tagged[at][1].startswith("I-"):
                    at += 1
                tagged[at:at] = zip(found, names, strict=True)
            tokens, row_tags = zip(*tagged, strict=True)
            rows.append(json.dumps({"tokens": tokens, "tags": row_tags}))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def write_questions(folder: Path, draw: random.Random) -> None:
    """A context holds an animal and a food; a question asks for one of them. Each tenth context is
    longer than a window."""
    folder.mkdir()
    for split, size in QUESTIONS.items():
        rows = []
        for number in range(size):
            count = draw.randint(24, 40) if number % 10 == 0 else draw.randint(2, 8)
            words = draw.choices(FILLERS.split(), k=count)
            for topic in draw.sample(["animal", "food"], k=2):
                words.insert(draw.randint(0, len(words)), draw.choice(TOPICS[topic].split()))
            question, topic = draw.choice([("we saw", "animal"), ("they had", "food")])
            [text] = (word for word in words if word in TOPICS[topic].split())
            start = len(" ".join([*words[: words.index(text)], ""]))
            answers = [{"text": text, "start": start}]
            row = {"question": question, "context": " ".join(words), "answers": answers}
            rows.append(json.dumps(row))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def write_spans(folder: Path, draw: random.Random) -> None:
    """A context holds up to three animals, and a question asks for all of them or for none."""
    folder.mkdir()
    for split, size in SPANS.items():
        rows = []
        for _ in range(size):
            words = draw.choices(FILLERS.split(), k=draw.randint(2, 12))
            for _ in range(draw.randint(0, 3)):
                words.insert(draw.randint(0, len(words)), draw.choice(TOPICS["animal"].split()))
            question = draw.choice(["we saw", "they had"])
            answers = []
            for at, word in enumerate(words):
                start = len(" ".join([*words[:at], ""]))
                if question == "we saw" and word in TOPICS["animal"].split():
                    answers.append({"start": start, "end": start + len(word)})
            row = {"question": question, "context": " ".join(words), "answers": answers}
            rows.append(json.dumps(row))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def write_multi_label(folder: Path, draw: random.Random) -> None:
    """A text is of all topics that have a word in it, of none to three."""
    folder.mkdir()
    (folder / "labels.json").write_text(json.dumps(list(TOPICS)))
    for split, size in MULTI_LABEL.items():
        rows = []
        for _ in range(size):
            topics = sorted(draw.sample(list(TOPICS), k=draw.randint(0, 3)))
            words = draw.choices(FILLERS.split(), k=draw.randint(3, 9))
            words += [draw.choice(TOPICS[topic].split()) for topic in topics]
            draw.shuffle(words)
            rows.append(json.dumps({"text": " ".join(words), "label": topics}))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def write_groups(folder: Path, draw: random.Random) -> None:
    """The texts of a document differ in one word and have one label, by lot; so have the logits of
    answers.jsonl, which lacks each fifth document of transfer and test."""
    folder.mkdir()
    (folder / "labels.json").write_text(json.dumps(list(TOPICS)))
    words, answers = " ".join(TOPICS.values()).split(), []
    for split, size in DOCUMENTS.items():
        rows = []
        for number in range(size):
            label, document = draw.choice(list(TOPICS)), f"{split} {number}"
            said = [round(draw.gauss(0.0, 2.0), 3) for _ in TOPICS]
            same = draw.sample(words, k=6)
            for other in draw.sample(FILLERS.split(), k=3):
                text = " ".join([*same, other])
                rows.append(json.dumps({"text": text, "label": label, "document": document}))
                if split == "validation" or number % 5:
                    answers.append(json.dumps({"text": text, "logits": said}))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "answers.jsonl").write_text("\n".join(answers) + "\n")


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
