"""The windows in which long texts, texts of words, contexts and questions are read: nothing is
lost, each fits every tokenizer, the same words are in every model's view, and each counts once."""

import re
from dataclasses import replace
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kinds import TAGS, asked, pieces, read, texts
from kinds import texts_split as dataset
from slow_windows import token_counts, windows_of_context, windows_of_question, windows_of_text
from toys import make_tiny_bert
from transformers import AutoTokenizer, RobertaTokenizer, T5Tokenizer

from ds_distill.data import tokenizer as data_tokenizer
from ds_distill.data.batches import Units
from ds_distill.data.spans import word_keys, words_of
from ds_distill.data.tokenise import tokenise
from ds_distill.data.tokenizer import load_tokenizer, share_cut, tokens_fingerprint
from ds_distill.data.windows import NO_ANSWER, question_windows, split_long, word_windows
from ds_distill.data.word_tokens import owners, ranges, room
from ds_distill.errors import UserError
from ds_distill.evaluation.predictions import span_columns
from ds_distill.keys import content_keys
from ds_distill.recipe.tags import IN_SPAN, SPAN_TAGS

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Words of the letters a to h; each letter is a token of its own, but for a few words."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, "abc", "##abc", "."]
    vocabulary += [f"##{letter}" for letter in LETTERS]
    folder = make_tiny_bert(tmp_path_factory.mktemp("small") / "bert", vocabulary)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def real(vocabs, vocabularies):
    """Tokenizers of published vocabularies where they are, by name."""
    found = {name: AutoTokenizer.from_pretrained(folder) for name, folder in vocabularies.items()}
    found["t5"] = T5Tokenizer.from_pretrained(vocabs / "t5")
    files = (vocabs / "gpt2" / "vocab.json", vocabs / "gpt2" / "merges.txt")
    return {**found, "gpt2": RobertaTokenizer(*map(str, files))}


def tokens(tokenizer, text):
    return len(tokenizer(text)["input_ids"])


def check_windows(text, found, tokenizers, max_length, exact):
    """What must be true of the windows of one text.

    exact: the tokens of a word depend on no other.
    """

    def fits(window):
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
random_texts = st.lists(
    st.one_of(words, st.sampled_from(["abc", "a", " ", "\n", "\t"])), max_size=25
).flatmap(lambda parts: st.sampled_from([" ", "  ", "\n"]).map(lambda blank: blank.join(parts)))


def test_windows_of_random_texts(small):
    @settings(max_examples=12, deadline=None)
    @given(many=st.lists(random_texts, min_size=1, max_size=4), max_length=st.integers(8, 14))
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


def check_all(many, data, tokenizers, max_length, *, exact=True):
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
    assert data["number"][:] == [0, 0, 1] and data["copy"][:] == [5, 5, 6]
    assert data["group"][:] == [7, 7, -3]
    assert data["text"][:] == ["a b c d e f", "g h", "a"]


def test_pairs_are_refused(small):
    with pytest.raises(ValueError, match="pairs"):
        split_long(dataset(["a"], ["b"]), [small], 8)


def test_the_share_that_is_cut(small):
    # 10 and 22 tokens with special tokens; 8 of each remain.
    data = dataset([" ".join("abcdefgh"), " ".join("abcde" * 4)])
    assert share_cut(data, small, 8) == pytest.approx((2 + 14) / 32)
    assert share_cut(data, small, 22) == 0.0
    pairs = dataset(["a b c"], ["d e f"])  # 9 tokens: three special ones
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
    read = []
    counted = data_tokenizer.token_lengths

    def counting(tokenizer, given, *rest):
        read.extend(map(len, given))
        return counted(tokenizer, given, *rest)

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


UNLIKE = ("pubmedbert-uncased", "deberta-v3-base", "roberta-base")


