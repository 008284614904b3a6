"""Character spans: windows of words, which word counts where, spans and their scores."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, precision_score, recall_score
from slow_windows import windows_of_context
from transformers import AutoModelForTokenClassification, BertConfig

from ds_distill.data.batches import Collator, Examples
from ds_distill.data.groups import MARKS
from ds_distill.data.open_source import open_source
from ds_distill.data.rows import word_rows
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.word_tokens import owners, ranges, room
from ds_distill.data.word_windows import ContextWords, prepare
from ds_distill.data.words import words_of
from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.spans import SpanPredictions
from ds_distill.keys import content_keys
from ds_distill.planning.caches import example_bytes
from ds_distill.predictors.file import predict_file
from ds_distill.predictors.prediction import load_predictor
from ds_distill.predictors.tagging import Tagger
from ds_distill.recipe.metrics.characters import (
    CharacterF1,
    CharacterPrecision,
    CharacterRecall,
    SpanF1,
)
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tags import IN_SPAN, SPAN_TAGS
from ds_distill.recipe.tasks import CharacterSpans
from ds_distill.routing.comparison import compare
from ds_distill.types import Signals

HOSTILE = [
    *("\u200b", "\u00ad", "\ufe0f", "\u0007", "\u00a0", "\u2028", " ", "  ", "\t", "\ufffd"),
    *("e\u0301", "\u0301", "\u05d0\u05d1", "\u0627\u0644", "\ufdfa", "\U0001f468\u200d\U0001f469"),
    *("Parkinson", "IL-2", "\u4e2d\u56fd", "a b ", "[SEP]", "</s>", "\u2581", "##s", "\u202e", "'"),
    *("\U0001f1e9\U0001f1ea", "\u2764\ufe0f", " x ", "\u0085", "\u0130", "\U0001f3fd"),
]
pieces = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
)
texts = st.lists(pieces, max_size=40).map("".join)
contexts = texts.filter(words_of)


FOUR = ("bert-base-cased", "pubmedbert-uncased", "deberta-v3-base", "roberta-base")


@pytest.fixture(scope="module")
def real(vocabularies: dict[str, Path]) -> dict[str, Any]:
    """Tokenizers of unlike kinds, for lists of words."""
    return {name: load_tokenizer(str(vocabularies[name]), of_words=True) for name in FOUR}


def rows_of(
    questions: list[str], contexts: list[str], spans: list[list[tuple[int, int]] | None]
) -> datasets.Dataset:
    """Questions with answers at these characters."""
    keys = content_keys(questions, contexts)
    answers = [
        None if given is None else [{"text": text[a:b], "start": a} for a, b in given]
        for text, given in zip(contexts, spans, strict=True)
    ]
    row = {"text": questions, "text_b": contexts, "answers": answers}
    row |= dict.fromkeys(MARKS, [7] * len(keys))
    return datasets.Dataset.from_dict(
        {**row, "key_hi": keys[:, 0], "key_lo": keys[:, 1]},
        features=datasets.Features(
            {
                "text": datasets.Value("string"),
                "text_b": datasets.Value("string"),
                "answers": datasets.List(
                    {"text": datasets.Value("string"), "start": datasets.Value("int64")}
                ),
                **dict.fromkeys([*MARKS, "key_hi", "key_lo"], datasets.Value("int64")),
            }
        ),
    )


def drawn_spans(text: str, data: st.DataObject, most: int = 3) -> list[tuple[int, int]]:
    pair = st.tuples(st.integers(0, len(text) - 1), st.integers(1, len(text)))
    return data.draw(st.lists(pair.filter(lambda p: p[0] < p[1]), max_size=most))


# ------------------------------------------------------------------------- windows and characters


def kept_tokens(tokenizer: Any, row: dict[str, Any], length: int) -> dict[int, int]:
    """Word of the window -> position of its first token, by the tokenizer's own numbers."""
    encoded = tokenizer(
        row["question"],
        row["words"],
        is_split_into_words=True,
        truncation="only_second",
        max_length=length,
    )
    assert len(encoded["input_ids"]) <= length
    found: dict[int, int] = {}
    for at, (word, part) in enumerate(
        zip(encoded.word_ids(0), encoded.sequence_ids(0), strict=True)
    ):
        if part == 1:
            found.setdefault(word, at)
    return found


