"""Words and their tags: where a word's token stands in each view, which words count, entities."""

from __future__ import annotations

import io
import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import seqeval.metrics
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seqeval.scheme import IOB2
from sklearn.metrics import f1_score
from slow_windows import encode_words, first_tokens, windows_of_text, with_counted
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoConfig, AutoModelForTokenClassification

from ds_distill.data import words as data_words
from ds_distill.data.batches import Collator, Examples, stored_rows
from ds_distill.data.cutting import without_tokens, write_tokens
from ds_distill.data.open_source import open_source
from ds_distill.data.readers import open_file
from ds_distill.data.rows import word_rows, word_token_rows
from ds_distill.data.text_windows import TextWindows
from ds_distill.data.text_windows import prepare as windows_of_texts
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import load_tokenizer, tokens_fingerprint
from ds_distill.data.word_tokens import room
from ds_distill.data.word_windows import ContextWords
from ds_distill.data.words import (
    NO_TOKEN,
    Words,
    lost_spans,
    tags_of_spans,
    widened_spans,
    word_keys,
    words_of,
)
from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.words import TagPredictions, entities
from ds_distill.keys import numbered_keys
from ds_distill.models.encoder import read_signals
from ds_distill.predictors.file import predict_file
from ds_distill.predictors.prediction import load_predictor
from ds_distill.predictors.tagging import Tagger
from ds_distill.reads import Reads
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.metrics.words import EntityF1, EntityPrecision, EntityRecall, WordF1
from ds_distill.recipe.tags import are_entities, entity_types
from ds_distill.recipe.tasks import TokenClassification
from ds_distill.reporting.results import metrics_of
from ds_distill.tasks.token_classification import TokenClassificationKind
from ds_distill.views import PaddedView

TAGS = ["O", "B-gene", "I-gene", "B-disease", "I-disease"]

