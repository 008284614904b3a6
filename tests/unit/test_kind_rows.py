"""Rows with words, spans of texts and answers, in every form that files have."""

import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kinds import CONTEXT, HOSTILE, TAGS, any_letter, opened, read
from tokenizers.pre_tokenizers import BertPreTokenizer

from ds_distill.data import row_forms
from ds_distill.data import spans as data_spans
from ds_distill.data.readers import open_file
from ds_distill.data.spans import tagged, words_of
from ds_distill.errors import UserError
from ds_distill.evaluation.predictions import entities
from ds_distill.recipe.tags import SPAN_TAGS

WORDS = "token-classification"

# ------------------------------------------------------------------------------ words and spans

ODD = ["10\u00a0000", "\u3000", "\u2028", "\x85", "\x0b", "\x1c", "\u200b", "\ufeff"]
"""Words that hold what `str.split` takes for white space, or nothing that is seen."""


@pytest.mark.parametrize(
    ("ending", "between", "end", "start"),
    [
        ("conll", " ", "\n", ""),
        ("conll", "  ", "\r\n", "\ufeff"),
        ("conll", "\t", "\n", "\ufeff"),
        ("tsv", "\t", "\r\n", ""),
    ],
)
def test_words_of_conll_end_at_blanks_and_tabs_alone(ending, between, end, start, tmp_path):
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


def test_comments_and_marks_of_documents_are_no_words(tmp_path):
    sentence = "Ann B-PER\n# O\n\n"
    file = tmp_path / "train.conll"
    file.write_text(
        f"-DOCSTART-\n\n{sentence}# id 7f domain=en\n{sentence}-DOCSTART- O\n{sentence}"
    )
    rows = [(place[-2:], row["tokens"]) for place, row in open_file(file).rows([])]
    assert rows == [(f":{line}"[-2:], ["Ann", "#"]) for line in (3, 7, 11)]


def span(start, end, kind, **more):
    return {"start": start, "end": end, "type": kind, **more}


def test_text_with_spans_is_read_as_words_with_tags(tmp_path):
    """A word of which some characters are in a span is in it whole."""
    rows = [
        {"text": "IL-2, a gene", "spans": [span(0, 4, "gene")]},
        {
            "text": "flu (or influenza) spreads",
            "spans": [span(8, 17, "disease"), span(0, 2, "disease", text="fl")],
        },
        {"text": "none here", "spans": []},
    ]
    source = opened(WORDS, tmp_path, rows)
    split = source.read("train")
    named = [
        list(zip(row["words"], (TAGS[tag] for tag in row["label"]), strict=True)) for row in split
    ]
    words = [[word for word, _ in row] for row in named]
    assert words[0] == ["IL", "-", "2", ",", "a", "gene"]
    assert words[1] == ["flu", "(", "or", "influenza", ")", "spreads"]
    tagged = [[(word, tag) for word, tag in row if tag != "O"] for row in named]
    assert tagged[0] == [("IL", "B-gene"), ("-", "I-gene"), ("2", "I-gene")]
    assert tagged[1] == [("flu", "B-disease"), ("influenza", "B-disease")] and tagged[2] == []
    unnamed = opened(WORDS, tmp_path, rows, labels=None)
    assert unnamed.labels == ["O", "B-disease", "I-disease", "B-gene", "I-gene"]
    key = (split[1]["key_hi"], split[1]["key_lo"])
    assert source.locations("train", {key})[key].endswith("train.jsonl:2")
    untagged = read(WORDS, tmp_path, [{"text": "a cat"}, {"text": "snow"}])
    assert list(untagged["words"]) == [["a", "cat"], ["snow"]]
    assert list(untagged["label"]) == [[-1, -1], [-1]]


