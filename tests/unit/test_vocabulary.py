"""A vocabulary that grows: old ids stay, rows of new words begin as those of their pieces, and
hidden words are the same ones for every vocabulary."""

from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import texts_split
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)
from vocabularies import AFTER, BEFORE, BERT, CORPUS, KNOWN, NEW, OLD, UNKNOWN, hostile

from ds_distill.check.models import expansion_mistakes, hidden_word_mistakes
from ds_distill.data.batches import Collator, Units
from ds_distill.data.masking import HiddenWords, HiddenWordsCollator, Masking, masked_rows
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.word_pieces import expand_tokenizer, pieces_of
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.predict import score_words
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.models.bundle import Bundle
from ds_distill.phases.expand_vocabulary import expand_embeddings


@given(hostile | st.lists(st.sampled_from([*NEW, *OLD, "abc", "fff"]), max_size=5).map("".join))
def test_any_text_is_cut_as_before_but_for_new_words(text):
    old, new = BEFORE(text)["input_ids"], AFTER(text)["input_ids"]
    assert not {one for one in new if len(OLD) <= one < KNOWN}
    assert new.count(UNKNOWN) <= old.count(UNKNOWN)
    if all(one < KNOWN for one in new):
        assert new == old
    if UNKNOWN not in old:
        assert AFTER.decode(new) == BEFORE.decode(old)