HOSTILE = [
    *("\u200b", "\u00ad", "\ufe0f", "\u0007", "\u00a0", "\u2028", " ", "\t", "\ufffd", "\u202e"),
    *(
        "e\u0301",
        "\u0301",
        "\u05d0\u05d1",
        "\u0627\u0644",
        "\U0001f468\u200d\U0001f469",
        "\U0001f1e9",
    ),
    *("Parkinson", "IL-2", "\u4e2d\u56fd", "a b", "[SEP]", "</s>", "\u2581", "##s", "\u0120", "'"),
]
words_strategy = st.lists(
    st.one_of(
        st.sampled_from(HOSTILE),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def real(vocabularies: dict[str, Path]) -> dict[str, Any]:
    """Tokenizers of unlike kinds, for lists of words."""
    return {name: load_tokenizer(str(at), of_words=True) for name, at in vocabularies.items()}


# ------------------------------------------------------------------------------- words in views


def test_the_same_words_count_in_every_view(real: dict[str, Any]) -> None:
    """Words are cut one by one, so what each has alone says where its first token stands."""

    @settings(max_examples=12, deadline=None)
    @given(words=words_strategy, max_length=st.integers(8, 24))
    def check(words: list[str], max_length: int) -> None:
        have = np.ones(len(words), dtype=bool)
        for tokenizer in real.values():
            alone = [
                len(
                    tokenizer([word], is_split_into_words=True, add_special_tokens=False)[
                        "input_ids"
                    ]
                )
                for word in words
            ]
            before = 1 + np.cumsum([0, *alone[:-1]])  # one special token stands before the words
            room = max_length - 1  # and one after them
            expected = [
                at if count and at < room else NO_TOKEN
                for at, count in zip(before.tolist(), alone, strict=True)
            ]
            encoded = encode_words(tokenizer, [words], max_length)
            found = first_tokens(encoded, len(words))
            assert found == expected
            have &= np.array(found) != NO_TOKEN
        keys = word_keys([words])
        row = {
            "words": [words],
            "label": [[0] * len(words)],
            "key_hi": keys[:, 0],
            "key_lo": keys[:, 1],
        }
        every = list(real.values())
        split = windows_of_texts(datasets.Dataset.from_dict(row), every, max_length)
        slow = windows_of_text(every, max_length, words)
        for name in (set(split.column_names) & set(slow[0])) | {"words", "counted"}:
            assert list(split[name]) == [window[name] for window in slow], name
        assert len(split) == len(slow)
        assert ("owned" in split.column_names) == (len(slow) > 1)
        missing = {name for name in slow[0] if name not in split.column_names}
        assert missing <= {"owned"}
        if len(slow) == 1:
            assert list(split["counted"]) == [have.tolist()]

    check()


def test_tokens_of_windows_are_as_if_they_were_tokenised_again(
    real: dict[str, Any], tmp_path: Path
) -> None:
    rows = [
        {"tokens": ["the", "interleukin-2", "\u200b", "receptor's"] * n, "tags": TAGS[:4] * n}
        for n in (1, 9, 2)
    ]
    split = windows_of_texts(written(tmp_path / "data", rows), [*real.values()], 24)
    write_tokens(split, lambda fingerprint: tmp_path / f"{fingerprint}.arrow")
    examples = without_tokens(split)
    assert not any(":" in name for name in examples.column_names) and len(examples) > len(rows)
    for tokenizer in real.values():
        tokenise(examples, tokenizer, 24, tmp_path / "again.arrow")
        found = tmp_path / f"{tokens_fingerprint(tokenizer)}.arrow"
        tables = [datasets.Dataset.from_file(str(at)) for at in (found, tmp_path / "again.arrow")]
        assert tables[0].features == tables[1].features
        assert tables[0][:] == tables[1][:]


def test_roberta_reads_words_with_a_space_before_each(real: dict[str, Any]) -> None:
    roberta = real["roberta-base"]
    text = "the tumour suppressor gene"
    in_text = roberta(text, add_special_tokens=False)["input_ids"]
    in_list = roberta(text.split(), is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert in_list[1:] == in_text[1:]
    assert roberta.convert_ids_to_tokens(in_list)[0] == "Ġthe"


def test_a_tokenizer_that_cuts_words_otherwise_is_refused(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "the": 1, " word": 2, "word": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[a-z]+"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)) is not None
    with pytest.raises(UserError, match="cuts a word of a list otherwise than in a text"):
        load_tokenizer(str(tmp_path), of_words=True)


@given(st.lists(st.lists(st.text(max_size=3), max_size=4), max_size=4, unique_by=tuple))
def test_lists_of_words_that_differ_have_keys_that_differ(lists: list[list[str]]) -> None:
    assert len({tuple(key) for key in word_keys(lists).tolist()}) == len(lists)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_words_of_some_examples(lengths: list[int], data: st.DataObject) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    counted = np.array(
        data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    )
    words = Words(offsets, counted)
    some = np.array(
        data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8)), dtype=np.int64
    )
    rows = [row for one in some for row in range(offsets[one], offsets[one + 1])]
    assert words.of_examples(some).tolist() == rows
    assert words.at(some).counted.tolist() == counted[rows].tolist() if rows else True
    assert np.diff(words.at(some).offsets).tolist() == [lengths[one] for one in some]
    assert [int(owner) for owner in words.examples] == [
        number for number, length in enumerate(lengths) for _ in range(length)
    ]


def test_words_of_some_examples_are_found_without_looking_at_all(monkeypatch) -> None:
    """Differences over all examples took 70 ms of each micro-batch with 10M of them."""
    offsets = np.arange(0, 3_001, 3)
    of_words = Words(offsets, np.ones(3_000, dtype=bool))
    number = np.arange(1_000)
    answers = np.stack([number // 2 * 2, number, number + 1], axis=1)  # two of each even question
    windows = ContextWords(
        offsets, of_words.counted, number, number * 0, np.zeros((3_000, 2), dtype=np.int64), answers
    )
    for name in ("diff", "isin"):
        monkeypatch.setattr(np, name, lambda *_: pytest.fail("over all"))
    some = np.array([7, 4, 998])
    assert of_words.of_examples(some).tolist() == [21, 22, 23, 12, 13, 14, 2994, 2995, 2996]
    assert of_words.at(some).offsets.tolist() == [0, 3, 6, 9]
    assert windows.at(some).answers.tolist() == answers[[4, 5, 998, 999]].tolist()
    assert windows.at(some[:1]).answers.tolist() == []


# -------------------------------------------------------------------------------------- batches


def written(folder: Path, rows: list[dict[str, Any]], **data: Any) -> datasets.Dataset:
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TokenClassification(data={"path": str(folder), **data}, labels=TAGS)
    return open_source(task, cache_folder=folder / "cache").read("train")


ROWS = [
    {"tokens": ["the", "cat", "saw", "snow"], "tags": ["O", "B-gene", "O", "B-disease"]},
    {"tokens": ["rain"], "tags": ["B-disease"]},
    {"tokens": ["a", "\u200b", "very", "old", "tiger"], "tags": ["O", "O", "O", "O", "B-gene"]},
]


def collator(folder: Path, model: Path, **options: Any) -> tuple[Examples, Collator]:
    """max_length 6: of the third example `old` and `tiger` are cut off, and U+200B has no token."""
    tokenizer = load_tokenizer(str(model), of_words=True)
    split = with_counted(written(folder, ROWS), [tokenizer], 5)
    tokenise(split, tokenizer, 5, folder / "tokens.arrow")
    examples = Examples.of(split)
    return examples, Collator(
        examples, {"student": TokenTable(folder / "tokens.arrow", tokenizer)}, word_rows, **options
    )


def test_a_row_per_word(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    examples, collate = collator(tmp_path / "data", tiny_models["toy"])
    assert len(examples) == 3 and len(examples.labels) == 10
    batch = collate(np.array([2, 0]))
    assert batch.labels.tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 3]
    assert batch.row_sets["all"].tolist() == [0, 2, 3, 5, 6, 7]
    assert batch.row_sets["labelled"].tolist() == [0, 2, 3, 5, 6, 7]
    assert stored_rows(batch).tolist() == list(range(9))
    assert (batch.keys[:5] == examples.keys[2]).all() and (batch.keys[5:] == examples.keys[0]).all()
    view = batch.views["student"]
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    assert view.positions is not None and view.example_indices.tolist() == [0] * 5 + [1] * 4
    read = tokenizer.convert_ids_to_tokens(view.input_ids.flatten()[view.positions].tolist())
    counted = [read[row] for row in batch.row_sets["all"].tolist()]
    assert counted == ["a", "very", "old", "the", "cat", "saw"]
    assert read[1] == read[4] == "[CLS]", "words without a token are read at the first position"


def test_a_row_per_token_where_all_are_trained(real: dict[str, Any], tmp_path: Path) -> None:
    """As transformers' own examples align tags with `label_all_tokens`; words that do not count in
    every view are left out."""
    rows = [
        {"tokens": ["the", "interleukin-2", "\u200b", "receptor's"], "tags": TAGS[:4]},
        {"tokens": ["hyperparathyroidism"], "tags": ["B-disease"]},
        {"tokens": ["a", "very", "thrombocytopenic", "old", "tiger"] * 9, "tags": ["O"] * 45},
    ]
    split = with_counted(written(tmp_path / "data", rows), [*real.values()], 40)
    examples = Examples.of(split)
    assert examples.words is not None
    offsets, chosen = examples.words.offsets, np.array([2, 0, 1])
    for name, tokenizer in real.items():
        tokenise(split, tokenizer, 40, tmp_path / f"{name}.arrow")
        table = TokenTable(tmp_path / f"{name}.arrow", tokenizer)
        batch = Collator(examples, {"student": table}, word_token_rows)(chosen)
        view = batch.views["student"]
        expected = torch.full(view.input_ids.shape, -100)
        for row, number in enumerate(chosen):
            encoded = encode_words(tokenizer, [rows[number]["tokens"]], 40)
            for token, word in enumerate(encoded.word_ids(0)):
                if word is not None and examples.words.counted[offsets[number] + word]:
                    expected[row, token] = examples.labels[offsets[number] + word]
        found = torch.full_like(expected, -100)
        counted = batch.row_sets["labelled"]
        assert torch.equal(counted, batch.row_sets["all"])
        assert view.positions is not None
        found.view(-1)[view.positions[counted]] = batch.labels[counted]
        assert torch.equal(found, expected), name
        assert len(counted) > examples.words.counted.sum(), "words of several tokens"
        assert torch.equal(batch.keys, examples.keys[chosen][view.example_indices])
        empty = Collator(examples, {"student": table}, word_token_rows)(chosen[:0])
        assert len(empty.labels) > 0 and not any(map(len, empty.row_sets.values()))


def test_a_batch_of_no_examples_has_rows_that_do_not_count(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    batch = collator(tmp_path / "data", tiny_models["toy"])[1](np.array([], dtype=np.int64))
    assert all(len(rows) == 0 for rows in batch.row_sets.values())
    assert len(batch.labels) == 4 and not len(stored_rows(batch))


def test_unlabelled_splits_have_no_labelled_rows(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    tokenizer = load_tokenizer(str(tiny_models["toy"]), of_words=True)
    plain = written(tmp_path / "data", [{"tokens": row["tokens"]} for row in ROWS])
    examples = Examples.of(windows_of_texts(plain, [tokenizer], 16))
    assert not examples.labelled.any() and set(examples.labels.tolist()) == {-1}
    assert examples.words is not None and examples.words.counted.sum() == 9


FAMILIES = ("bert", "roberta", "deberta-v2", "distilbert", "albert", "electra", "modernbert")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_words_are_those_of_transformers(family: str) -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_labels": 5,
        "pad_token_id": 0,
    }
    if family == "modernbert":
        sizes |= {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(config).eval()
    ids = torch.randint(3, 50, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    positions = torch.tensor([1, 3, 3, 8, 11])
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits
        here = read_signals(model, PaddedView(ids, mask, positions=positions), Reads({-1}))
    torch.testing.assert_close(here.logits, whole.flatten(0, 1)[positions])
    assert here.hidden[-1].shape == (5, 32)


# ------------------------------------------------------------------------------------- mistakes


ODD = ["10\u00a0000", "\u3000", "\u2028", "\x85", "\x0b", "\x1c", "\u200b", "\ufeff"]
"""Words that hold what `str.split` takes for white space, or nothing that is seen."""


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["", "byte order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize(
    ("ending", "between"), [("conll", " "), ("conll", "  "), ("conll", "\t"), ("tsv", "\t")]
)
def test_words_of_conll_end_at_blanks_and_tabs_alone(
    ending: str, between: str, end: str, start: str, tmp_path: Path
) -> None:
    """`10<no-break space>000` was the word 10."""
    sentences = [["Ann", *ODD], ["in", "Oslo"]]
    tags = [["B-PER", *["B-n\u00a0b"] * len(ODD)], ["O", "B-LOC"]]
    of_sentences = [
        "".join(f"{word}{between}_{between}{tag}{end}" for word, tag in zip(*one, strict=True))
        for one in zip(sentences, tags, strict=True)
    ]
    blank = " " + end if ending == "conll" else end
    file = tmp_path / f"train.{ending}"
    file.write_bytes((start + blank.join(of_sentences)).encode())
    rows = [row for _, row in open_file(file).rows([])]
    assert rows == [{"tokens": w, "tags": t} for w, t in zip(sentences, tags, strict=True)]


@pytest.mark.parametrize(
    "line", ["\u00a0", "Ann\u00a0B-PER", "Ann B-PER\rmet O", "Ann\tB-PER\rmet\tO"]
)
def test_lines_that_other_white_space_cuts_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_bytes(f"{line}\n".encode())
    with pytest.raises(UserError, match=r"train.conll:1: not a word, a (space|tab) and a tag"):
        list(open_file(tmp_path / "train.conll").rows([]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"], "tags": ["O", "O"]}, "one tag for each of the 1 words"),
        ({"tokens": [], "tags": []}, "must be a list of words, at least one"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "must be a list of words"),
        ({"tokens": ["a", 3], "tags": ["O", "O"]}, "word 1 of 'tokens' must be a text"),
        ({"tokens": ["a", "\ud800"], "tags": ["O", "O"]}, "half of a surrogate pair"),
        ({"tokens": ["a"], "tags": ["B-gen"]}, "Did you mean .B-gene."),
        ({"tokens": ["a"], "tags": [None]}, "word 0 has no tag"),
        ({"tokens": ["a"], "tags": None}, "no tags in 'tags', but"),
        ({"text": "a", "tags": ["O"]}, "no 'tokens'"),
    ],
)
def test_mistakes_in_rows_name_their_location(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        written(tmp_path / "data", [*ROWS, row])
    assert "train.jsonl:4" in str(error.value)


def of_own_text(text: str, start: int, end: int, own: Any) -> dict[str, Any]:
    """A row whose span says which text it has."""
    return {"text": text, "spans": [{"start": start, "end": end, "type": "gene", "text": own}]}


SPANS = [
    {
        "text": "IL-2, a gene",
        "spans": [{"start": 0, "end": 4, "type": "gene"}],
    },
    {
        "text": "flu (or influenza) spreads",
        "spans": [
            {"start": 8, "end": 17, "type": "disease"},
            {"start": 0, "end": 2, "type": "disease", "text": "fl"},
        ],
    },
]


def test_text_with_spans_is_read_as_words_with_tags(tmp_path: Path) -> None:
    """A word of which some characters are in a span is in it whole."""
    split = written(tmp_path / "data", [*SPANS, {"text": "none here", "spans": []}])
    assert list(split["words"]) == [
        ["IL", "-", "2", ",", "a", "gene"],
        ["flu", "(", "or", "influenza", ")", "spreads"],
        ["none", "here"],
    ]
    names = [[TAGS[tag] for tag in tags] for tags in split["label"]]
    assert names[0] == ["B-gene", "I-gene", "I-gene", "O", "O", "O"]
    assert names[1] == ["B-disease", "O", "O", "B-disease", "O", "O"]
    assert names[2] == ["O", "O"]
    task = TokenClassification(data={"path": str(tmp_path / "data")})
    source = open_source(task, cache_folder=tmp_path / "cache")
    assert source.labels == ["O", "B-disease", "I-disease", "B-gene", "I-gene"]
    first = split[1]
    key = (first["key_hi"], first["key_lo"])
    assert source.locations("train", {key})[key].endswith("train.jsonl:2")


def test_words_that_an_earlier_version_has_cut_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "\u5f20\u4e09 x", "spans": [{"start": 0, "end": 2, "type": "gene"}]}]
    with monkeypatch.context() as before:
        before.setattr(data_words, "VERSION", 1)
        before.setattr(data_words, "_CUT", BertPreTokenizer())
        assert list(written(tmp_path / "data", rows)["words"]) == [["\u5f20\u4e09", "x"]]
    split = written(tmp_path / "data", rows)
    assert list(split["words"]) == [["\u5f20", "\u4e09", "x"]]
    assert [TAGS[tag] for tag in split["label"][0]] == ["B-gene", "I-gene", "O"]


def test_spans_that_an_earlier_version_took_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [of_own_text("in Oslo", 0, 2, "Oslo")]
    with monkeypatch.context() as before:
        before.setattr(data_words, "VERSION", 2)
        before.setattr(data_words, "check_own_text", lambda *given: None)
        assert len(written(tmp_path / "data", rows)) == 1
    with pytest.raises(UserError, match="are 'in'"):
        written(tmp_path / "data", rows)


def test_text_without_spans_has_no_tags(tmp_path: Path) -> None:
    split = written(tmp_path / "data", [{"text": "a cat"}, {"text": "snow"}])
    assert list(split["words"]) == [["a", "cat"], ["snow"]]
    assert list(split["label"]) == [[-1, -1], [-1]]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), st.data())
def test_entities_come_back_to_their_characters(text: str, data: st.DataObject) -> None:
    """Spans of whole words, as tags and back."""
    words = words_of(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(words)), max_size=6)))
    chosen = [(one, other) for one, other in pairwise(cuts) if data.draw(st.booleans())]
    spans = [
        (words[one][0], words[other - 1][1], data.draw(st.sampled_from(["gene", "disease"])))
        for one, other in chosen
    ]
    tags = tags_of_spans(spans, words)
    [found] = entities([tags], strict=True)
    assert {(words[a][0], words[b][1], kind) for kind, a, b in found} == set(spans)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab ,\u5f20"), min_size=1, max_size=20), st.data())
def test_no_span_is_lost(text: str, data: st.DataObject) -> None:
    """Of any spans that do not overlap: each is an entity that holds it, or is named."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    kinds = st.sampled_from(["gene", "disease"])
    spans = [
        (one, other, data.draw(kinds)) for one, other in pairwise(cuts) if data.draw(st.booleans())
    ]
    words = words_of(text)
    lost = [span for span, _ in lost_spans(spans, words)]
    assert len(set(lost)) == len(lost) and set(lost) <= set(spans)
    [found] = entities([tags_of_spans(spans, words)], strict=True)
    held = {(words[a][0], words[b][1], kind) for kind, a, b in found}
    expected = [
        {word for word in words if word[0] < span[1] and span[0] < word[1]} for span in spans
    ]
    shared = [bool(one & other) for one, other in pairwise(expected)]
    assert bool(lost) == (any(shared) or not all(expected))
    if not lost:
        assert held == {
            (min(of)[0], max(of)[1], span[2]) for of, span in zip(expected, spans, strict=True)
        }
        wide = [
            min(of)[0] < span[0] or span[1] < max(of)[1]
            for of, span in zip(expected, spans, strict=True)
        ]
        assert widened_spans(spans, words) == sum(wide)


def test_spans_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    """A word has one tag, so the second of two in a word was gone, and one without a word."""
    halves = [{"start": 0, "end": 3, "type": "gene"}, {"start": 3, "end": 6, "type": "disease"}]
    rows = [
        {"text": "foobar baz", "spans": halves},
        {"text": "IL-2", "spans": [{"start": 0, "end": 4, "type": "gene"}]},
        {"text": "foobar baz", "spans": [halves[0], {"start": 4, "end": 10, "type": "disease"}]},
        {"text": "a  b", "spans": [{"start": 1, "end": 3, "type": "gene"}]},
    ]
    with pytest.raises(UserError) as error:
        written(tmp_path / "data", rows)
    message = str(error.value)
    assert message.startswith(str(tmp_path / "data" / "train.jsonl:1: 'spans': "))
    assert "(3, 6, 'disease') shares a word with the span before it" in message
    assert "2 more" in message and "train.jsonl:3, " in message and "train.jsonl:4" in message
    with pytest.raises(
        UserError, match=r"train.jsonl:1: .*\(1, 3, 'gene'\) holds no word"
    ) as error:
        written(tmp_path / "data", rows[3:])
    assert "more" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "spans": "gene"}, "must be a list of"),
        ({"text": "a", "spans": [{"start": 0, "end": 2, "type": "gene"}]}, "span 0 must have"),
        ({"text": "a", "spans": [{"start": 1, "end": 1, "type": "gene"}]}, "span 0 must have"),
        ({"text": "a", "spans": [{"start": True, "end": 1, "type": "gene"}]}, "span 0 must have"),
        ({"text": "a", "spans": [{"start": 0, "end": 1}]}, "span 0 must have"),
        ({"text": "a", "spans": [{"start": 0, "end": 1, "type": "city"}]}, "'B-city'"),
        (
            {
                "text": "abc",
                "spans": [
                    {"start": 0, "end": 2, "type": "gene"},
                    {"start": 1, "end": 3, "type": "gene"},
                ],
            },
            "overlap",
        ),
        (
            of_own_text("🎉🎉 Ann Smith", 5, 14, "Ann Smith"),
            "lie in the 12 characters .* 3 to 12",
        ),
        (
            of_own_text("🎉🎉 Ann Smith moved", 5, 14, "Ann Smith"),
            "'spans': span 0 is 'Ann Smith', and its characters 5 to 14 are 'n Smith m'. It counts "
            "UTF-16 code units, as JavaScript does: in characters it is 3 to 12. Correct the num",
        ),
        (
            of_own_text("é Ann met Bob", 11, 14, "Bob"),
            "lie in the 13 char.* It counts bytes of UTF-8: in characters it is 10 to 13",
        ),
        (
            of_own_text("é Ann met", 3, 6, "Ann"),
            "characters 3 to 6 are 'nn '. It counts bytes of UTF-8: in characters it is 2 to 5",
        ),
        (of_own_text("in Oslo", 3, 6, "Oslo"), "are 'Osl'. It stands at 3 to 7, exclusive"),
        (of_own_text("Oslo now", 1, 5, "Oslo"), "are 'slo '. It stands at 0 to 4, exclusive"),
        (of_own_text("in Oslo", 3, 7, "Rome"), "is 'Rome', and .* are 'Oslo'. Correct"),
        (of_own_text("in Oslo", 3, 7, ""), "is '', and .* are 'Oslo'. Correct"),
        (of_own_text("in Oslo", 3, 7, 5), "is 5, and .* are 'Oslo'. Correct"),
        ({"text": " ", "spans": []}, "holds no word"),
        ({"text": 3, "spans": []}, "must be a text"),
    ],
)
def test_mistakes_in_spans_name_their_location(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        written(tmp_path / "data", [*SPANS, row])
    assert "train.jsonl:3" in str(error.value)


# --------------------------------------------------------------------------------------- scores

tag_lists = st.lists(
    st.lists(st.sampled_from(TAGS), min_size=1, max_size=8), min_size=1, max_size=6
)


def predictions_of(
    truth: list[list[str]], predicted: list[list[str]], counted: np.ndarray | None = None
) -> TagPredictions:
    lengths = [len(tags) for tags in truth]
    rows = sum(lengths)
    logits = np.zeros((rows, len(TAGS)))
    logits[np.arange(rows), [TAGS.index(tag) for tags in predicted for tag in tags]] = 1.0
    labels = np.array([TAGS.index(tag) for tags in truth for tag in tags])
    counted = np.ones(rows, dtype=bool) if counted is None else counted
    return TagPredictions(
        logits, labels, Words(np.concatenate([[0], np.cumsum(lengths)]), counted), TAGS
    )


@settings(deadline=None)
@given(tag_lists, st.data())
def test_scores_are_seqevals(truth: list[list[str]], data: st.DataObject) -> None:
    predicted = [
        data.draw(st.lists(st.sampled_from(TAGS), min_size=len(tags), max_size=len(tags)))
        for tags in truth
    ]
    lost = [data.draw(st.lists(st.booleans(), min_size=len(t), max_size=len(t))) for t in truth]
    counted = ~np.array([one for tags in lost for one in tags])
    found = predictions_of(truth, predicted, counted)
    seen = [  # a word without a token is predicted O
        ["O" if gone else tag for tag, gone in zip(tags, which, strict=True)]
        for tags, which in zip(predicted, lost, strict=True)
    ]
    for mode, options in {"default": {}, "strict": {"mode": "strict", "scheme": IOB2}}.items():
        for metric, oracle in (
            (EntityF1, seqeval.metrics.f1_score),
            (EntityPrecision, seqeval.metrics.precision_score),
            (EntityRecall, seqeval.metrics.recall_score),
        ):
            expected = oracle(truth, seen, zero_division=0, **options)
            assert metric(metric.Settings(mode=mode), TAGS).value(found) == pytest.approx(
                expected
            ), (mode, metric)
    flat_truth = [tag[2:] or "O" for tags in truth for tag in tags]
    flat_seen = [tag[2:] or "O" for tags in seen for tag in tags]
    assert Accuracy(None, TAGS).value(found) == pytest.approx(
        np.mean(
            [a == b for x, y in zip(truth, seen, strict=True) for a, b in zip(x, y, strict=True)]
        )
    )
    types = [t for t in ("gene", "disease") if t in flat_truth + flat_seen]
    if types:
        expected = f1_score(flat_truth, flat_seen, labels=types, average="macro", zero_division=0)
        assert WordF1(None, TAGS).value(found) == pytest.approx(expected)
    report = seqeval.metrics.classification_report(truth, seen, output_dict=True, zero_division=0)
    for kind, value in found.per_class(TAGS).items():
        there = report.get(kind, {}).get("support", 0)
        assert value == (pytest.approx(report[kind]["f1-score"]) if there else None)


def test_intervals_are_over_examples() -> None:
    """One example with many words weighs as one: drawn by words the interval would be narrow."""
    truth = [["B-gene"] * 50, *[["B-disease"]] * 4]
    right = predictions_of(truth, truth)
    wrong = predictions_of(truth, [["O"] * 50, *truth[1:]])
    low, high = paired_interval(right, wrong, EntityF1(EntityF1.Settings(), TAGS))
    assert low == 0.0 and high > 0.9


NO_ENTITIES = [
    ["X", "NOUN", "VERB", "ADJ", "ADP"],
    ["O", "B", "I"],
    ["B-gene", "I-gene"],
    ["O", "B-gene", "I-gene", "NOUN"],
]


def test_tags_that_are_no_entities_have_no_types() -> None:
    assert are_entities(TAGS) and entity_types(TAGS) == ["gene", "disease"]
    assert not any(map(are_entities, NO_ENTITIES)) and not are_entities(["O", "B-"])
    assert entity_types(NO_ENTITIES[0]) == NO_ENTITIES[0]
    assert entity_types(NO_ENTITIES[1]) == ["B", "I"]


@pytest.mark.parametrize("tags", NO_ENTITIES)
@pytest.mark.parametrize("metric", ["accuracy", "word_f1"])
def test_tags_that_are_no_entities_are_scored_by_word(tags: list[str], metric: str) -> None:
    """An evaluation reports no F1 of entities then, and tables have what it reports."""
    draw = np.random.default_rng(0)
    labels, rows = draw.integers(0, len(tags), 40), np.arange(40)
    logits = draw.normal(size=(40, len(tags)))
    logits[rows[::2], labels[::2]] += 9.0
    counted = rows % 8 != 7
    words = Words(np.arange(0, 41, 4), counted)
    examples = Examples(torch.zeros(10, 2, dtype=torch.long), labels, words=words)
    task = TokenClassification(data={"path": "x"}, metric=metric)
    kind = TokenClassificationKind(task, tags)
    found = kind.report(kind.scored(logits, examples))
    predicted = [tags[at] for at in logits.argmax(axis=1)]
    seen = [
        tag if there else "O" if "O" in tags else ""
        for tag, there in zip(predicted, counted, strict=True)
    ]
    truth = [tags[at] for at in labels]
    assert found["accuracy"] == pytest.approx(np.mean(np.array(seen) == np.array(truth)))
    types = {tag: tag[2:] if tag[:2] in ("B-", "I-") else tag for tag in [*tags, "", "O"]}
    names = list(dict.fromkeys(types[tag] for tag in tags if tag != "O"))
    of_truth, of_seen = ([types[tag] for tag in of] for of in (truth, seen))
    each = f1_score(of_truth, of_seen, labels=names, average=None, zero_division=0)
    assert found["per_class"] == pytest.approx(dict(zip(names, each, strict=True)))
    if metric == "word_f1":
        assert found["word_f1"] == pytest.approx(each.mean())
    assert list(kind.metrics) == list(dict.fromkeys([metric, "accuracy"]))
    record = {"over": "words", "metric": metric, "models": {"any": found}}
    assert list(metrics_of(record)) == list(kind.metrics)


# ------------------------------------------------------------------------------ entities in texts


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.data())
def test_words_of_a_text_are_all_that_is_no_white_space(text: str, data: st.DataObject) -> None:
    text += data.draw(st.sampled_from(["", *HOSTILE]))
    spans = words_of(text)
    assert all(start < end for start, end in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    covered = {at for start, end in spans for at in range(start, end)}
    rest = "".join(letter for at, letter in enumerate(text) if at not in covered)
    assert rest.strip() == "", "what is in no word is white space"


BLANKLESS = ("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
BLANKLESS_TEXT = "张三〇々〆コーがｶﾟกิน้ำ๒ຂ້ខ្មែမြ葛\U000e0100\u200bか\u3099"


def is_blankless(letter: str) -> bool:
    """Whether a character is of a script that is written without blanks, by its name; those of
    words in a square, such as that of APAATO, say no script, and theirs is Katakana."""
    name = unicodedata.name(letter, "")
    more = ("KANGXI", "HENTAIGANA", "HANGZHOU", "OLD CHINESE")
    return any(script in name for script in (*BLANKLESS, *more)) or "\u3300" <= letter <= "\u3357"


def slow_words(text: str) -> list[str]:
    """BERT's words, cut around each letter of such a script with its marks."""
    found = []
    for word, _ in BertPreTokenizer().pre_tokenize_str(text):
        alone = False
        for at, letter in enumerate(word):
            kind = unicodedata.category(letter)
            is_mark = kind[0] == "M" or kind == "Cf" or letter in "ﾞﾟ"
            begins = is_blankless(letter) and not is_mark and kind != "Nd"
            if at == 0 or begins or (alone and not is_mark):
                found.append("")
                alone = begins
            found[-1] += letter
    return found


@settings(deadline=None)
@example("0\u3300")
@given(st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=30))
def test_other_texts_are_cut_as_bert_cuts_them(text: str) -> None:
    """Converted files and the students of before rely on it. Without characters that are newer than
    Python's names."""
    text = "".join(letter for letter in text if not is_blankless(letter))
    cut = BertPreTokenizer().pre_tokenize_str(text)
    assert words_of(text) == [span for _, span in cut]