def test_what_an_earlier_version_has_read_is_not_taken(tmp_path, monkeypatch):
    rows = [{"text": "\u5f20\u4e09 x", "spans": [span(0, 2, "gene")]}]
    with monkeypatch.context() as before:
        before.setattr(row_forms, "VERSION", 1)
        before.setattr(data_spans, "_CUT", BertPreTokenizer())
        assert list(read(WORDS, tmp_path, rows)["words"]) == [["\u5f20\u4e09", "x"]]
    split = read(WORDS, tmp_path, rows)
    assert list(split["words"]) == [["\u5f20", "\u4e09", "x"]]
    assert [TAGS[tag] for tag in split["label"][0]] == ["B-gene", "I-gene", "O"]
    rows = [{"text": "in Oslo", "spans": [span(0, 2, "gene", text="Oslo")]}]
    with monkeypatch.context() as before:
        before.setattr(row_forms, "VERSION", 2)
        before.setattr(data_spans, "_check_own_text", lambda *given: None)
        assert len(read(WORDS, tmp_path, rows)) == 1
    with pytest.raises(UserError, match="are 'in'"):
        read(WORDS, tmp_path, rows)


def drawn_spans(cuts, data):
    """Some of the stretches between the cuts, each of a type."""
    kinds = st.sampled_from([None, "gene", "disease"])
    drawn = [(one, other, data.draw(kinds)) for one, other in pairwise(sorted(cuts))]
    return [(one, other, kind) for one, other, kind in drawn if kind is not None]


@settings(max_examples=40)
@given(st.text(any_letter, min_size=1, max_size=30), st.data())
def test_entities_come_back_to_their_characters(text, data):
    """Spans of whole words, as tags and back."""
    words = words_of(text)
    cuts = data.draw(st.sets(st.integers(0, len(words)), max_size=6))
    spans = [
        (words[one][0], words[other - 1][1], kind) for one, other, kind in drawn_spans(cuts, data)
    ]
    [found] = entities([tagged(spans, words).tags], strict=True)
    assert {(words[a][0], words[b][1], kind) for kind, a, b in found} == set(spans)


@settings(max_examples=60)
@given(st.text(st.sampled_from("ab ,\u5f20"), min_size=1, max_size=20), st.data())
def test_no_span_is_lost(text, data):
    """Of any spans that do not overlap: each is an entity that holds it, or is named."""
    spans = drawn_spans(data.draw(st.sets(st.integers(0, len(text)), max_size=8)), data)
    words = words_of(text)
    lost = [one for one, _ in tagged(spans, words).lost]
    assert len(set(lost)) == len(lost) and set(lost) <= set(spans)
    held = [{word for word in words if word[0] < b and a < word[1]} for a, b, _ in spans]
    shared = any(one & other for one, other in pairwise(held))
    assert bool(lost) == (shared or not all(held))
    if not lost:
        whole = [(min(of)[0], max(of)[1]) for of in held]
        [found] = entities([tagged(spans, words).tags], strict=True)
        assert {(words[a][0], words[b][1], kind) for kind, a, b in found} == {
            (*of, kind) for of, (_, _, kind) in zip(whole, spans, strict=True)
        }
        wide = sum(
            start < a or b < end for (start, end), (a, b, _) in zip(whole, spans, strict=True)
        )
        assert tagged(spans, words).widened == wide


def test_all_spans_that_would_be_lost_are_refused_at_once(tmp_path):
    """A word has one tag, so the second of two in a word was gone, and one without a word."""
    half = span(0, 3, "gene")
    rows = [
        {"text": "foobar baz", "spans": [half, span(3, 6, "disease")]},
        {"text": "IL-2", "spans": [span(0, 4, "gene")]},
        {"text": "foobar baz", "spans": [half, span(4, 10, "disease")]},
        {"text": "a  b", "spans": [span(1, 3, "gene")]},
    ]
    with pytest.raises(UserError) as error:
        read(WORDS, tmp_path, rows)
    message = str(error.value)
    assert message.startswith(str(tmp_path / "train.jsonl:1: 'spans': "))
    assert "(3, 6, 'disease') shares a word" in message and "2 more" in message
    assert "train.jsonl:3, " in message and "train.jsonl:4" in message


# --------------------------------------------------------------------------------- words of texts