@given(st.lists(hostile.filter(str.strip), min_size=1, max_size=4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_model_sees_a_word_that_the_teacher_does_not_know(texts, every_token):
    """And only cross-entropy counts it."""
    split = texts_split(texts)
    tables = dict.fromkeys(("student", "teacher"), TokenTable(tokenise(split, AFTER, 40), AFTER))
    rows = masked_rows(Masking.of(AFTER, 0.3, 0, KNOWN), every_token=every_token)
    batch = Collator(Units.of(split), tables, rows)(np.arange(len(texts)))
    true = tables["student"].view(np.arange(len(texts))).input_ids.flatten()
    view = batch.views["teacher"]
    assert torch.equal(view.input_ids, batch.views["student"].input_ids)
    assert (view.input_ids < KNOWN).all()
    tokens = true[view.positions]
    sets = {name: set(rows.tolist()) for name, rows in batch.row_sets.items()}
    new = set((tokens >= KNOWN).nonzero()[:, 0].tolist())
    assert sets["all"] == sets["labelled"] - new and new <= sets["labelled"]
    for row in sets["labelled"]:
        assert batch.labels[row] == tokens[row]
    if every_token:
        real = int(view.attention_mask.sum())
        assert sets["tokens"] == set(range(real)) - new and sets["all"] <= sets["tokens"]


def test_new_ids_begin_behind_the_rows_that_there_are():
    vocabulary = AFTER.get_vocab()
    assert {token: vocabulary[token] for token in OLD} == BEFORE.get_vocab()
    assert [vocabulary[token] for token in NEW] == [*range(KNOWN, KNOWN + len(NEW))]
    assert len(AFTER) == 1 + max(vocabulary.values()) == KNOWN + len(NEW)
    assert {"abcab", "fed", "decaf", "abef", "##f"} <= set(NEW)
    assert AFTER.tokenize("abcab (fed)") == ["abcab", "(", "fed", ")"]


def test_an_expansion_is_the_same_each_time():
    """Of pieces that are as frequent, too: the library's trainer alone takes them as its hashes
    fall."""
    words = [f"{first}{second}q" for first in "abcdefghijkl" for second in "mnopqrstuvwx"]
    for size in (90, 150):
        found = [expand_tokenizer(BEFORE, [" ".join(words)] * 2, size, KNOWN)[1] for _ in range(4)]
        assert all(one == found[0] for one in found)
        assert len(found[0]) == size - KNOWN


def ones(tokenizer):
    """The share of the corpus's words that are one token each."""
    words = " ".join(CORPUS).replace("(", "( ").replace(")", " )").split()
    cut = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    return sum(len(ids) == 1 and UNKNOWN not in ids for ids in cut) / len(words)


@given(st.floats(ones(BEFORE) + 0.01, 1.0))
@settings(max_examples=20, deadline=None)
def test_no_more_words_are_added_than_a_share_takes(share):
    after, found = expand_tokenizer(BEFORE, CORPUS, 200, KNOWN, share)
    assert found == NEW[: len(found)]
    assert ones(after) >= min(share, ones(AFTER)) > ones(BEFORE)
    fewer, _ = expand_tokenizer(BEFORE, CORPUS, KNOWN + len(found) - 1, KNOWN)
    assert ones(fewer) < share or found == ["##f"]  # without which a word could become unknown


def test_a_share_that_is_reached_already_is_refused():
    with pytest.raises(UserError, match="are one token each before any is added"):
        expand_tokenizer(BEFORE, CORPUS, 200, KNOWN, ones(BEFORE))


def test_it_is_saved_and_loaded(tmp_path):
    AFTER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == AFTER.get_vocab()
    assert again(CORPUS)["input_ids"] == AFTER(CORPUS)["input_ids"]


def test_other_tokenizers_are_refused():
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    bpe = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(UserError, match="is BPE, and only a WordPiece"):
        expand_tokenizer(bpe, CORPUS, 10, 2)


SIZES = {"vocab_size": KNOWN, "max_position_embeddings": 16}
FAMILIES = {
    "bert": BertConfig(**SIZES, **BERT),
    "bert, untied": BertConfig(**SIZES, **BERT, tie_word_embeddings=False),
    "distilbert": DistilBertConfig(**SIZES, dim=16, n_layers=2, n_heads=2, hidden_dim=16),
    "electra": ElectraConfig(**SIZES, **BERT, embedding_size=8),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_token_begins_as_the_mean_of_its_pieces(family, tmp_path):
    """As an input, and as an output, where it has the mean of their logits."""
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(FAMILIES[family]).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    ids = torch.tensor([[2, 5, 9, 14, 3]])
    before = model(ids).logits
    table = model.get_input_embeddings().weight.detach().clone()
    expand_embeddings(model, BEFORE.get_vocab(), NEW)
    rows, after = model.get_input_embeddings().weight, model(ids).logits
    assert torch.equal(rows[:KNOWN], table)
    torch.testing.assert_close(after[..., :KNOWN], before, rtol=1e-5, atol=1e-6)
    for number, token in enumerate(NEW, KNOWN):
        pieces = pieces_of(token, BEFORE.get_vocab()) or [*range(KNOWN)]
        torch.testing.assert_close(rows[number], table[pieces].mean(0))
        torch.testing.assert_close(after[..., number], before[..., pieces].mean(-1))
    tied = model.get_output_embeddings().weight is rows
    assert tied == ("untied" not in family)
    if not tied:  # transformers does not save the bias of one; no recipe may have such a student
        return
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.config.vocab_size == KNOWN + len(NEW)
    assert torch.equal(again(ids).logits, after)


@pytest.mark.parametrize(
    ("config", "size", "why"),
    [
        (RobertaConfig(), 99, "type roberta cannot be expanded"),
        (BertConfig(tie_word_embeddings=False), 99, "embeddings are not tied"),
        (BertConfig(), KNOWN, f"the student has {KNOWN} tokens already"),
        (BertConfig(), 99, None),
    ],
)
def test_what_cannot_grow_is_refused(config, size, why):
    found = [*map(str, expansion_mistakes("phases.expand", config, BEFORE, KNOWN, size))]
    assert [why in one for one in found if why] == ([True] if why else [])
    assert len(found) == (1 if why else 0)


def test_pieces_are_those_of_the_tokenizer():
    vocabulary = BEFORE.get_vocab()
    for token in [*NEW, "abcab", "fade", "zz", "##zz"]:
        if not token.startswith("##"):
            found = BEFORE(token, add_special_tokens=False)["input_ids"]
            assert pieces_of(token, vocabulary) == ([] if UNKNOWN in found else found), token
    assert pieces_of("##abe", vocabulary) == [vocabulary["##ab"], vocabulary["##e"]]


def test_a_start_at_random():
    model = AutoModelForMaskedLM.from_config(FAMILIES["bert"])
    expand_embeddings(model, BEFORE.get_vocab(), NEW, start="random")
    rows = model.get_input_embeddings().weight[KNOWN:]
    assert rows.std().item() == pytest.approx(model.config.initializer_range, rel=0.2)


def test_no_new_tokens_leave_the_model_as_it_is():
    model = AutoModelForMaskedLM.from_config(FAMILIES["bert"])
    before = model.get_input_embeddings().weight.clone()
    expand_embeddings(model, BEFORE.get_vocab(), [])
    assert torch.equal(model.get_input_embeddings().weight, before)


RATE, SEED = 0.5, 3
VOCABULARIES = {"old": BEFORE, "new": AFTER}


def hidden(texts, max_length, folder, rate=RATE):
    """By vocabulary."""
    keys, found = torch.from_numpy(content_keys(texts)), {}
    for name, tokenizer in VOCABULARIES.items():
        split = datasets.Dataset.from_dict({"text": texts})
        table = TokenTable(tokenise(split, tokenizer, max_length), tokenizer)
        masking = Masking.of(tokenizer, rate, SEED)
        found[name] = table, HiddenWords.of(table, tokenizer, keys, masking, max_length)
    common = HiddenWords.common([words for _, words in found.values()])
    tables = (table for table, _ in found.values())
    return dict(zip(found, zip(tables, common, strict=True), strict=True))


def spelled(tokenizer, table, words):
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
def test_the_same_words_are_hidden_whatever_cuts_them(texts, max_length):
    """Whole ones, also where a text is cut."""
    with TemporaryDirectory() as folder:
        found = hidden(texts, max_length, Path(folder), rate=1.0)
        (old_table, old), (new_table, new) = found.values()
        assert np.array_equal(old.example, new.example) and np.array_equal(old.word, new.word)
        said = spelled(BEFORE, old_table, old)
        assert said == spelled(AFTER, new_table, new)
    assert not any("[" in word for word in said if len(word) > 1)
    assert all(len(word.split()) == 1 for word in said)


def test_words_are_hidden_at_the_rate(tmp_path):
    texts = [
        " ".join(CORPUS[number % 3].replace("αβ", "") for _ in range(9)) for number in range(30)
    ]
    texts = [f"{text} {'a' * (number % 7)}" for number, text in enumerate(texts)]
    words = len(" ".join(texts).replace("(", "( ").replace(")", " )").split())
    [(_, found), *_] = hidden(texts, 400, tmp_path, rate=0.3).values()
    error = (0.3 * 0.7 / words) ** 0.5
    assert len(found.word) / words == pytest.approx(0.3, abs=5 * error)


def test_scores_are_those_of_a_plain_loop(world, tmp_path):
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


def test_other_vocabularies_are_refused():
    backend = Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    given = {
        "student": (BEFORE, KNOWN),
        "teachers.a": (PreTrainedTokenizerFast(tokenizer_object=backend), 2),
    }
    [mistake] = map(str, hidden_word_mistakes("task.metric=word_loss", given))
    assert "teachers.a has another" in mistake
