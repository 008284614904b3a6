"""From texts, words and questions to batches with real tokenizers: each model sees what its own
tokenizer gives; which rows there are, which count, and what models and losses make of them."""

import json
import os
import time

import numpy as np
import pyarrow as pa
import pytest
import torch
from families import WIDTH, built, config_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import CONTEXT, TAGS, asked, collator, read, texts_split
from slow_windows import encode_words
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertTokenizer,
)

from ds_distill.cache.schema import SignalSchema
from ds_distill.data import tokenise as data_tokenise
from ds_distill.data.batches import (
    Collator,
    Units,
    cut_to,
    label_rows,
    stored_rows,
    word_token_rows,
)
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import load_tokenizer, tokenizer_fingerprint, tokens_fingerprint
from ds_distill.data.windows import question_windows, word_windows
from ds_distill.evaluation.answers import Answers
from ds_distill.keys import content_keys
from ds_distill.losses import KL, CrossEntropy, Seen
from ds_distill.models.encoder import read_signals
from ds_distill.models.packing import packed_attention
from ds_distill.process import activity as progress
from ds_distill.process.activity import counted_by
from ds_distill.reads import Reads
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import CharacterSpans, ExtractiveQA
from ds_distill.tasks.extractive_qa import ExtractiveQAKind
from ds_distill.types import LACKING, Batch, Signals
from ds_distill.views import PackedView, PaddedView

TEXTS = [
    "A naïve café-owner's 'résumé': 12,345.67 €!",
    "short",
    "",
    "Two  spaces,\ttab\nand newline; supercalifragilisticexpialidocious",
    "日本語 and emoji 🙂 mixed with <s> [SEP] special-looking text",
    "word " * 60,
    "The quick brown fox jumps over the lazy dog. " * 2,
]
SECOND = ["x y", "", "The second text of a pair. " * 4, "why", "🙂", "no", "d"]
FAMILIES = ["bert", "roberta", "deberta"]
MAX_LENGTH = 24


def make_split(texts=TEXTS, second=None):
    return texts_split(texts, second, label=np.arange(len(texts)) % 3 - 1)


@pytest.fixture(scope="session")
def tokenizers(tiny_models):
    """Of BERT, RoBERTa and DeBERTa-v3."""
    return {family: AutoTokenizer.from_pretrained(tiny_models[family]) for family in FAMILIES}


def make_table(split, tokenizer, folder, max_length=MAX_LENGTH):
    file = folder / f"{tokenizer_fingerprint(tokenizer)}-{max_length}.arrow"
    return TokenTable(tokenise(split, tokenizer, max_length, file), tokenizer)