@pytest.fixture(scope="module")
def of_words(vocabularies):
    """Tokenizers of unlike kinds, for lists of words."""
    return {name: load_tokenizer(str(vocabularies[name]), of_words=True) for name in UNLIKE}


@pytest.fixture(scope="module")
def of_texts(vocabularies):
    return {name: load_tokenizer(str(vocabularies[name])) for name in UNLIKE}


# ---------------------------------------------------------------------------------------- words


def test_windows_of_words_are_those_of_each_tokenizers_own_calls(of_words):
    every = list(of_words.values())

    @settings(max_examples=12)
    @given(words=st.lists(pieces, min_size=1, max_size=12), max_length=st.integers(8, 24))
    def check(words, max_length):
        keys = word_keys([words])
        row = {"words": [words], "label": [[0] * len(words)]}
        row |= {"key_hi": keys[:, 0], "key_lo": keys[:, 1]}
        split = word_windows(datasets.Dataset.from_dict(row), every, max_length)
        slow = windows_of_text(every, max_length, words)
        for name in slow[0]:
            assert list(split[name]) == [window[name] for window in slow], name

    check()


def test_windows_of_contexts_are_those_of_each_tokenizers_own_calls(of_words):
    every = list(of_words.values())

    @settings(max_examples=12)
    @given(
        question=texts,
        context=texts.filter(words_of),
        length=st.sampled_from([32, 48, 384]),
        data=st.data(),
    )
    def check(question, context, length, data):
        context = context * data.draw(st.sampled_from([1, 3]))
        pair = st.tuples(st.integers(0, len(context) - 1), st.integers(1, len(context)))
        answers = data.draw(st.lists(pair.filter(lambda p: p[0] < p[1]), max_size=3))
        spans = words_of(context)
        counts = [token_counts(one, [context[a:b] for a, b in spans]) for one in every]
        dropped = set(np.flatnonzero(np.min(counts, axis=0) == 0).tolist())
        split = word_windows(asked([question], [context], [answers]), every, length)
        slow = windows_of_context(every, length, question, context)
        for name in slow[0]:
            assert list(split[name]) == [window[name] for window in slow], name
        counted = []
        for row in split:
            here = spans[row["first"] : row["first"] + len(row["words"])]
            assert list(zip(row["starts"], row["ends"], strict=True)) == here
            for (start, end), label in zip(here, row["label"], strict=True):
                inside = any(a <= at < b for at in range(start, end) for a, b in answers)
                assert SPAN_TAGS[label] == (IN_SPAN if inside else "O")
            own = np.logical_and(row["counted"], row["owned"])
            counted += [row["first"] + at for at in np.flatnonzero(own).tolist()]
        assert sorted(counted) == [n for n in range(len(spans)) if n not in dropped]
        assert [*zip(split[0]["answer_starts"], split[0]["answer_ends"], strict=True)] == answers
        units = Units.of(split)
        own, whole = units.whole()
        assert np.flatnonzero(~units.counted[own]).tolist() == sorted(dropped)
        right, begins, of_words = span_columns(units)
        assert of_words.tolist() == [*map(list, spans)] and whole.tolist() == [0, len(spans)]
        assert right.tolist() == [*map(list, answers)] and begins.tolist() == [0, len(answers)]

    check()


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_windows_hold_every_word_and_each_counts_where_it_has_most_around_it(tokens, rooms):
    """Against all windows, one after the other."""
    counts = [np.array(of_one) for of_one in zip(*tokens, strict=True)]
    offsets = [np.concatenate([[0], np.cumsum(of_one)]) for of_one in counts]
    windows, total = list(ranges(offsets, rooms)), len(tokens)
    assert windows[0][0] == 0 and windows[-1][1] == total
    for (first, end), (later, _) in pairwise(windows):
        assert first < later <= end, "they go on, and leave out no word"
        assert end - later <= (end - first) // 4
    for first, end in windows:
        here = [int(of_one[first:end].sum()) for of_one in counts]
        fits = all(n <= most for n, most in zip(here, rooms, strict=True))
        assert fits or end == first + 1
        if end < total and fits:
            more = [int(of_one[first : end + 1].sum()) for of_one in counts]
            assert any(n > most for n, most in zip(more, rooms, strict=True)), "as long as can be"
    owner = owners(windows, total)
    for word in range(total):
        around = {
            number: min(word - first if first else total, end - 1 - word if end < total else total)
            for number, (first, end) in enumerate(windows)
            if first <= word < end
        }
        assert owner[word] == max(around, key=lambda number: around[number])
    assert room(0, total, total).tolist() == [total] * total