@settings(max_examples=40)
@given(st.text(any_letter, max_size=30), st.sampled_from(["", *HOSTILE]))
def test_words_of_a_text_are_all_that_is_no_white_space(text, more):
    text += more
    spans = words_of(text)
    assert all(start < end for start, end in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    covered = {at for start, end in spans for at in range(start, end)}
    rest = "".join(letter for at, letter in enumerate(text) if at not in covered)
    assert rest.strip() == "", "what is in no word is white space"


BLANKLESS = ("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
BLANKLESS_TEXT = "张三〇々〆コーがｶﾟกิน้ำ๒ຂ້ខ្មែမြ葛\U000e0100\u200bか\u3099"


def is_blankless(letter):
    """Whether a character is of a script that is written without blanks, by its name; those of
    words in a square, such as that of APAATO, say no script, and theirs is Katakana."""
    name = unicodedata.name(letter, "")
    more = ("KANGXI", "HENTAIGANA", "HANGZHOU", "OLD CHINESE")
    return any(script in name for script in (*BLANKLESS, *more)) or "\u3300" <= letter <= "\u3357"


def slow_words(text):
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


@settings(max_examples=60)
@example("0\u3300")
@given(st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=30))
def test_other_texts_are_cut_as_bert_cuts_them(text):
    """Converted files and the students of before rely on it. Without characters that are newer than
    Python's names."""
    text = "".join(letter for letter in text if not is_blankless(letter))
    assert words_of(text) == [cut for _, cut in BertPreTokenizer().pre_tokenize_str(text)]


@settings(max_examples=60)
@given(st.text(st.sampled_from(BLANKLESS_TEXT + "aé1 ,。한\u0301"), max_size=30))
def test_a_letter_of_a_script_without_blanks_is_a_word(text):
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
def test_words_of_scripts_without_blanks(text, words):
    assert [text[start:end] for start, end in words_of(text)] == words


# --------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("kind", "answers", "spans"),
    [
        ("extractive-qa", [{"text": "cat", "start": 4}], [(4, 7)]),
        ("extractive-qa", {"text": ["saw"], "answer_start": [8]}, [(8, 11)]),
        (
            "character-spans",
            [{"start": 4, "end": 7}, {"text": "dog", "start": 23}],
            [(4, 7), (23, 26)],
        ),
        ("character-spans", [], []),
        ("character-spans", {"text": ["very old"], "answer_start": [14]}, [(14, 22)]),
        ("character-spans", ["36 40", "4 7;23 26"], [(36, 40), (4, 7), (23, 26)]),
    ],
)
def test_answers_are_read_in_every_form(kind, answers, spans, tmp_path):
    rows = [{"question": f"q{n}", "context": CONTEXT, "answers": answers} for n in range(2)]
    source = opened(kind, tmp_path, rows)
    split = source.read("train")
    assert split["text"][:] == ["q0", "q1"] and split["text_b"][:] == [CONTEXT] * 2
    for found in split["answers"][:]:
        assert [(a["start"], a["start"] + len(a["text"])) for a in found] == spans
        assert all(CONTEXT[a["start"] :].startswith(a["text"]) for a in found)
    assert list(split["label"]) == [len(spans)] * 2
    assert len(set(split["group"])) == 1, "questions about one context are one group"
    assert source.labels == (SPAN_TAGS if kind == "character-spans" else [])
    key = (split[1]["key_hi"], split[1]["key_lo"])
    assert source.locations("train", {key})[key].endswith("train.jsonl:2")


def test_answers_of_other_data_can_be_left_out(tmp_path):
    rows = [{"question": "q", "context": CONTEXT, "answers": [{"text": "cat", "start": 4}]}]
    other = {"path": str(tmp_path), "split": "train"}
    splits = {"transfer": {**other, "labels": "none"}, "more": other}
    source = opened("extractive-qa", tmp_path, rows, data={"path": str(tmp_path), "splits": splits})
    assert list(source.read("transfer")["label"]) == [-1]
    assert list(source.read("transfer")["answers"]) == [None]
    assert list(source.read("more")["label"]) == [1]
    with pytest.raises(UserError, match="labels=none"):
        source.read("transfer", need_labels=True)
