"""Hidden words, the same ones for every vocabulary, and how likely they are, piece by piece."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForMaskedLM, BertConfig, BertTokenizer, PreTrainedTokenizerFast
from vocabularies import AFTER, BEFORE, BERT, CORPUS, KNOWN, NEW, hostile

from ds_distill.check.models import hidden_word_mistakes
from ds_distill.data.masking import HiddenWords, HiddenWordsCollator, Masking
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.predict import score_words
from ds_distill.engine.world import World
from ds_distill.keys import content_keys
from ds_distill.models.bundle import Bundle

RATE, SEED = 0.5, 3
VOCABULARIES = {"old": BEFORE, "new": AFTER}


def hidden(
    texts: list[str], max_length: int, folder: Path, rate: float = RATE
) -> dict[str, tuple[TokenTable, HiddenWords]]:
    """By vocabulary."""
    keys, found = torch.from_numpy(content_keys(texts)), {}
    for name, tokenizer in VOCABULARIES.items():
        split = datasets.Dataset.from_dict({"text": texts})
        tokenise(split, tokenizer, max_length, folder / f"{name}.arrow")
        table = TokenTable(folder / f"{name}.arrow", tokenizer)
        masking = Masking.of(tokenizer, rate, SEED)
        found[name] = table, HiddenWords.of(table, tokenizer, keys, masking, max_length)
    common = HiddenWords.common([words for _, words in found.values()])
    tables = (table for table, _ in found.values())
    return dict(zip(found, zip(tables, common, strict=True), strict=True))


def spelled(tokenizer: BertTokenizer, table: TokenTable, words: HiddenWords) -> list[str]:
    """Each hidden word."""
    said = []
    for example, first, pieces in zip(words.example, words.first, words.pieces, strict=True):
        ids = table.view(np.array([example])).input_ids[0, first : first + pieces]
        said.append(tokenizer.decode(ids))
    return said


texts_of_words = st.lists(st.sampled_from([*CORPUS[0].split(), "fff", "ab"]), min_size=4).map(
    " ".join
)


@given(
    st.lists(hostile.filter(str.strip) | texts_of_words, min_size=1, max_size=4),
    st.sampled_from([6, 9, 40]),
)
@settings(max_examples=40, deadline=None)
def test_the_same_words_are_hidden_whatever_cuts_them(texts: list[str], max_length: int) -> None:
    """Whole ones, also where a text is cut."""
    with TemporaryDirectory() as folder:
        found = hidden(texts, max_length, Path(folder), rate=1.0)
        (old_table, old), (new_table, new) = found.values()
        assert np.array_equal(old.example, new.example) and np.array_equal(old.word, new.word)
        said = spelled(BEFORE, old_table, old)
        assert said == spelled(AFTER, new_table, new)
    assert not any("[" in word for word in said if len(word) > 1)
    assert all(len(word.split()) == 1 for word in said)


def test_words_are_hidden_at_the_rate(tmp_path: Path) -> None:
    texts = [
        " ".join(CORPUS[number % 3].replace("αβ", "") for _ in range(9)) for number in range(30)
    ]
    texts = [f"{text} {'a' * (number % 7)}" for number, text in enumerate(texts)]
    words = len(" ".join(texts).replace("(", "( ").replace(")", " )").split())
    [(_, found), *_] = hidden(texts, 400, tmp_path, rate=0.3).values()
    error = (0.3 * 0.7 / words) ** 0.5
    assert len(found.word) / words == pytest.approx(0.3, abs=5 * error)


def test_scores_are_those_of_a_plain_loop(world: World, tmp_path: Path) -> None:
    """One word's piece at a time through transformers' own forward; and its definition: a word's
    is the sum over its pieces, each with the pieces before it shown."""
    texts = [*CORPUS[:2], "beecab fed fade abcab fff", "abef", "cab " * 9]
    found, models, collators = hidden(texts, 16, tmp_path), {}, {}
    keys = torch.from_numpy(content_keys(texts))
    for seed, (name, (table, words)) in enumerate(found.items()):
        torch.manual_seed(seed)
        size = KNOWN + len(NEW) if name == "new" else KNOWN
        config = BertConfig(vocab_size=size, max_position_embeddings=16, **BERT)
        models[name] = model = AutoModelForMaskedLM.from_config(config).eval()
        with torch.no_grad():  # so that a word depends on the others
            for weight in model.parameters():
                weight.normal_(0, 0.3)
        collators[name] = HiddenWordsCollator(table, words, keys, BEFORE.mask_token_id, False)
    engine = Engine(Bundle(None, models), deepspeed_config("zero0_fp32", None, 1), world)
    losses = score_words(engine, collators, 2)
    for name, (table, words) in found.items():
        assert words.pieces.max() > (1 if name == "old" else 0)
        expected = np.zeros(len(texts))
        for example, first, pieces in zip(words.example, words.first, words.pieces, strict=True):
            true = table.view(np.array([example])).input_ids[0]
            for piece in range(pieces):
                ids = true.clone()
                for other in np.flatnonzero(words.example == example):
                    count = words.pieces[other]
                    shown = piece if count > piece else 0
                    begin = words.first[other]
                    ids[begin + shown : begin + count] = BEFORE.mask_token_id
                with torch.no_grad():
                    logits = models[name](ids[None]).logits[0, first + piece]
                expected[example] -= logits.log_softmax(-1)[true[first + piece]].item()
        np.testing.assert_allclose(losses[name], expected, rtol=1e-5)
    counts = {name: of_model.counts.tolist() for name, of_model in collators.items()}
    assert counts["old"] == counts["new"] and sum(counts["old"]) > 5
    ids, owners = collators["old"].tokens()
    assert len(ids) == found["old"][1].pieces.sum() and set(owners) == set(found["old"][1].example)


def test_other_vocabularies_are_refused() -> None:
    backend = Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    given = {
        "student": (BEFORE, KNOWN),
        "teachers.a": (PreTrainedTokenizerFast(tokenizer_object=backend), 2),
    }
    [mistake] = map(str, hidden_word_mistakes("task.metric=word_loss", given))
    assert "teachers.a has another" in mistake
