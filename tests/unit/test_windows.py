"""Windows of long texts: nothing is lost, each fits every tokenizer, none could be longer."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toys import make_tiny_bert
from transformers import AutoTokenizer, PreTrainedTokenizerBase, RobertaTokenizer, T5Tokenizer

from ds_distill.data import tokenizer as data_tokenizer
from ds_distill.data.groups import MARKS
from ds_distill.data.tokenizer import share_cut, tokens_fingerprint
from ds_distill.data.windows import split_long
from ds_distill.keys import content_keys

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Words of the letters a to h; each letter is a token of its own, but for a few words."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, "abc", "##abc", "."]
    vocabulary += [f"##{letter}" for letter in LETTERS]
    folder = make_tiny_bert(tmp_path_factory.mktemp("small") / "bert", vocabulary)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def real(vocabs: Path, vocabularies: dict[str, Path]) -> dict:
    """Tokenizers of published vocabularies where they are, by name."""
    found = {name: AutoTokenizer.from_pretrained(folder) for name, folder in vocabularies.items()}
    found["t5"] = T5Tokenizer.from_pretrained(vocabs / "t5")
    files = (vocabs / "gpt2" / "vocab.json", vocabs / "gpt2" / "merges.txt")
    return {**found, "gpt2": RobertaTokenizer(*map(str, files))}


def dataset(texts: list[str], **more: list) -> datasets.Dataset:
    keys = content_keys(texts)
    columns = {
        "text": texts,
        "label": [-1] * len(texts),
        "key_hi": keys[:, 0],
        "key_lo": keys[:, 1],
        **dict.fromkeys(MARKS, keys[:, 0]),
    }
    return datasets.Dataset.from_dict({**columns, **more})


def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text)["input_ids"])


def check_windows(
    text: str, found: list[str], tokenizers: list, max_length: int, exact: bool
) -> None:
    """What must be true of the windows of one text.

    exact: the tokens of a word depend on no other.
    """

    def fits(window: str) -> bool:
        return all(tokens(tokenizer, window) <= max_length for tokenizer in tokenizers)

    if fits(text):
        assert found == [text]
        return
    if not text.strip(" \t\n\r"):
        assert found == [""]
        return
    at, spans = 0, []
    for window in found:
        start = text.index(window, at)
        assert text[at:start].strip(" \t\n\r") == "", "text was lost"
        at = start + len(window)
        spans.append((start, at))
    assert text[at:].strip(" \t\n\r") == "", "text was lost"
    if not exact or not all(map(fits, text.split())):
        return
    assert all(map(fits, found))
    for (start, end), _ in pairwise(spans):
        longer = end + re.match(r"\s+[^ \t\n\r]+", text[end:]).end()
        assert not fits(text[start:longer]), "a window could be longer"


words = st.text(LETTERS + "xé.", min_size=1, max_size=30)
texts = st.lists(
    st.one_of(words, st.sampled_from(["abc", "a", " ", "\n", "\t"])), max_size=25
).flatmap(lambda parts: st.sampled_from([" ", "  ", "\n"]).map(lambda blank: blank.join(parts)))


def test_windows_of_random_texts(small):
    @settings(max_examples=12, deadline=None)
    @given(many=st.lists(texts, min_size=1, max_size=4), max_length=st.integers(8, 14))
    @example(many=["a" * 100], max_length=8)
    @example(many=["a b c d e f g h a", "a" * 7 + " b"], max_length=8)
    @example(many=[" " * 50, "", "\n a b c d e f g h\n"], max_length=8)
    def check(many, max_length):
        data = split_long(dataset(many), [small], max_length)
        check_all(many, data, [small], max_length)

    check()


HOSTILE = st.sampled_from(
    [
        *("ﷺ", "e\u0301", "\u0301", "a\u200bb", "\u00ad", "\x0b", "\xa0", "\u2028"),
        *(
            "漢字かな交じり",
            "😀👩\u200d👩\u200d👧",
            "x" * 40,
            "don't",
            "https://a.b/c?d=e&f=01234567",
        ),
        *("1,234.5", "<pad>", "[SEP]", "ﬁ", "\u202e", "ก็", "Straße", "İ", "\ufeff", "a\x1cb"),
        *("\x07", "½", "…", "▁", "Ġ"),
    ]
)


def test_windows_of_hostile_texts_by_real_tokenizers(real):
    @settings(max_examples=12, deadline=None)
    @given(
        parts=st.lists(st.one_of(HOSTILE, words, st.text(max_size=6)), max_size=12),
        blank=st.sampled_from([" ", "  ", "\n", " \u0301", ""]),
        chosen=st.sets(st.integers(0, 6), min_size=1, max_size=3),
        max_length=st.integers(8, 20),
    )
    def check(parts, blank, chosen, max_length):
        text = blank.join(parts)
        tokenizers = [list(real.values())[number] for number in sorted(chosen)]
        data = split_long(dataset([text]), tokenizers, max_length)
        check_all([text], data, tokenizers, max_length, exact=False)

    check()


def check_all(
    many: list[str],
    data: datasets.Dataset,
    tokenizers: list,
    max_length: int,
    *,
    exact: bool = True,
) -> None:
    kept = {"text", "label", "key_hi", "key_lo", "copy", "group"}
    assert {name for name in data.column_names if ":" not in name} == kept
    keys = np.stack([data["key_hi"], data["key_lo"]], axis=1)
    np.testing.assert_array_equal(keys, content_keys(data["text"][:]))
    found, groups = data["text"][:], data["group"][:]
    at = 0
    for text in many:
        own = split_long(dataset([text]), tokenizers, max_length)  # alone, as among others
        assert found[at : at + len(own)] == own["text"][:]
        assert groups[at : at + len(own)] == own["group"][:]
        assert len(set(own["group"][:])) == 1
        check_windows(text, own["text"][:], tokenizers, max_length, exact)
        for one in tokenizers if exact else ():
            column = own[f"{tokens_fingerprint(one)}:input_ids"][:]
            alone = one(own["text"][:], truncation=True, max_length=max_length)
            assert column == alone["input_ids"], "as of a text alone"
        at += len(own)
    assert at == len(data)


def test_marks_of_a_text_are_those_of_its_windows(small):
    data = split_long(dataset(["a b c d e f g h", "a"], copy=[5, 6], group=[7, -3]), [small], 8)
    assert data["copy"][:] == [5, 5, 6]
    assert data["group"][:] == [7, 7, -3]
    assert data["text"][:] == ["a b c d e f", "g h", "a"]


def test_a_label_stays(small):
    data = dataset(["a b c d e f g h"]).remove_columns("label").add_column("label", [3])
    assert split_long(data, [small], 8)["label"][:] == [3, 3]


def test_pairs_are_refused(small):
    with pytest.raises(ValueError, match="pairs"):
        split_long(dataset(["a"], text_b=["b"]), [small], 8)


def test_the_share_that_is_cut(small):
    # 10 and 22 tokens with special tokens; 8 of each remain.
    data = dataset([" ".join("abcdefgh"), " ".join("abcde" * 4)])
    assert share_cut(data, small, 8) == pytest.approx((2 + 14) / 32)
    assert share_cut(data, small, 22) == 0.0
    pairs = dataset(["a b c"], text_b=["d e f"])  # 9 tokens: three special ones
    assert share_cut(pairs, small, 8) == pytest.approx(1 / 9)


def test_the_share_is_of_a_sample_of_many_texts(small, monkeypatch):
    many = ["a " * length for length in range(1, 40)]
    full = share_cut(dataset(many), small, 8)
    monkeypatch.setattr(data_tokenizer, "SAMPLE", 20)
    sampled = share_cut(dataset(many), small, 8)
    assert sampled == share_cut(dataset(many[::-1]), small, 8)
    assert sampled != full and abs(sampled - full) < 0.2


def test_of_a_very_long_text_the_beginning_is_tokenised(small, monkeypatch):
    """A text of 20 MB took `check` 20 s. Its other tokens are taken to be as many."""
    text = "the cat saw a dog near snow and rain " * 3_000
    data = dataset([text, "a cat"])
    whole = len(small(text, verbose=False)["input_ids"]) + 4
    read: list[int] = []
    counted = data_tokenizer.token_lengths

    def counting(tokenizer, texts, *rest):
        read.extend(map(len, texts))
        return counted(tokenizer, texts, *rest)

    monkeypatch.setattr(data_tokenizer, "token_lengths", counting)
    wanted = 1 - (128 + 4) / whole
    assert share_cut(data, small, 128) == pytest.approx(wanted, abs=1e-3)
    assert max(read) <= data_tokenizer.BEGINNING


def test_a_long_word_is_cut_inside(small):
    data = split_long(dataset(["abcd" * 10 + " a b"]), [small], 12)
    assert "".join(data["text"][:]) == "abcd" * 10 + "a b"
    assert len(data) >= 3 and max(tokens(small, window) for window in data["text"][:]) <= 12


def test_tokens_of_windows_are_those_of_their_texts(real):
    """DeBERTa cuts `pterygium` behind a blank that is a token of its own; RoBERTa's first word has
    none before it."""
    text = "we saw pterygium and hyperparathyroidism in the tumour suppressor " * 9
    check_all([text], split_long(dataset([text]), [*real.values()], 24), [*real.values()], 24)