@settings(deadline=None)
@given(st.text(st.sampled_from(BLANKLESS_TEXT + "aé1 ,。한\u0301"), max_size=30))
def test_a_letter_of_a_script_without_blanks_is_a_word(text: str) -> None:
    """With the marks that stand on it; what stands between such letters is cut as ever."""
    assert [text[start:end] for start, end in words_of(text)] == slow_words(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("张三在COVID19疫苗, x", ["张", "三", "在", "COVID19", "疫", "苗", ",", "x"]),
        ("コーヒーshop", ["コ", "ー", "ヒ", "ー", "shop"]),
        ("か\u3099ｶﾞ", ["か\u3099", "ｶﾞ"]),
        ("กินน้ำ ๒๕๖๓ปี", ["กิ", "น", "น้", "ำ", "๒๕๖๓", "ปี"]),
        ("ខ្មែរ\u200bភាសា", ["ខ្", "មែ", "រ\u200b", "ភា", "សា"]),
        ("한국어 텍스트", ["한국어", "텍스트"]),
    ],
)
def test_words_of_scripts_without_blanks(text: str, words: list[str]) -> None:
    assert [text[start:end] for start, end in words_of(text)] == words


def tagger_of(toy: Path, folder: Path, tags: list[str]) -> Tagger:
    """Of random weights, which find entities everywhere."""
    torch.manual_seed(0)
    names = dict(enumerate(tags))
    model = AutoModelForTokenClassification.from_pretrained(
        toy, num_labels=len(tags), id2label=names, label2id={v: k for k, v in names.items()}
    )
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(str(toy))
    tokenizer.model_max_length = 16
    tokenizer.save_pretrained(folder)
    found = load_predictor(folder)
    assert isinstance(found, Tagger)
    return found


