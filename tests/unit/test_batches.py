"""From text to batches with real tokenizers: each model sees what its own tokenizer gives."""

import json
import os
import time

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer, BertTokenizer

from ds_distill.data import tokenise as data_tokenise
from ds_distill.data.batches import Collator, Examples, text_rows
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import tokenizer_fingerprint, tokens_fingerprint
from ds_distill.keys import content_keys
from ds_distill.process import activity as progress
from ds_distill.process.activity import counted_by
from ds_distill.types import Signals

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
    keys = content_keys(texts, second)
    labels = np.arange(len(texts), dtype=np.int64) % 3 - 1
    columns = {"text": texts, "label": labels, "key_hi": keys[:, 0], "key_lo": keys[:, 1]}
    if second is not None:
        columns["text_b"] = second
    return datasets.Dataset.from_dict(columns)


@pytest.fixture(scope="session")
def tokenizers(tiny_models):
    """Of BERT, RoBERTa and DeBERTa-v3."""
    return {family: AutoTokenizer.from_pretrained(tiny_models[family]) for family in FAMILIES}


def make_table(split, tokenizer, folder, max_length=MAX_LENGTH):
    file = folder / f"{tokenizer_fingerprint(tokenizer)}-{max_length}.arrow"
    tokenise(split, tokenizer, max_length, file)
    return TokenTable(file, tokenizer)


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
    tokenise(make_split(second=SECOND), distilbert, MAX_LENGTH, tmp_path / "tokens.arrow")
    for tokenizer in (bert, distilbert):
        view = TokenTable(tmp_path / "tokens.arrow", tokenizer).view(np.arange(len(TEXTS)))
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
    shown: list[str] = []
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
    tokenise(split, tokenizers["bert"], MAX_LENGTH, file)
    assert list(tmp_path.iterdir()) == [file]  # what the killed one left is gone too
    assert len(TokenTable(file, tokenizers["bert"]).lengths) == len(split)


# ----------------------------------------------------------------------------- batches


def test_models_with_the_same_tokenizer_share_one_view(tokenizers, tmp_path):
    split = make_split()
    bert, roberta = (make_table(split, tokenizers[name], tmp_path) for name in ("bert", "roberta"))
    collate = Collator(
        Examples.of(split), {"student": bert, "first": roberta, "second": bert}, text_rows
    )
    batch = collate(np.array([4, 0]))
    assert batch.views["student"] is batch.views["second"]
    assert batch.views["first"] is not batch.views["student"]
    np.testing.assert_array_equal(collate.lengths, bert.lengths)
    asking = Collator(Examples.of(split), {"first": roberta, "second": bert}, text_rows)
    np.testing.assert_array_equal(asking.lengths, np.maximum(bert.lengths, roberta.lengths))
    moved = batch.to(torch.device("cpu"))
    assert moved.views["student"] is moved.views["second"]


def test_a_batch_holds_keys_labels_and_row_sets(tokenizers, tmp_path):
    split = make_split()
    collate = Collator(
        Examples.of(split), {"student": make_table(split, tokenizers["bert"], tmp_path)}, text_rows
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

    batch = Collator(Examples.of(split), tables, text_rows, cached)(np.array([], dtype=np.int64))
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
    without = Collator(Examples.of(split), tables, text_rows, cached)(np.arange(2), signals=False)
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
