"""Batches of words and of windows of questions: which rows there are, which count, and what models
and losses make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import WIDTH, built, config_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import TAGS, asked, collator, read
from slow_windows import encode_words, with_counted
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    BertConfig,
)

from ds_distill.cache.schema import SignalSchema
from ds_distill.data.batches import (
    Examples,
    cut_to,
    span_rows,
    stored_rows,
    word_rows,
    word_token_rows,
)
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.windows import question_windows, word_windows
from ds_distill.losses import KL, CrossEntropy, Seen
from ds_distill.models.encoder import read_signals
from ds_distill.models.packing import packed_attention
from ds_distill.planning.caches import example_bytes
from ds_distill.reads import Reads
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import CharacterSpans, ExtractiveQA
from ds_distill.tasks.extractive_qa import ExtractiveQAKind
from ds_distill.types import LACKING, Batch, Signals
from ds_distill.views import PackedView, PaddedView

NOTHING = np.array([], dtype=np.int64)


@pytest.fixture(scope="module")
def toy(tiny_models: dict[str, Path]) -> Any:
    return load_tokenizer(str(tiny_models["toy"]), of_words=True)


# ----------------------------------------------------------------------------------------- words

ROWS = [
    {"tokens": ["the", "cat", "saw", "snow"], "tags": ["O", "B-gene", "O", "B-disease"]},
    {"tokens": ["rain"], "tags": ["B-disease"]},
    {"tokens": ["a", "\u200b", "very", "old", "tiger"], "tags": ["O", "O", "O", "O", "B-gene"]},
]


def test_a_row_per_word(tmp_path: Path, toy: Any) -> None:
    """Of five tokens the first three are words: of the third example `old` and `tiger` are cut off,
    and U+200B has no token."""
    split = with_counted(read("token-classification", tmp_path, ROWS), [toy], 5)
    examples, collate = collator(split, toy, 5, tmp_path, word_rows)
    assert len(examples) == 3 and len(examples.labels) == 10
    batch = collate(np.array([2, 0]))
    assert batch.labels.tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 3]
    assert batch.row_sets["all"].tolist() == [0, 2, 3, 5, 6, 7]
    assert batch.row_sets["labelled"].tolist() == [0, 2, 3, 5, 6, 7]
    assert stored_rows(batch).tolist() == list(range(9))
    assert (batch.keys[:5] == examples.keys[2]).all() and (batch.keys[5:] == examples.keys[0]).all()
    view = batch.views["student"]
    assert view.positions is not None and view.example_indices.tolist() == [0] * 5 + [1] * 4
    read_ = toy.convert_ids_to_tokens(view.input_ids.flatten()[view.positions].tolist())
    counted = [read_[row] for row in batch.row_sets["all"].tolist()]
    assert counted == ["a", "very", "old", "the", "cat", "saw"]
    assert read_[1] == read_[4] == "[CLS]", "words without a token are read at the first position"
    empty = collate(NOTHING)
    assert not any(map(len, empty.row_sets.values()))
    assert len(empty.labels) == 4 and not len(stored_rows(empty))
    plain = read("token-classification", tmp_path, [{"tokens": row["tokens"]} for row in ROWS])
    examples = Examples.of(word_windows(plain, [toy], 16))
    assert not examples.labelled.any() and set(examples.labels.tolist()) == {-1}
    assert examples.words is not None and examples.words.counted.sum() == 9


def test_a_row_per_token_where_all_are_trained(
    vocabularies: dict[str, Path], tmp_path: Path
) -> None:
    """As transformers' own examples align tags with `label_all_tokens`; words that do not count in
    every view are left out."""
    rows = [
        {"tokens": ["the", "interleukin-2", "\u200b", "receptor's"], "tags": TAGS[:4]},
        {"tokens": ["hyperparathyroidism"], "tags": ["B-disease"]},
        {"tokens": ["a", "very", "thrombocytopenic", "old", "tiger"] * 9, "tags": ["O"] * 45},
    ]
    names = ("pubmedbert-uncased", "deberta-v3-base", "roberta-base")
    real = [load_tokenizer(str(vocabularies[name]), of_words=True) for name in names]
    split = with_counted(read("token-classification", tmp_path, rows), real, 40)
    chosen = np.array([2, 0, 1])
    for tokenizer in real:
        examples, collate = collator(split, tokenizer, 40, tmp_path, word_token_rows)
        words, batch = examples.words, collate(chosen)
        assert words is not None
        view = batch.views["student"]
        expected = torch.full(view.input_ids.shape, -100)
        for row, number in enumerate(chosen):
            encoded = encode_words(tokenizer, [rows[number]["tokens"]], 40)
            for token, word in enumerate(encoded.word_ids(0)):
                if word is not None and words.counted[words.offsets[number] + word]:
                    expected[row, token] = examples.labels[words.offsets[number] + word]
        found = torch.full_like(expected, -100)
        counted = batch.row_sets["labelled"]
        assert torch.equal(counted, batch.row_sets["all"])
        found.view(-1)[view.positions[counted]] = batch.labels[counted]
        assert torch.equal(found, expected), tokenizer
        assert len(counted) > words.counted.sum(), "words of several tokens"
        assert torch.equal(batch.keys, examples.keys[chosen][view.example_indices])
        empty = collate(chosen[:0])
        assert len(empty.labels) > 0 and not any(map(len, empty.row_sets.values()))


def test_words_of_a_context_stand_behind_the_question_and_count_once(
    tmp_path: Path, toy: Any
) -> None:
    context = "the cat saw a very old dog and some snow"
    long = " ".join([context] * 4)  # 40 words, of which 27 have room behind the question
    animals = [{"start": 4, "end": 7}, {"start": 23, "end": 26}]
    rows: list[dict[str, Any]] = [
        {"question": "we had", "context": long, "answers": animals},
        {"question": "which food", "context": context, "answers": []},
    ]
    split = word_windows(read("character-spans", tmp_path, rows), [toy], 32)
    examples, collate = collator(split, toy, 32, tmp_path, word_rows)
    words, batch = examples.words, collate(np.arange(3))
    assert len(examples) == 3 and words is not None
    assert words.text is not None and words.text.tolist() == [0, 0, 1]
    view = batch.views["student"]
    assert view.positions is not None and view.token_type_ids is not None
    seen = toy.convert_ids_to_tokens(view.input_ids.flatten()[view.positions].tolist())
    of_rows = words.text[view.example_indices.numpy()]
    for number, text in ((0, long), (1, context)):
        mine = [row for row in np.flatnonzero(words.counted) if of_rows[row] == number]
        assert [seen[row] for row in mine] == text.split()
    first = toy.convert_tokens_to_ids("we")
    assert (view.input_ids[:2] == first).any(dim=1).all(), "the question is in every window"
    assert (view.token_type_ids.flatten()[view.positions] == 1).all()
    assert (view.token_type_ids[:, :3] == 0).all()
    counted = batch.row_sets["labelled"]
    assert [seen[row] for row in counted.tolist() if batch.labels[row] == 1] == ["cat", "dog"]
    assert len(batch.labels) > len(counted) == 50
    assert examples.class_counts(2).tolist() == [48, 2]


# ------------------------------------------------------------------------------------- questions


def test_two_rows_per_window(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    long = " ".join(["snow", "rain"] * 20 + ["cat"])
    rows = asked(["who?", "we saw"], ["a cat saw", long], [[(2, 5)], [(200, 203)]])
    split = question_windows(rows, tokenizer, 32, 8)
    examples, collate = collator(split, tokenizer, 32, tmp_path, span_rows)
    assert examples.windows is not None and examples.windows.firsts.tolist() == [0, 1]
    last = len(examples) - 1
    assert examples.counts == {"examples": 2, "windows": len(examples)}, "as records say"
    assert examples.at(np.array([0])).counts == {"examples": 1}
    counted = ExtractiveQAKind(ExtractiveQA(data={"path": "data"}), []).counted(examples)
    assert np.flatnonzero(counted).tolist() == [0, 1], "metrics are of questions"
    batch = collate(np.array([last, 0, 1]))
    view = batch.views["student"]
    assert isinstance(view, PaddedView) and view.candidates is not None
    for window, text in enumerate(["cat", "cat", "[CLS]"]):
        start, end = batch.labels[2 * window : 2 * window + 2].tolist()
        ids = view.input_ids[window, view.candidates[window, start : end + 1]].tolist()
        assert tokenizer.convert_ids_to_tokens(ids) == [text]
    short = view.candidates[1]
    assert short[4:].tolist() == [-1] * (len(short) - 4) and len(short) > 4
    open_ = tokenizer.convert_ids_to_tokens(view.input_ids[1, short[:4]].tolist())
    assert open_ == ["[CLS]", "a", "cat", "saw"]
    assert batch.row_sets["all"].tolist() == batch.row_sets["labelled"].tolist() == [*range(6)]
    assert view.example_indices.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.keys[:2].tolist() == [examples.keys[last].tolist()] * 2
    empty = collate(NOTHING)
    assert len(empty.labels) == 2 and not any(map(len, empty.row_sets.values()))


# ------------------------------------------------------------------------------ models and losses

FAMILIES = ("bert", "roberta", "deberta-v2", "distilbert", "albert", "electra", "modernbert")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    tagger = built(family, AutoModelForTokenClassification, num_labels=5)
    attention = packed_attention(config_of(family))
    answerer = built(family, AutoModelForQuestionAnswering, attention)
    ids, mask = torch.randint(3, 50, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    positions = torch.tensor([1, 3, 3, 8, 11])
    candidates = torch.tensor([[0, 3, 4, 5], [0, 2, 3, -1]])
    with torch.no_grad():
        whole = tagger(input_ids=ids, attention_mask=mask).logits
        here = read_signals(tagger, PaddedView(ids, mask, positions=positions), Reads({-1}))
        torch.testing.assert_close(here.logits, whole.flatten(0, 1)[positions])
        assert here.hidden[-1].shape == (5, WIDTH)
        view = PaddedView(ids, mask, candidates=candidates)
        found = answerer(input_ids=ids, attention_mask=mask)
        here = read_signals(answerer, view, Reads({-1}))
        assert here.hidden[-1].shape == (4, WIDTH)
        for turn, expected in enumerate((found.start_logits, found.end_logits)):
            rows = here.logits[turn::2]
            torch.testing.assert_close(rows[0], expected[0, candidates[0]])
            torch.testing.assert_close(rows[1, :3], expected[1, candidates[1, :3]])
            assert rows[1, 3] == LACKING
        if attention:
            packed = read_signals(answerer, PackedView.of(view), Reads({-1}))
            torch.testing.assert_close(packed.logits, here.logits, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(packed.hidden[-1], here.hidden[-1], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("term", [KL({"temperature": 2.0}), CrossEntropy()])
def test_losses_do_not_depend_on_padding(term: Any) -> None:
    torch.manual_seed(0)
    logits = {"student": torch.randn(4, 6), "teacher": torch.randn(4, 6)}
    found = []
    for longer in (0, 5):
        wide = {
            name: torch.nn.functional.pad(values, (0, longer), value=LACKING).requires_grad_()
            for name, values in logits.items()
        }
        ids = torch.ones(2, 6 + longer, dtype=torch.int64)
        candidates = torch.where(torch.arange(6 + longer) < 6, torch.arange(6 + longer), -1)
        view = PaddedView(ids, torch.ones_like(ids), candidates=candidates.expand(2, -1))
        batch = Batch.from_views({"student": view}, torch.tensor([0, 1, 2, 3]))
        teachers = {"teacher": Signals(wide["teacher"].detach())}
        loss = term(Seen(Signals(wide["student"]), batch, teachers))
        loss.sum().backward()
        gradient = wide["student"].grad
        assert gradient is not None and (gradient[:, 6:] == 0).all()
        found.append((loss.detach(), gradient[:, :6]))
    torch.testing.assert_close(found[0], found[1])


@settings(max_examples=30)
@given(dtype=st.sampled_from(["float16", "bfloat16", "float32"]), data=st.data())
def test_cached_rows_are_as_long_as_their_contexts(dtype: Any, data: st.DataObject) -> None:
    """Rows of unlike lengths come back from a cache's columns, whatever the batch they were in."""
    tokens = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    candidates = torch.full((len(tokens), 1 + max(tokens)), -1)
    for row, count in zip(candidates, tokens, strict=True):
        row[: 1 + count] = torch.arange(1 + count)
    known = (candidates >= 0).repeat_interleave(2, dim=0)
    numbers = torch.tensor(
        data.draw(st.lists(st.integers(-99, 99), min_size=known.numel(), max_size=known.numel()))
    )
    logits = numbers.reshape(known.shape).float().masked_fill(~known, LACKING)
    schema = SignalSchema(dtype=dtype, classes=9, ragged=True, mask_variants=1)
    encoded = schema.encode(Signals(logits))
    assert encoded.finite.all()
    [column] = schema.record_batch([encoded], np.full(len(tokens), 2)).columns
    assert len(column) == len(tokens)
    decoded = schema.decode(encoded.columns)
    assert decoded.logits.shape == (len(logits), 9)
    assert torch.equal(cut_to(candidates, decoded).logits, logits)
    shares = schema.log_probs(encoded.columns)[:, : known.shape[1]]
    torch.testing.assert_close(shares.exp(), logits.softmax(1))
    other = candidates.clone()
    other[0, 0] = -1
    with pytest.raises(ValueError, match="other tokens than the batch's"):
        cut_to(other, decoded)


def test_what_a_cache_takes_is_planned() -> None:
    task = ExtractiveQA(data={"path": "data"}, max_length=64)
    config, phase = AutoConfig.for_model("bert", hidden_size=8), Cache(splits="train", hidden=[-1])
    schema = ExtractiveQAKind(task, []).signal_schema(phase, config, lambda _: None, None)
    sizes = [size for size in schema.items.values() if size is not None]
    assert example_bytes(phase, task, config, 2, 50.0) == 2 * sum(sizes)
    spans, phase = CharacterSpans(data={"path": "data"}), Cache(splits="train", dtype="float32")
    assert example_bytes(phase, spans, BertConfig(), 2, 100) == 0.75 * 100 * 2 * 4