def test_the_same_words_are_in_every_view_and_come_back_to_the_same_characters(
    real: dict[str, Any],
) -> None:

    @settings(max_examples=12, deadline=None)
    @given(question=texts, context=contexts, length=st.sampled_from([32, 48, 384]), data=st.data())
    def check(question: str, context: str, length: int, data: st.DataObject) -> None:
        context = context * data.draw(st.sampled_from([1, 3]))
        answers = drawn_spans(context, data)
        spans = words_of(context)
        dropped = {  # by a tokenizer, whatever stands around it
            number
            for number, (start, end) in enumerate(spans)
            for tokenizer in real.values()
            if not tokenizer(
                [context[start:end]], is_split_into_words=True, add_special_tokens=False
            )["input_ids"]
        }
        split = prepare(rows_of([question], [context], [answers]), list(real.values()), length)
        slow = windows_of_context(list(real.values()), length, question, context)
        assert len(split) == len(slow)
        for name in slow[0]:
            assert list(split[name]) == [window[name] for window in slow], name
        asked = [question[a:b] for a, b in words_of(question)]
        counted: list[int] = []
        for row in split:
            first, words = row["first"], row["words"]
            assert asked[: len(row["question"])] == row["question"]
            assert (
                list(zip(row["starts"], row["ends"], strict=True))
                == spans[first : first + len(words)]
            )
            assert words == [context[a:b] for a, b in zip(row["starts"], row["ends"], strict=True)]
            for start, end, label in zip(row["starts"], row["ends"], row["label"], strict=True):
                inside = any(a <= at < b for at in range(start, end) for a, b in answers)
                assert SPAN_TAGS[label] == (IN_SPAN if inside else "O")
            here = [at for at, counts in enumerate(row["counted"]) if counts]
            for tokenizer in real.values():
                positions = kept_tokens(tokenizer, row, length)
                assert set(here) <= positions.keys(), "what counts has a token in every view"
            counted += [first + at for at in here]
        assert sorted(counted) == [n for n in range(len(spans)) if n not in dropped]
        given = [*zip(split[0]["answer_starts"], split[0]["answer_ends"], strict=True)]
        assert given == answers
        examples = Examples.of(split)
        assert isinstance(examples.words, ContextWords) and examples.words.lost == len(dropped)
        assert examples.words.rows.tolist() == sorted(
            np.flatnonzero(examples.words.counted), key=lambda row: examples.words.numbers[row]
        )

    check()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_windows_hold_every_word_and_each_counts_where_it_has_most_around_it(
    tokens: list[tuple[int, int]], rooms: tuple[int, int]
) -> None:
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


def written(folder: Path, rows: list[dict[str, Any]], **data: Any) -> datasets.Dataset:
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = CharacterSpans(data={"path": str(folder), **data})
    return open_source(task, cache_folder=folder / "cache").read("train")


CONTEXT = "the cat saw a very old dog and some snow"
ROWS: list[dict[str, Any]] = [
    {
        "question": "which animal",
        "context": CONTEXT,
        "answers": [{"start": 4, "end": 7}, {"text": "dog", "start": 23}],
    },
    {"question": "which food", "context": CONTEXT, "answers": []},
    {
        "question": "what",
        "context": CONTEXT,
        "answers": {"text": ["very old"], "answer_start": [14]},
    },
    {"question": "weather", "context": CONTEXT, "answers": ["36 40", "4 7;23 26"]},
]
RIGHT = [[(4, 7), (23, 26)], [], [(14, 22)], [(36, 40), (4, 7), (23, 26)]]