@pytest.fixture(scope="module")
def tagger(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Tagger:
    return tagger_of(tiny_models["toy"], tmp_path_factory.mktemp("tagger"), TAGS)


def test_words_are_read_before_a_text_as_training_reads_them(
    tagger: Tagger, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """So what is written is a teacher's file for the same data."""
    file, output = tmp_path / "both.jsonl", io.StringIO()
    file.write_text('{"text": "rain-snow", "tokens": ["rain-snow"]}\n')
    tagger_of(tiny_models["toy"], tmp_path / "model", TAGS)
    predict_file(tmp_path / "model", file, output, progress=lambda _: None)
    [tag] = json.loads(output.getvalue())["predicted"]
    assert tag in TAGS


def test_entities_of_a_text_are_those_of_its_words(tagger: Tagger) -> None:
    texts = ["the cat, a dog (very old) saw snow", "", "  \n", "rain"]
    of_texts = [found["predicted"] for found in tagger.predictions(texts)]
    for text, found in zip(texts, of_texts, strict=True):
        words = [text[start:end] for start, end in words_of(text)]
        [of_words] = tagger.predictions([words])
        assert len(of_words["predicted"]) == len(words)
        expected = seqeval.metrics.sequence_labeling.get_entities(of_words["predicted"])
        assert [one["type"] for one in found] == [kind for kind, _, _ in expected]
        for one, (_, first, last) in zip(found, expected, strict=True):
            assert text[one["start"] : one["end"]] == one["text"]
            assert one["text"].startswith(words[first]) and one["text"].endswith(words[last])
            assert 0 < one["probability"] <= 1
    assert of_texts[0] and of_texts[1] == of_texts[2] == []


@pytest.mark.parametrize("tags", NO_ENTITIES)
def test_words_of_a_text_have_tags_that_are_no_entities(
    tags: list[str], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Each word is found alone, with its whole tag; one that no token reads has none."""
    tagger = tagger_of(tiny_models["toy"], tmp_path, tags)
    text = "the cat, a dog \u200b saw snow"
    words = [text[start:end] for start, end in words_of(text)]
    [of_words], [of_text] = tagger.predictions([words]), tagger.predictions([text])
    lost = words.index("\u200b")
    assert of_words["predicted"][lost] == ("O" if "O" in tags else None)
    found = [tag for tag in of_words["predicted"] if tag not in ("O", None)]
    assert found and set(found) <= set(tags)
    assert [one["type"] for one in of_text["predicted"]] == found
    assert all(text[one["start"] : one["end"]] == one["text"] for one in of_text["predicted"])
    assert {one["text"] for one in of_text["predicted"]} <= set(words)


def test_tags_are_those_of_the_model(tagger: Tagger) -> None:
    words = ["the", "cat", "saw", "a", "very", "old", "dog"]
    encoded = tagger.tokenizer(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        logits = tagger._model(**encoded).logits[0]
    first = {word: at for at, word in reversed(list(enumerate(encoded.word_ids(0))))}
    expected = [TAGS[int(logits[first[number]].argmax())] for number in range(len(words))]
    [found] = tagger.predictions([words])
    assert found["predicted"] == expected


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["the", "xyzzy", "cat", "\u200b", "abcdefghijklmnopqrs"]), max_size=40)
)
def test_windows_hold_every_word_and_are_short_enough(tagger: Tagger, words: list[str]) -> None:
    windows = list(tagger._windows([words], [None]))
    seen = set()
    for window in windows:
        end = window.first + len(window.words)
        assert words[window.first : end] == window.words
        tokens = len(tagger.tokenizer(window.words, is_split_into_words=True)["input_ids"])
        assert tokens <= tagger.max_length or len(window.words) == 1
        seen.update(range(window.first, end))
    assert seen == set(range(len(words)))
    [found] = tagger.predictions([words])
    assert len(found["predicted"]) == len(words)
    tags = zip(words, found["predicted"], strict=True)
    assert all(tag == "O" for word, tag in tags if word == "\u200b")


def test_long_texts_are_scored_as_predict_reads_them(tagger: Tagger, tmp_path: Path) -> None:
    """In the same windows: each word once, under the text's one number. Before, what did not fit
    the first window counted as O."""
    draw = np.random.default_rng(0)
    known = ["the", "cat", "saw", "a", "very", "old", "dog", "\u200b", "abcdefghijklmnopqrs"]
    rows = [
        {
            "tokens": [str(word) for word in draw.choice(known, size)],
            "tags": [str(tag) for tag in draw.choice(TAGS, size)],
        }
        for size in (3, 60, 1, 25, 11)
    ]
    source = written(tmp_path / "data", rows)
    split = windows_of_texts(source, [tagger.tokenizer], 16)
    assert split.cache_files, "on disk: a split may be larger than memory"
    tokenise(split, tagger.tokenizer, 16, tmp_path / "tokens.arrow")
    examples = Examples.of(split)
    assert len(examples) > len(rows) + 5
    table = TokenTable(tmp_path / "tokens.arrow", tagger.tokenizer)
    batch = Collator(examples, {"student": table}, word_rows)(np.arange(len(examples)))
    with torch.no_grad():
        logits = read_signals(tagger._model, batch.views["student"]).logits.numpy()
    kind = TokenClassificationKind(TokenClassification(data={"path": "x"}, max_length=16), TAGS)
    scored = kind.scored(logits, examples)
    found = tagger.predictions([row["tokens"] for row in rows])
    expected = [tag for one in found for tag in one["predicted"]]
    assert [TAGS[number] for number in scored.predicted] == expected
    assert [TAGS[number] for number in scored.labels] == [t for row in rows for t in row["tags"]]
    report = kind.report(scored)
    dropped = sum(word == "\u200b" for row in rows for word in row["tokens"])
    assert (report["examples"], report["words"]) == (5, 100)
    assert report["words_without_token"] == dropped > 0
    keys = torch.from_numpy(word_keys([row["tokens"] for row in rows]))
    firsts = np.flatnonzero(kind.counted(examples))
    assert examples.counts == {"examples": 5, "windows": len(examples)}
    groups = numbered_keys(examples.group_keys.numpy())
    assert isinstance(examples.words, TextWindows)
    assert (groups[firsts][examples.words.text] == groups).all(), "folds are of texts"
    short = [0, 2]
    assert torch.equal(examples.keys[firsts[short]], keys[short]), "found in a cache as before"
    some = examples.at(np.flatnonzero(np.isin(examples.words.text, [1, 4])))
    assert some.words is not None and len(some.words.whole()[1]) == 2
    again = windows_of_texts(source.select([0, 2]), [tagger.tokenizer], 16)
    assert again.cache_files
    assert "text" not in again.column_names and len(again) == 2, "as it is where all fit"


def test_the_baseline_counts_a_word_of_two_windows_once(tagger: Tagger, tmp_path: Path) -> None:
    tags = ["O"] * 8 + ["B-gene"] * 4 + ["O"] * 8
    rows = [{"tokens": ["the", "cat", "saw", "snow"] * 5, "tags": tags}]
    examples = Examples.of(
        windows_of_texts(written(tmp_path / "data", rows), [tagger.tokenizer], 12)
    )
    assert len(examples.labels) > 20
    kind = TokenClassificationKind(TokenClassification(data={"path": "x"}, max_length=12), TAGS)
    for data in (
        SimpleNamespace(has_split=lambda split: False),
        SimpleNamespace(has_split=lambda split: True, examples=lambda split: examples),
    ):
        labels = kind.training_labels(data, examples)[1]
        assert np.bincount(labels).tolist() == [16, 4]


def marks_of(tagger: Tagger, split: datasets.Dataset, max_length: int) -> str | None:
    examples = Examples.of(windows_of_texts(split, [tagger.tokenizer], max_length))
    task = TokenClassification(data={"path": "x"}, max_length=max_length)
    return TokenClassificationKind(task, TAGS).scored_words(examples)


def test_the_mark_is_of_the_words_that_were_scored(tagger: Tagger, tmp_path: Path) -> None:
    """Windows of any length have the same words; another tokenizer may read others."""
    rows = [
        {"tokens": ["the", "cat", "\u200b", "saw"] * 5, "tags": ["O"] * 20},
        {"tokens": ["a"], "tags": ["O"]},
    ]
    split = written(tmp_path / "data", rows)
    assert marks_of(tagger, split, 8) == marks_of(tagger, split, 64) is not None
    assert marks_of(tagger, split.select([1]), 8) is None, "as before where all words are scored"
    words = Words(np.array([0, 20, 21]), np.arange(21) % 5 > 0)
    other = Examples(torch.zeros(2, 2).long(), np.zeros(21, dtype=np.int64), words=words)
    kind = TokenClassificationKind(TokenClassification(data={"path": "x"}), TAGS)
    assert kind.scored_words(other) not in (None, marks_of(tagger, split, 8))


def test_a_word_is_read_where_it_has_most_around_it(tagger: Tagger) -> None:
    words = ["the", "cat", "saw", "a", "very", "old", "dog"] * 6
    first, second, *_ = tagger._windows([words], [None])
    shared = range(second.first, first.first + len(first.words))
    assert len(shared) >= 3
    rooms = {
        w.first: dict(zip(range(w.first, end), room(w.first, end, len(words)), strict=True))
        for w in (first, second)
        for end in [w.first + len(w.words)]
    }
    chosen = [max(rooms, key=lambda start: rooms[start][at]) for at in shared]
    assert chosen[0] == first.first and chosen[-1] == second.first