@pytest.mark.parametrize("pairs", [False, True], ids=["single", "pairs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_view_is_what_the_models_own_tokenizer_gives(tokenizers, family, pairs, tmp_path):
    tokenizer, second = tokenizers[family], SECOND if pairs else None
    table = make_table(make_split(second=second), tokenizer, tmp_path)
    for chosen in ([0, 1, 2, 3, 4, 5, 6], [6, 2, 0], [1], [3, 3]):
        view = table.view(np.array(chosen))
        assert view.is_full is bool(view.attention_mask.all())
        own = tokenizer(
            [TEXTS[i] for i in chosen],
            [SECOND[i] for i in chosen] if pairs else None,
            truncation=True,
            max_length=MAX_LENGTH,
            padding=True,
            return_tensors="pt",
        )
        inputs = view.model_inputs()
        assert inputs.keys() == own.keys()
        for name, tensor in own.items():
            assert torch.equal(inputs[name], tensor), name
        assert view.positions is None
        np.testing.assert_array_equal(table.lengths[chosen], own["attention_mask"].sum(dim=1))


def test_models_that_take_other_inputs_with_the_same_tokens_share_a_file(tiny_models, tmp_path):
    """As BERT and DistilBERT, which were tokenised and stored twice. What a cache is found by tells
    them apart, as before."""
    bert = AutoTokenizer.from_pretrained(tiny_models["toy"])
    distilbert = AutoTokenizer.from_pretrained(tiny_models["toy"])
    distilbert.model_input_names = ["input_ids", "attention_mask"]
    assert tokens_fingerprint(bert) == tokens_fingerprint(distilbert)
    assert tokenizer_fingerprint(bert) != tokenizer_fingerprint(distilbert)
    tokens = tokenise(make_split(second=SECOND), distilbert, MAX_LENGTH)
    for tokenizer in (bert, distilbert):
        view = TokenTable(tokens, tokenizer).view(np.arange(len(TEXTS)))
        own = tokenizer(
            TEXTS, SECOND, truncation=True, max_length=MAX_LENGTH, padding=True, return_tensors="pt"
        )
        assert view.model_inputs().keys() == own.keys()
        assert all(torch.equal(view.model_inputs()[name], own[name]) for name in own)


def test_all_cores_write_the_same_file(tiny_models, tmp_path, monkeypatch):
    split = make_split(TEXTS * 400)
    tokenizer = AutoTokenizer.from_pretrained(tiny_models["toy"])
    files = []
    for parallel in ("false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        folder = tmp_path / parallel
        tokenise(split, tokenizer, MAX_LENGTH, folder / "tokens.arrow")
        files.append((folder / "tokens.arrow").read_bytes())
    assert files[0] == files[1]


def test_a_bar_counts_the_examples_that_are_tokenised(tiny_models, tmp_path):
    split, done = make_split(TEXTS * 400), []
    tokenizer = AutoTokenizer.from_pretrained(tiny_models["toy"])
    with counted_by(done.append):
        tokenise(split, tokenizer, MAX_LENGTH, tmp_path / "tokens.arrow")
    assert len(done) > 2 and sum(done) == len(split)
    tokenise(split, tokenizer, MAX_LENGTH, tmp_path / "again.arrow")
    assert sum(done) == len(split)


def test_what_takes_long_is_announced(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "TELL_SECONDS", 0.05)
    monkeypatch.setattr(progress, "TELL_AGAIN_SECONDS", 0.05)
    with progress.announced(shown.append):
        progress.mark("counts the tokens of a sample")
        deadline = time.monotonic() + 30
        while len(shown) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(shown) >= 2 and shown[0].endswith("counts the tokens of a sample ...")
    monkeypatch.setattr(progress, "TELL_SECONDS", 60.0)
    with progress.announced(shown.append):
        count = len(shown)
    assert len(shown) == count


def test_a_part_of_a_table_is_numbered_anew(tokenizers, tmp_path):
    table = make_table(make_split(), tokenizers["bert"], tmp_path)
    part = table.at(np.array([5, 3, 1])).at(np.array([2, 0]))
    view, wanted = part.view(np.array([0, 1])), table.view(np.array([1, 5]))
    assert torch.equal(view.input_ids, wanted.input_ids)
    assert part.lengths.tolist() == table.lengths[[1, 5]].tolist()


def test_tokens_are_on_disk_and_memory_mapped(tokenizers, tmp_path):
    table = make_table(make_split(), tokenizers["bert"], tmp_path)
    [file] = tmp_path.iterdir()
    with pa.memory_map(str(file)) as source:
        stored = pa.ipc.open_stream(source).read_all()
    [ids] = stored.columns
    assert ids.type == pa.list_(pa.int32())
    assert ids.to_pylist()[1] == tokenizers["bert"]("short")["input_ids"]
    with open("/proc/self/maps") as maps:
        assert str(file) in maps.read()
    assert len(table.lengths) == len(TEXTS)


def test_a_killed_tokenisation_leaves_no_token_file(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # a fork has no threads
    file = tmp_path / "tokens.arrow"
    split = make_split(TEXTS * 300)
    child = os.fork()
    if child == 0:
        seen = []

        def killed(what, done):
            seen.append(done)
            if len(seen) == 2:  # of three batches
                os.kill(os.getpid(), 9)

        monkeypatch.setattr(data_tokenise, "mark", killed)
        tokenise(split, tokenizers["bert"], MAX_LENGTH, file)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9
    assert not file.exists()
    assert len(tokenise(split, tokenizers["bert"], MAX_LENGTH, file)) == len(split)
    assert list(tmp_path.iterdir()) == [file]  # what the killed one left is gone too


# ----------------------------------------------------------------------------- batches


def test_models_with_the_same_tokenizer_share_one_view(tokenizers, tmp_path):
    split = make_split()
    bert, roberta = (make_table(split, tokenizers[name], tmp_path) for name in ("bert", "roberta"))
    collate = Collator(
        Units.of(split), {"student": bert, "first": roberta, "second": bert}, label_rows
    )
    batch = collate(np.array([4, 0]))
    assert batch.views["student"] is batch.views["second"]
    assert batch.views["first"] is not batch.views["student"]
    np.testing.assert_array_equal(collate.lengths, bert.lengths)
    asking = Collator(Units.of(split), {"first": roberta, "second": bert}, label_rows)
    np.testing.assert_array_equal(asking.lengths, np.maximum(bert.lengths, roberta.lengths))
    moved = batch.to(torch.device("cpu"))
    assert moved.views["student"] is moved.views["second"]


def test_a_batch_holds_keys_labels_and_row_sets(tokenizers, tmp_path):
    split = make_split()
    collate = Collator(
        Units.of(split), {"student": make_table(split, tokenizers["bert"], tmp_path)}, label_rows
    )
    batch = collate(np.array([2, 0, 4, 3]), epoch=5)
    assert batch.labels.tolist() == [1, -100, 0, -100]  # -1, no label, is -100 here
    assert batch.row_sets["all"].tolist() == [0, 1, 2, 3]
    assert batch.row_sets["labelled"].tolist() == [0, 2]
    np.testing.assert_array_equal(batch.keys, content_keys([TEXTS[i] for i in (2, 0, 4, 3)]))
    assert batch.epoch == 5


def test_no_examples_make_a_dummy_row_that_is_counted_nowhere(tokenizers, tmp_path):
    split = make_split()
    tables = {name: make_table(split, tokenizers[name], tmp_path) for name in ("bert", "roberta")}
    calls = []

    def cached(indices, epoch):
        calls.append(indices)
        return {"roberta": Signals(torch.zeros(len(indices), 3))}

    batch = Collator(Units.of(split), tables, label_rows, cached)(np.array([], dtype=np.int64))
    assert [view.input_ids.shape for view in batch.views.values()] == [(1, 1), (1, 1)]
    first = [tokenizers[name].cls_token_id for name in batch.views]
    assert [int(view.input_ids) for view in batch.views.values()] == first, (
        "no text, which may be bad"
    )
    assert len(batch.keys) == len(batch.labels) == len(batch.signals["roberta"].logits) == 1
    assert {name: rows.tolist() for name, rows in batch.row_sets.items()} == {
        "all": [],
        "labelled": [],
    }
    assert calls[0].tolist() == [0]  # an example that the cache holds
    without = Collator(Units.of(split), tables, label_rows, cached)(np.arange(2), signals=False)
    assert without.signals == {} and len(calls) == 1


# ------------------------------------------------------------------------- fingerprints


def small_bert(**options):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b"]
    return BertTokenizer(vocab={token: i for i, token in enumerate(vocabulary)}, **options)


def test_a_fingerprint_knows_what_changes_the_tokens():
    plain = small_bert()
    other = {
        "case": small_bert(do_lower_case=False),
        "side of the cut": small_bert(truncation_side="left"),
        "inputs": small_bert(model_input_names=["input_ids", "attention_mask"]),
        "special token": small_bert(unk_token="a"),
    }
    added = small_bert()
    added.add_tokens(["ab"])
    prints = {name: tokenizer_fingerprint(kind) for name, kind in {**other, "added": added}.items()}
    assert len({tokenizer_fingerprint(plain), *prints.values()}) == len(prints) + 1


def test_a_fingerprint_does_not_depend_on_use_or_location(tmp_path):
    tokenizer = small_bert()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a b", "b"], padding=True, truncation=True, max_length=8)
    assert tokenizer_fingerprint(tokenizer) == before
    for name in ("one", "two"):
        tokenizer.save_pretrained(tmp_path / name)
        assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path / name)) == before
        config = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"]


NOTHING = np.array([], dtype=np.int64)


@pytest.fixture(scope="module")
def toy(tiny_models):
    return load_tokenizer(str(tiny_models["toy"]), of_words=True)


# ----------------------------------------------------------------------------------------- words

ROWS = [
    {"tokens": ["the", "cat", "saw", "snow"], "tags": ["O", "B-gene", "O", "B-disease"]},
    {"tokens": ["rain"], "tags": ["B-disease"]},
    {"tokens": ["a", "\u200b", "very", "old", "tiger"], "tags": ["O", "O", "O", "O", "B-gene"]},
]


def test_a_row_per_word(tmp_path, toy):
    """U+200B has no token."""
    split = word_windows(read("token-classification", tmp_path, ROWS), [toy], 16)
    examples, collate = collator(split, toy, 16)
    assert len(examples) == 3 and len(examples.labels) == 10
    batch = collate(np.array([2, 0]))
    assert batch.labels.tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 3]
    assert batch.row_sets["all"].tolist() == [0, *range(2, 9)]
    assert batch.row_sets["labelled"].tolist() == [0, *range(2, 9)]
    assert stored_rows(batch).tolist() == list(range(9))
    assert (batch.keys[:5] == examples.keys[2]).all() and (batch.keys[5:] == examples.keys[0]).all()
    view = batch.views["student"]
    assert view.positions is not None and view.example_indices.tolist() == [0] * 5 + [1] * 4
    read_ = toy.convert_ids_to_tokens(view.input_ids.flatten()[view.positions].tolist())
    counted = [read_[row] for row in batch.row_sets["all"].tolist()]
    assert counted == ["a", "very", "old", "tiger", "the", "cat", "saw", "snow"]
    assert read_[1] == "[CLS]", "words without a token are read at the first position"
    empty = collate(NOTHING)
    assert not any(map(len, empty.row_sets.values()))
    assert len(empty.labels) == 4 and not len(stored_rows(empty))
    plain = read("token-classification", tmp_path, [{"tokens": row["tokens"]} for row in ROWS])
    examples = Units.of(word_windows(plain, [toy], 16))
    assert not examples.labelled.any() and set(examples.labels.tolist()) == {-1}
    assert examples.counted.sum() == 9


def test_a_row_per_token_where_all_are_trained(vocabularies, tmp_path):
    """As transformers' own examples align tags with `label_all_tokens`; words that do not count in
    every view are left out."""
    rows = [
        {"tokens": ["the", "interleukin-2", "\u200b", "receptor's"], "tags": TAGS[:4]},
        {"tokens": ["hyperparathyroidism"], "tags": ["B-disease"]},
        {"tokens": ["a", "very", "thrombocytopenic", "old", "tiger"] * 9, "tags": ["O"] * 45},
    ]
    names = ("pubmedbert-uncased", "deberta-v3-base", "roberta-base")
    real = [load_tokenizer(str(vocabularies[name]), of_words=True) for name in names]
    split = word_windows(read("token-classification", tmp_path, rows), real, 40)
    chosen = np.array([2, 0, 1])
    for tokenizer in real:
        examples, collate = collator(split, tokenizer, 40, word_token_rows)
        batch = collate(chosen)
        view = batch.views["student"]
        expected = torch.full(view.input_ids.shape, -100)
        for row, number in enumerate(chosen):
            encoded = encode_words(tokenizer, [split[int(number)]["words"]], 40)
            for token, word in enumerate(encoded.word_ids(0)):
                if word is not None and examples.counted[examples.offsets[number] + word]:
                    expected[row, token] = examples.labels[examples.offsets[number] + word]
        found = torch.full_like(expected, -100)
        counted = batch.row_sets["labelled"]
        assert torch.equal(counted, batch.row_sets["all"])
        found.view(-1)[view.positions[counted]] = batch.labels[counted]
        assert torch.equal(found, expected), tokenizer
        assert len(counted) > examples.counted.sum(), "words of several tokens"
        assert torch.equal(batch.keys, examples.keys[chosen][view.example_indices])
        empty = collate(chosen[:0])
        assert len(empty.labels) > 0 and not any(map(len, empty.row_sets.values()))


def test_words_of_a_context_stand_behind_the_question_and_count_once(tmp_path, toy):
    long = " ".join([CONTEXT] * 4)  # 40 words, of which 27 have room behind the question
    animals = [{"start": 4, "end": 7}, {"start": 23, "end": 26}]
    rows = [
        {"question": "we had", "context": long, "answers": animals},
        {"question": "which food", "context": CONTEXT, "answers": []},
    ]
    split = word_windows(read("character-spans", tmp_path, rows), [toy], 32)
    examples, collate = collator(split, toy, 32)
    batch = collate(np.arange(3))
    assert examples.number.tolist() == [0, 0, 1]
    view = batch.views["student"]
    seen = toy.convert_ids_to_tokens(view.input_ids.flatten()[view.positions].tolist())
    of_rows = examples.number[view.example_indices.numpy()]
    for number, text in ((0, long), (1, CONTEXT)):
        mine = [row for row in np.flatnonzero(examples.counted) if of_rows[row] == number]
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


def test_two_rows_per_window(tmp_path, tiny_models):
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    long = " ".join(["snow", "rain"] * 20 + ["cat"])
    rows = asked(["who?", "we saw"], ["a cat saw", long], [[(2, 5)], [(200, 203)]])
    split = question_windows(rows, tokenizer, 32, 8)
    examples, collate = collator(split, tokenizer, 32)
    assert np.flatnonzero(examples.is_first).tolist() == [0, 1]
    last = len(examples) - 1
    assert examples.counts == {"examples": 2, "windows": len(examples)}, "as records say"
    assert examples.at(np.array([0])).counts == {"examples": 1}
    kind = ExtractiveQAKind(ExtractiveQA(data={"path": "data"}), [])
    counted = np.flatnonzero(kind.counted(examples))
    assert counted.tolist() == [0, 1], "metrics are of questions"
    assert kind.labels_of(examples.at(counted)).shape == (2, 2), "the mark is as before"
    finite = kind.finite(Answers([], np.arange(len(examples)) != 1))
    assert examples.of_rows[~finite].tolist() == [1, 1]
    batch = collate(np.array([last, 0, 1]))
    view = batch.views["student"]
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

HEADED = ("bert", "roberta", "deberta-v2", "distilbert", "albert", "electra", "modernbert")


@pytest.mark.parametrize("family", HEADED)
def test_logits_are_those_of_transformers(family):
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
def test_losses_do_not_depend_on_padding(term):
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
        assert (gradient[:, 6:] == 0).all()
        found.append((loss.detach(), gradient[:, :6]))
    torch.testing.assert_close(found[0], found[1])


@settings(max_examples=30)
@given(dtype=st.sampled_from(["float16", "bfloat16", "float32"]), data=st.data())
def test_cached_rows_are_as_long_as_their_contexts(dtype, data):
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


def test_what_a_cache_takes_is_planned():
    task = ExtractiveQA(data={"path": "data"}, max_length=64)
    config, phase = AutoConfig.for_model("bert", hidden_size=8), Cache(splits="train", hidden=[-1])
    schema = ExtractiveQAKind(task, []).signal_schema(phase, config, lambda _: None, None)
    sizes = [size for size in schema.items.values() if size is not None]
    assert phase.example_bytes(task, 8, 2, 30522, 50.0) == 2 * sum(sizes)
    spans, phase = CharacterSpans(data={"path": "data"}), Cache(splits="train", dtype="float32")
    assert phase.example_bytes(spans, 768, 2, 30522, 100) == 0.75 * 100 * 2 * 4