def test_answers_are_read_in_every_form(tmp_path: Path) -> None:
    split = written(tmp_path / "data", ROWS)
    found = [[(a["start"], a["start"] + len(a["text"])) for a in row["answers"]] for row in split]
    assert found == RIGHT
    assert all(
        CONTEXT[a:b] == a_["text"]
        for row in split
        for a_ in row["answers"]
        for a, b in [(a_["start"], a_["start"] + len(a_["text"]))]
    )
    task = CharacterSpans(data={"path": str(tmp_path / "data")})
    source = open_source(task, cache_folder=tmp_path / "cache")
    assert source.labels == SPAN_TAGS
    key = (split[2]["key_hi"], split[2]["key_lo"])
    assert source.locations("train", {key})[key].endswith("train.jsonl:3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": [{"start": 4, "end": 41}]}, "answer 0 must have a start and an end.*40 char"),
        ({"answers": [{"start": 7, "end": 4}]}, "answer 0 must have a start and an end"),
        ({"answers": [{"start": 4, "end": 4}]}, "answer 0 must have a start and an end"),
        ({"answers": [{"start": -1, "end": 4}]}, "answer 0 must have a start and an end"),
        ({"answers": [{"start": True, "end": 4}]}, "answer 0 must have a start and an end"),
        ({"answers": ["4 7;x"]}, "answer 0 must have a start and an end"),
        ({"answers": ["7 4"]}, "answer 0 must have a start and an end"),
        ({"answers": [[4, 7]]}, "answer 0 must have a start and an end"),
        ({"answers": [{"start": 4, "end": 7, "text": "dog"}]}, "answer 0 is 'dog', and its char"),
        (
            {"context": "🎉 a cat", "answers": [{"start": 5, "end": 8, "text": "cat"}]},
            "lie in the 7 characters .* It counts UTF-16 code units, as JavaScript does: in char",
        ),
        ({"answers": [{"text": "dog", "start": 4}]}, "does not stand in the context"),
        ({"answers": {"text": ["cat"], "answer_start": []}}, "lists as long as each other"),
        ({"answers": [{"start": 4}]}, "answer 0 must have a text and a start"),
        ({"answers": "4 7"}, "must be a list of {start, end}, empty where"),
        ({"answers": None}, "no answers in 'answers', but"),
        ({"context": " \t"}, "'context' holds no word"),
        ({"context": 3}, "'context' must be a text"),
        ({"question": None}, "'question' must be a text"),
    ],
)
def test_mistakes_in_rows_name_their_location(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        written(tmp_path / "data", [*ROWS, {**ROWS[0], **change}])
    assert "train.jsonl:5" in str(error.value)


# -------------------------------------------------------------------------------------- batches


def collator(
    folder: Path, model: Path, rows: list[dict[str, Any]], length: int = 32
) -> tuple[Examples, Collator, Any]:
    tokenizer = load_tokenizer(str(model), of_words=True)
    split = prepare(written(folder, rows), [tokenizer], length)
    assert split.cache_files, "memory-mapped"
    tokenise(split, tokenizer, length, folder / "tokens.arrow")
    examples = Examples.of(split)
    table = TokenTable(folder / "tokens.arrow", tokenizer)
    return examples, Collator(examples, {"student": table}, word_rows), tokenizer


def test_a_batch_holds_the_question_and_counts_each_word_once(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    long = " ".join([CONTEXT] * 4)  # 40 words, of which 27 have room behind the question
    rows = [{**ROWS[0], "question": "we had", "context": long}, ROWS[1]]
    examples, collate, tokenizer = collator(tmp_path / "data", tiny_models["toy"], rows)
    assert len(examples) == 3 and isinstance(examples.words, ContextWords)
    assert examples.words.question.tolist() == [0, 0, 1]
    batch = collate(np.arange(3))
    view = batch.views["student"]
    assert view.positions is not None and view.token_type_ids is not None
    ids = view.input_ids.flatten()[view.positions].tolist()
    read = tokenizer.convert_ids_to_tokens(ids)
    of_rows = examples.words.question[batch_examples(batch)]
    for number, text in ((0, long), (1, CONTEXT)):
        mine = [row for row in examples.words.rows.tolist() if of_rows[row] == number]
        assert [read[row] for row in mine] == text.split()
    asked = tokenizer.convert_tokens_to_ids("we")
    assert (view.input_ids[:2] == asked).any(dim=1).all(), "the question is in every window"
    assert (view.token_type_ids.flatten()[view.positions] == 1).all()
    assert (view.token_type_ids[:, :3] == 0).all()
    counted = batch.row_sets["labelled"]
    inside = [read[row] for row in counted.tolist() if batch.labels[row] == 1]
    assert inside == ["cat", "dog"]
    assert len(batch.labels) > len(counted) == 50
    assert examples.class_counts(2).tolist() == [48, 2]


def batch_examples(batch: Any) -> np.ndarray:
    return np.asarray(batch.views["student"].example_indices)


# --------------------------------------------------------------------------------------- scores


class Plain:
    """What is predicted of some contexts, character by character."""

    def __init__(self, split: datasets.Dataset, inside: np.ndarray) -> None:
        """inside: bool [R], of each row of `split`."""
        of_question: dict[int, dict[int, tuple[int, int, bool]]] = {}
        row = 0
        for window in split:
            for at, counts in enumerate(window["counted"]):
                span = window["starts"][at], window["ends"][at], bool(inside[row])
                words = of_question.setdefault(window["number"], {})
                if counts:
                    words[window["first"] + at] = span
                row += 1
        self.spans: list[list[tuple[int, int]]] = []
        for words in of_question.values():
            runs: list[list[int]] = []
            for number in range(max(words, default=-1) + 1):
                start, end, marked = words.get(number, (0, 0, False))
                _, _, before = words.get(number - 1, (0, 0, False))
                if marked and before:
                    runs[-1][1] = end
                elif marked:
                    runs.append([start, end])
            self.spans.append([(a, b) for a, b in runs])


def marks(spans: list[list[tuple[int, int]]], texts: list[str]) -> np.ndarray:
    found = [np.zeros(len(text), dtype=bool) for text in texts]
    for here, of_one in zip(found, spans, strict=True):
        for start, end in of_one:
            here[start:end] = True
    return np.concatenate(found)


METRICS = {
    "character_f1": CharacterF1,
    "character_precision": CharacterPrecision,
    "character_recall": CharacterRecall,
    "span_f1": SpanF1,
}


def values(found: SpanPredictions) -> dict[str, float]:
    return {
        name: metric(metric.Settings(), SPAN_TAGS).value(found) for name, metric in METRICS.items()
    }


def test_scores_are_those_of_characters(
    real: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By scikit-learn, on the characters of hostile texts."""

    @settings(max_examples=12, deadline=None)
    @given(given=st.lists(contexts, min_size=1, max_size=3), data=st.data())
    def check(given: list[str], data: Any) -> None:
        right = [drawn_spans(text, data) for text in given]
        tokenizers = [real["pubmedbert-uncased"], real["deberta-v3-base"]]
        split = prepare(rows_of(["a"] * len(given), given, right), tokenizers, 32)
        examples = Examples.of(split)
        assert isinstance(examples.words, ContextWords)
        size = len(examples.labels)
        inside = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
        logits = np.stack([~inside, inside], axis=1).astype(np.float64)
        found = SpanPredictions(logits, examples.labels, examples.words, SPAN_TAGS)
        assert len(found) == len(given)
        plain = Plain(split, inside)
        assert [(q, a, b) for q, spans in enumerate(plain.spans) for a, b in spans] == [
            tuple(span) for span in found.spans.tolist()
        ]
        truth, predicted = marks(right, given), marks(plain.spans, given)
        both = {(q, *s) for q, of_one in enumerate(right) for s in of_one}
        seen = {(q, *s) for q, of_one in enumerate(plain.spans) for s in of_one}
        assert values(found) == {
            "character_f1": pytest.approx(f1_score(truth, predicted, zero_division=0)),
            "character_precision": pytest.approx(
                precision_score(truth, predicted, zero_division=0)
            ),
            "character_recall": pytest.approx(recall_score(truth, predicted, zero_division=0)),
            "span_f1": pytest.approx(2 * len(both & seen) / max(len(both) + len(seen), 1)),
        }
        file = tmp_path_factory.mktemp("saved") / "found.safetensors"
        SavedPredictions(SPAN_TAGS, np.zeros(len(found)), {"model": found}).write(file)
        again = SavedPredictions.read(file, "characters").models["model"]
        assert values(again) == values(found)  # type: ignore[arg-type]

    check()


def predictions_of(
    split: datasets.Dataset, inside: list[list[str]]
) -> tuple[SpanPredictions, Examples]:
    """Of windows: the words that are predicted to be in an answer."""
    marked = [
        word in chosen
        for window, chosen in zip(split, inside, strict=True)
        for word in window["words"]
    ]
    examples, logits = Examples.of(split), np.array([[not m, m] for m in marked], dtype=float)
    assert isinstance(examples.words, ContextWords)
    return SpanPredictions(logits, examples.labels, examples.words, SPAN_TAGS), examples


def test_a_cut_into_words_costs(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """An answer that ends inside of a word cannot be found exactly; a run holds its white space."""
    tokenizer = load_tokenizer(str(tiny_models["toy"]), of_words=True)
    edges = prepare(rows_of(["a"], ["old-dog cat"], [[(3, 4)]]), [tokenizer], 32)
    assert edges[0]["words"] == ["old", "-", "dog", "cat"]
    assert edges[0]["label"] == [0, 1, 0, 0], "words that an answer only touches are outside"
    split = prepare(rows_of(["a"], ["very olden dog"], [[(0, 8)]]), [tokenizer], 32)
    assert split[0]["label"] == [1, 1, 0]
    found, _ = predictions_of(split, [["very", "olden"]])
    assert found.spans.tolist() == [[0, 0, 10]]
    assert values(found)["character_f1"] == pytest.approx(2 * 8 / (10 + 8))
    assert values(found)["span_f1"] == 0


def test_intervals_are_over_questions(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(tiny_models["toy"]), of_words=True)
    long = CONTEXT + " rain" * 30
    split = prepare(rows_of(["a"] * 2, [long, "snow"], [[(4, 7)], [(0, 4)]]), [tokenizer], 32)
    assert len(split) == 3
    right, examples = predictions_of(split, [["cat"], [], ["snow"]])
    wrong, _ = predictions_of(split, [[], [], ["snow"]])
    metric = CharacterF1(CharacterF1.Settings(), SPAN_TAGS)
    low, high = paired_interval(right, wrong, metric)
    assert low <= 0.0 and high == 1.0
    firsts = examples.words.firsts  # type: ignore[union-attr]
    assert firsts.tolist() == [0, 2] and examples.counts == {"examples": 2, "windows": 3}
    part = examples.at(np.array([2]))
    assert part.words.answers.tolist() == [[1, 0, 4]]  # type: ignore[union-attr]
    alone = SpanPredictions(right.logits[-1:], part.labels, part.words, SPAN_TAGS)  # type: ignore
    assert values(alone)["character_f1"] == 1.0


def test_policies_are_compared_by_the_characters_of_their_targets(
    tiny_models: dict[str, Path],
) -> None:
    tokenizer = load_tokenizer(str(tiny_models["toy"]), of_words=True)
    contexts = [" ".join([word, CONTEXT] * 4) for word in ("cat", "dog", "snow", "rain") * 5]
    split = prepare(rows_of(["a"] * 20, contexts, [[(0, 3)]] * 20), [tokenizer], 32)
    examples = Examples.of(split)
    good = torch.nn.functional.one_hot(torch.from_numpy(examples.labels), 2) * 4.0
    signals = {"good": Signals(good), "bad": Signals(torch.flip(good, [1]) / 2)}
    found = compare(
        signals,
        examples.labels,
        examples.keys,
        SPAN_TAGS,
        words=examples.words,
        group_keys=examples.keys,
    )
    assert (found.over, found.metric, found.examples) == ("characters", "character_f1", 20)
    metric = CharacterF1(CharacterF1.Settings(), SPAN_TAGS)
    for name, of_teacher in signals.items():
        assert isinstance(examples.words, ContextWords)
        whole = SpanPredictions(
            of_teacher.logits.numpy(), examples.labels, examples.words, SPAN_TAGS
        )
        assert found.teachers[name].score == pytest.approx(metric.value(whole))
    assert found.teachers["good"].score > 0.8 > found.teachers["bad"].score


def test_a_cache_holds_two_logits_for_each_word() -> None:
    task, phase = CharacterSpans(data={"path": "data"}), Cache(splits="train", dtype="float32")
    assert example_bytes(phase, task, BertConfig(), 2, 100) == 0.75 * 100 * 2 * 4


# ------------------------------------------------------------------------------------ prediction


@pytest.fixture(scope="module")
def finder(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, which finds spans everywhere."""
    folder = tmp_path_factory.mktemp("finder")
    torch.manual_seed(1)
    names = dict(enumerate(SPAN_TAGS))
    model = AutoModelForTokenClassification.from_pretrained(
        tiny_models["toy"], num_labels=2, id2label=names, label2id={v: k for k, v in names.items()}
    )
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(folder)
    return folder


def test_predicted_spans_are_those_of_an_evaluation(finder: Path, tmp_path: Path) -> None:
    """Of one tokenizer alone the windows are the same."""
    predictor = load_predictor(finder)
    assert isinstance(predictor, Tagger)
    long = " ".join([CONTEXT, "rain, \u200b and"] * 4)
    asked = [("which animal", long), ("what", CONTEXT), ("", "snow"), ("which", "  ")]
    found = [one["predicted"] for one in predictor.predictions(asked)]
    assert found[-1] == [] and any(found[0])
    rows = rows_of([q for q, _ in asked[:-1]], [c for _, c in asked[:-1]], [[]] * 3)
    split = prepare(rows, [predictor.tokenizer], 32)
    logits = []
    for window in split:
        encoded = predictor.tokenizer(
            window["question"], window["words"], is_split_into_words=True, return_tensors="pt"
        )
        with torch.no_grad():
            of_tokens = predictor._model(**encoded).logits[0]
        first = kept_tokens(predictor.tokenizer, window, 32)
        logits += [of_tokens[first.get(at, 0)].tolist() for at in range(len(window["words"]))]
    examples = Examples.of(split)
    assert isinstance(examples.words, ContextWords) and examples.words.lost == 4
    whole = SpanPredictions(np.array(logits), examples.labels, examples.words, SPAN_TAGS)
    spans = [(n, s["start"], s["end"]) for n, of in enumerate(found) for s in of]
    assert spans == [tuple(span) for span in whole.spans.tolist()]
    for (_, context), of_one in zip(asked, found, strict=True):
        for span in of_one:
            assert span.keys() == {"start", "end", "text", "probability"}
            assert context[span["start"] : span["end"]] == span["text"]
            assert 0.5 <= span["probability"] <= 1


def test_a_file_of_questions_gets_spans(finder: Path, tmp_path: Path) -> None:
    file, said = tmp_path / "asked.jsonl", []
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with (tmp_path / "out.jsonl").open("w") as output:
        predict_file(finder, file, output, progress=said.append)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["question"] for line in lines] == [row["question"] for row in ROWS]
    assert all(CONTEXT[s["start"] : s["end"]] == s["text"] for x in lines for s in x["predicted"])
    (tmp_path / "texts.txt").write_text("a cat\n")
    with pytest.raises(UserError, match="no column 'question'; it has: text"):
        predict_file(finder, tmp_path / "texts.txt", output, progress=said.append)
    with pytest.raises(UserError, match="give pairs of a question and its context"):
        load_predictor(finder).predictions(["a cat"])  # type: ignore[list-item]
