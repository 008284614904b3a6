"""The study of compact encoders: its recipes, and what its figures are."""

import gzip
import json
import math

import pytest
import torch
import transformers as tr
from encoders_judge import judged, windows
from encoders_recipes import TASKS, Size, methods, recipe
from encoders_tables import MARK, PAGE, RESULTS, tables
from pages import shown
from toys import TINY, save_tiny, toy_vocabulary

from ds_distill.recipe import Recipe


def test_every_method_is_a_recipe(tmp_path):
    for method in methods(9).values():
        made = recipe(method, 2, str(tmp_path), tmp_path, Size(steps=9))
        phases = Recipe.model_validate(made).phase_names()
        assert phases[-2 * len(TASKS) :] == [*TASKS, *(f"judge-{task}" for task in TASKS)]


def test_the_page_shows_what_the_file_holds():
    there = RESULTS.is_file()
    assert shown(PAGE, MARK) == (
        tables(json.loads(RESULTS.read_text())) if there else "Not measured yet.\n"
    )


# ------------------------------------------------------------------------------ hidden words


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A masked-LM, one with two words more, and a text with these words."""
    place = tmp_path_factory.mktemp("models")
    for name, words in (("old", []), ("grown", ["zebra", "quiz"])):
        vocabulary = [*toy_vocabulary(), *words]
        config = tr.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=128, **TINY)
        save_tiny(place / name, tr.BertForMaskedLM, config)
        ids = {token: number for number, token in enumerate(vocabulary)}
        tr.BertTokenizer(vocab=ids).save_pretrained(place / name)
    texts = ["the old zebra saw a quiz, then the Cat had Ω. " * 20, "a new dog. " * 30]
    with gzip.open(place / "text.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(texts))
    return place / "old", place / "grown", place / "text.txt.gz"


def test_a_masked_lm_is_judged_by_the_nats_of_whole_words(made):
    which = 1
    teacher = tr.AutoTokenizer.from_pretrained(made[0])
    found = windows(made[2], 9, teacher)
    tokenizer = tr.AutoTokenizer.from_pretrained(made[which])
    net = tr.BertForMaskedLM.from_pretrained(made[which]).eval()
    nats, characters, known = 0.0, 0, []
    for window in found:
        pieces = [tokenizer.tokenize(word) for word in window.words]
        shown_ = [["[MASK]"] * len(p) if n in window.hidden else p for n, p in enumerate(pieces)]
        flat = ["[CLS]", *(piece for of in shown_ for piece in of), "[SEP]"]
        with torch.no_grad():
            ids = torch.tensor([tokenizer.convert_tokens_to_ids(flat)])
            logs = net(ids).logits[0].log_softmax(-1)
        at = 1
        for n, (word, own) in enumerate(zip(window.words, pieces, strict=True)):
            for number in tokenizer.convert_tokens_to_ids(own):
                if n in window.hidden:
                    nats -= logs[at, number].item()
                    if len(teacher.tokenize(word)) == 1:
                        known.append(-logs[at, number].item())
                at += 1
            characters += len(word) * (n in window.hidden)
    got = judged(str(made[which]), found, teacher)
    assert got["characters"] == characters and got["known"] == len(known)
    assert got["nats_per_character"] == pytest.approx(nats / characters, rel=1e-4)
    assert got["perplexity_of_known"] == pytest.approx(math.exp(sum(known) / len(known)), rel=1e-4)