def test_windows_are_read_by_a_later_model_too(of_words, tmp_path):
    words = ["the", "interleukin-2", "\u200b", "receptor's"]
    rows = [{"tokens": words * n, "tags": TAGS[:4] * n} for n in (1, 9, 2)]
    split = read("token-classification", tmp_path / "data", rows)
    split = word_windows(split, [*of_words.values()], 24, tmp_path / "split.arrow")
    assert split.cache_files, "on disk: a split may be larger than memory"
    for tokenizer in of_words.values():
        again = tokenise(split, tokenizer, 24)
        for name in again.column_names:
            assert name.startswith(tokens_fingerprint(tokenizer))
            assert split.features[name] == again.features[name]
            assert split[name][:] == again[name][:]


def test_roberta_reads_words_with_a_space_before_each(of_words):
    roberta = of_words["roberta-base"]
    text = "the tumour suppressor gene"
    in_text = roberta(text, add_special_tokens=False)["input_ids"]
    in_list = roberta(text.split(), is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert in_list[1:] == in_text[1:]
    assert roberta.convert_ids_to_tokens(in_list)[0] == "Ġthe"


def test_a_tokenizer_that_cuts_words_otherwise_is_refused(tmp_path):
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
def test_lists_of_words_that_differ_have_keys_that_differ(lists):
    assert len({tuple(key) for key in word_keys(lists).tolist()}) == len(lists)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_words_of_some_examples(lengths, data):
    offsets, size = np.concatenate([[0], np.cumsum(lengths)]), sum(lengths)
    counted = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    keys = torch.arange(2 * len(lengths)).view(-1, 2)
    words = Units.plain(keys, np.arange(size), offsets=offsets)
    words = replace(words, counted=counted)
    numbers = st.lists(st.integers(0, len(lengths) - 1), max_size=8)
    some = np.array(data.draw(numbers), dtype=np.int64)
    rows = [row for one in some for row in range(offsets[one], offsets[one + 1])]
    assert words.rows_of(some).tolist() == rows
    assert words.at(some).counted.tolist() == counted[np.array(rows, dtype=int)].tolist()
    assert np.diff(words.at(some).offsets).tolist() == [lengths[one] for one in some]
    assert words.of_rows.tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()


# ------------------------------------------------------------------------------------- questions


def tokens_of(tokenizer, question, text):
    """Positions of the tokens of a window, and the characters of each without white space."""
    encoded = tokenizer(question, text, return_offsets_mapping=True)
    positions = [at for at, part in enumerate(encoded.sequence_ids(0)) if part == 1]
    found = []
    for at in positions:
        start, end = encoded["offset_mapping"][at]
        inside = [place for place in range(start, end) if not text[place].isspace()]
        found.append((min(inside), max(inside) + 1) if inside else (end, end))
    return positions, found


def check_answer(row, spans, start, end):
    """A window's label is of the tokens that hold an answer at these characters of it."""
    held = [n for n, (a, b) in enumerate(spans) if any(start <= at < end for at in range(a, b))]
    if start < 0 or end > len(row["text_b"]) or not held:
        assert row["label"] == [NO_ANSWER, NO_ANSWER]
        return
    assert row["label"] == [1 + held[0], 1 + held[-1]]
    whole = min(spans[n][0] for n in held), max(spans[n][1] for n in held)
    if whole == (start, end):  # an answer of whole tokens
        first, last = (label - 1 for label in row["label"])
        assert (row["begins"][first], row["ends"][last]) == (start, end)


def test_windows_of_questions_hold_every_token_and_its_characters(of_texts):
    contexts = st.lists(pieces, min_size=1, max_size=40).map("".join)

    @settings(max_examples=12)
    @given(
        question=st.just("who") | contexts,
        context=contexts,
        length=st.sampled_from([32, 48, 384]),
        overlap=st.integers(1, 10),
        data=st.data(),
    )
    def check(question, context, length, overlap, data):
        start = data.draw(st.integers(0, len(context) - 1))
        end = data.draw(st.integers(start + 1, len(context)))
        for tokenizer in of_texts.values():
            rows = asked([question], [context], [[(start, end)]])
            split = question_windows(rows, tokenizer, length, overlap)
            held = [(row["text"], row["text_b"], row["first"]) for row in split]
            slow = windows_of_question(tokenizer, length, overlap, question, context)
            assert slow is None or held == slow
            for row in split if slow else []:
                at, text = row["first"], row["text_b"]
                assert question.startswith(row["text"]) and context[at:].startswith(text)
                positions, spans = tokens_of(tokenizer, row["text"], text)
                encoded = tokenizer(row["text"], text, return_token_type_ids=True)
                assert len(encoded["input_ids"]) <= length, "nothing is cut when it is tokenised"
                for column in ("input_ids", "token_type_ids"):
                    assert row[f"{tokens_fingerprint(tokenizer)}:{column}"] == encoded[column]
                assert [*zip(row["begins"], row["ends"], strict=True)] == spans
                places = row[f"{tokens_fingerprint(tokenizer)}:candidates"]
                assert places == [0, *positions]
                check_answer(row, spans, start - at, end - at)
            if question == "who":
                check_overlap(context, tokenizer, [(at, at + len(t)) for _, t, at in held], overlap)

    check()


def check_overlap(context, tokenizer, held, overlap):
    """Each token of the context is in a window whole, and two share no more than they may."""
    whole = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
    spans = [(a, b) for a, b in whole["offset_mapping"] if context[a:b].strip()]
    for a, b in spans:
        first = b - len(context[a:b].lstrip())
        last = a + len(context[a:b].rstrip()) - 1
        assert any(start <= first and last < end for start, end in held), (context, a, b)
    for (one, end), (other, later) in pairwise(held):
        assert one < other and end < later
        assert sum(other <= a and b <= end for a, b in spans) <= overlap


def test_no_window_is_of_white_space_alone(of_texts):
    """RoBERTa's tokenizer makes tokens of it: those between words, and where the text before them
    filled a window, they were windows of their own."""
    tokenizer = of_texts["roberta-base"]
    at_the_end = ["a." * pairs + "\u00a0" for pairs in range(21, 45)]
    for context in (*at_the_end, "a b " * 5 + " " * 300 + "c d"):
        split = question_windows(asked(["Who?"], [context], [None]), tokenizer, 48, 8)
        assert all(text.strip() for text in split["text_b"])


def test_a_context_that_fits_a_window_is_found_by_its_own_key(tiny_models):
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    [lone] = question_windows(asked(["we saw"], ["a cat"], [None]), tokenizer, 32, 9)
    key = content_keys(["we saw"], ["a cat"])[0].tolist()
    assert [lone["key_hi"], lone["key_lo"]] == key and lone["label"] == [-1, -1]
    long = " ".join(["cat", "dog", "snow", "rain"] * 20)
    split = question_windows(asked(["we saw"], [long], [[(4, 7)]]), tokenizer, 32, 9)
    assert len(split) > 2 and {len(row["begins"]) for row in [*split][:-1]} == {32 - 3 - 2}
    assert [row["answers"] for row in split] == [["dog"]] * len(split)
