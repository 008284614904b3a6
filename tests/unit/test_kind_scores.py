"""Scores of entities, words, characters and answers: those of seqeval, scikit-learn, torchmetrics
and of definitions; over texts and questions, not over their words or windows."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import seqeval.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import CONTEXT, TAGS, asked, read, texts
from seqeval.scheme import IOB2
from sklearn.metrics import f1_score, precision_score, recall_score
from torchmetrics.functional.text import squad

from ds_distill.data.batches import Units
from ds_distill.data.spans import words_of
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.windows import question_windows, word_windows
from ds_distill.evaluation.answers import BEST, AnswerPredictions, best_spans, ranked_answers
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.predictions import TagPredictions, word_predictions
from ds_distill.recipe.metrics.answers import (
    MRR,
    ExactMatch,
    LenientAccuracy,
    SquadF1,
    StrictAccuracy,
    first_right,
)
from ds_distill.recipe.metrics.characters import (
    CharacterF1,
    CharacterPrecision,
    CharacterRecall,
    SpanF1,
)
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.metrics.words import EntityF1, EntityPrecision, EntityRecall, WordF1
from ds_distill.recipe.tags import SPAN_TAGS, are_entities, entity_types
from ds_distill.recipe.tasks import TokenClassification
from ds_distill.reporting.results import metrics_of
from ds_distill.routing.comparison import compare
from ds_distill.tasks.labelled import TokenClassificationKind
from ds_distill.types import LACKING, Signals


@pytest.fixture(scope="module")
def toy(tiny_models):
    return load_tokenizer(str(tiny_models["toy"]), of_words=True)


def value(metric, of, labels=None, **options):
    return float(metric(metric.Settings(**options), labels or []).value(of))


# -------------------------------------------------------------------------------- tags of words

tag_lists = st.lists(
    st.lists(st.sampled_from(TAGS), min_size=1, max_size=8), min_size=1, max_size=6
)


def predictions_of(truth, predicted, counted=None):
    ids = [np.array([TAGS.index(tag) for tags in of for tag in tags]) for of in (truth, predicted)]
    counted = np.ones(len(ids[0]), dtype=bool) if counted is None else counted
    offsets = np.concatenate([[0], np.cumsum([len(tags) for tags in truth])])
    return TagPredictions(np.eye(len(TAGS))[ids[1]], ids[0], offsets, counted, TAGS)


@settings(max_examples=50)
@given(tag_lists, st.data())
def test_scores_of_tags_are_seqevals(truth, data):
    def drawn(one):
        sizes = [len(tags) for tags in truth]
        return [data.draw(st.lists(one, min_size=size, max_size=size)) for size in sizes]

    predicted, lost = drawn(st.sampled_from(TAGS)), drawn(st.booleans())
    found = predictions_of(truth, predicted, ~np.array([one for tags in lost for one in tags]))
    seen = [  # a word without a token is predicted O
        ["O" if gone else tag for tag, gone in zip(tags, which, strict=True)]
        for tags, which in zip(predicted, lost, strict=True)
    ]
    oracles = {
        EntityF1: seqeval.metrics.f1_score,
        EntityPrecision: seqeval.metrics.precision_score,
        EntityRecall: seqeval.metrics.recall_score,
    }
    for mode, options in {"default": {}, "strict": {"mode": "strict", "scheme": IOB2}}.items():
        for metric, oracle in oracles.items():
            expected = oracle(truth, seen, zero_division=0, **options)
            assert value(metric, found, TAGS, mode=mode) == pytest.approx(expected), (mode, metric)
    flat = [[tag[2:] or "O" for tags in of for tag in tags] for of in (truth, seen)]
    right = [a == b for x, y in zip(truth, seen, strict=True) for a, b in zip(x, y, strict=True)]
    assert Accuracy(None, TAGS).value(found) == pytest.approx(np.mean(right))
    types = [t for t in ("gene", "disease") if t in flat[0] + flat[1]]
    if types:
        expected = f1_score(*flat, labels=types, average="macro", zero_division=0)
        assert WordF1(None, TAGS).value(found) == pytest.approx(expected)
    report = seqeval.metrics.classification_report(truth, seen, output_dict=True, zero_division=0)
    for kind, score in found.by_class(found.class_counts(TAGS)).items():
        there = report.get(kind, {}).get("support", 0)
        assert score == (pytest.approx(report[kind]["f1-score"]) if there else None)


NO_ENTITIES = [
    ["X", "NOUN", "VERB", "ADJ", "ADP"],
    ["O", "B", "I"],
    ["B-gene", "I-gene"],
    ["O", "B-gene", "I-gene", "NOUN"],
]


def test_tags_that_are_no_entities_have_no_types():
    assert are_entities(TAGS) and entity_types(TAGS) == ["gene", "disease"]
    assert not any(map(are_entities, NO_ENTITIES)) and not are_entities(["O", "B-"])
    assert entity_types(NO_ENTITIES[0]) == NO_ENTITIES[0]
    assert entity_types(NO_ENTITIES[1]) == ["B", "I"]


@pytest.mark.parametrize("tags", NO_ENTITIES)
@pytest.mark.parametrize("metric", ["accuracy", "word_f1"])
def test_tags_that_are_no_entities_are_scored_by_word(tags, metric):
    """An evaluation reports no F1 of entities then, and tables have what it reports."""
    draw = np.random.default_rng(0)
    labels, rows = draw.integers(0, len(tags), 40), np.arange(40)
    logits = draw.normal(size=(40, len(tags)))
    logits[rows[::2], labels[::2]] += 9.0
    counted = rows % 8 != 7
    keys, offsets = torch.zeros(10, 2, dtype=torch.long), np.arange(0, 41, 4)
    examples = replace(Units.plain(keys, labels, offsets=offsets), counted=counted)
    kind = TokenClassificationKind(TokenClassification(data={"path": "x"}, metric=metric), tags)
    found = kind.report(kind.scored(logits, examples))
    nothing = "O" if "O" in tags else ""
    truth = [tags[at] for at in labels]
    seen = [
        tags[at] if there else nothing for at, there in zip(logits.argmax(1), counted, strict=True)
    ]
    assert found["accuracy"] == pytest.approx(np.mean(np.array(seen) == np.array(truth)))
    types = {tag: tag[2:] if tag[:2] in ("B-", "I-") else tag for tag in [*tags, "", "O"]}
    names = list(dict.fromkeys(types[tag] for tag in tags if tag != "O"))
    of_truth, of_seen = ([types[tag] for tag in of] for of in (truth, seen))
    each = f1_score(of_truth, of_seen, labels=names, average=None, zero_division=0)
    assert found["per_class"] == pytest.approx(dict(zip(names, each, strict=True)))
    assert sum(one["count"] for one in found["reliability"]) == counted.sum()
    if metric == "word_f1":
        assert found["word_f1"] == pytest.approx(each.mean())
    assert list(kind.metrics) == list(dict.fromkeys([metric, "accuracy"]))
    record = {"over": "words", "metric": metric, "models": {"any": found}}
    assert list(metrics_of(record)) == list(kind.metrics)


def test_the_baseline_counts_a_word_of_two_windows_once(toy, tmp_path):
    tags = ["O"] * 8 + ["B-gene"] * 4 + ["O"] * 8
    rows = [{"tokens": ["the", "cat", "saw", "snow"] * 5, "tags": tags}]
    split = word_windows(read("token-classification", tmp_path, rows), [toy], 12)
    examples = Units.of(split)
    assert len(examples.labels) > 20
    kind = TokenClassificationKind(TokenClassification(data={"path": "x"}, max_length=12), TAGS)
    for there, source in ((False, "the evaluated split"), (True, "train")):
        data = SimpleNamespace(
            has_split=lambda split, there=there: there, examples=lambda split: examples
        )
        logits, described = kind.baseline(data, "test", examples, [])
        assert np.exp(logits[0]).tolist() == pytest.approx([0.8, 0.2, 0, 0, 0])
        assert len(logits) == len(examples.labels) and described["split"] == source
    assert kind.finite(np.array([[1.0, np.nan], [1.0, 2.0]])).tolist() == [False, True]


def test_the_mark_is_of_the_words_that_were_scored(toy, tmp_path):
    """Windows of any length have the same words; another tokenizer may read others."""
    rows = [
        {"tokens": ["the", "cat", "\u200b", "saw"] * 5, "tags": ["O"] * 20},
        {"tokens": ["a"], "tags": ["O"]},
    ]
    split = read("token-classification", tmp_path, rows)
    kind = TokenClassificationKind(TokenClassification(data={"path": "x"}), TAGS)

    def mark(of, length):
        return kind.scored_words(Units.of(word_windows(of, [toy], length)))

    assert mark(split, 8) == mark(split, 64) is not None
    assert mark(split.select([1]), 8) is None, "as before where all words are scored"
    every = torch.zeros(2, 2).long(), np.zeros(21, dtype=np.int64)
    other = Units.plain(*every, offsets=np.array([0, 20, 21]))
    other = replace(other, counted=np.arange(21) % 5 > 0)
    assert kind.scored_words(other) not in (None, mark(split, 8))


# ------------------------------------------------------------------------------------ characters


def runs(split, inside):
    """Of each question what is predicted, word by word. inside: bool [R], of each row."""
    of_question = {}
    row = 0
    for window in split:
        words = of_question.setdefault(window["number"], {})
        for at, counts in enumerate(np.logical_and(window["counted"], window["owned"])):
            if counts:
                place = window["starts"][at], window["ends"][at]
                words[window["first"] + at] = (*place, bool(inside[row]))
            row += 1
    found = []
    for words in of_question.values():
        spans = []
        for number in range(max(words, default=-1) + 1):
            start, end, marked = words.get(number, (0, 0, False))
            if marked and words.get(number - 1, (0, 0, False))[2]:
                spans[-1] = spans[-1][0], end
            elif marked:
                spans.append((start, end))
        found.append(spans)
    return found


def marks(spans, contexts):
    found = [np.zeros(len(text), dtype=bool) for text in contexts]
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


def values(found):
    return {name: value(metric, found, SPAN_TAGS) for name, metric in METRICS.items()}


def spans_of(examples, inside):
    logits = np.stack([~inside, inside], axis=1).astype(np.float64)
    return word_predictions(logits, examples, SPAN_TAGS)


def test_scores_of_spans_are_those_of_characters(vocabularies, tmp_path):
    """By scikit-learn, on the characters of hostile texts."""
    names = ("pubmedbert-uncased", "deberta-v3-base")
    tokenizers = [load_tokenizer(str(vocabularies[name]), of_words=True) for name in names]

    @settings(max_examples=12)
    @given(given=st.lists(texts.filter(words_of), min_size=1, max_size=3), data=st.data())
    def check(given, data):
        right = []
        for text in given:
            pair = st.tuples(st.integers(0, len(text) - 1), st.integers(1, len(text)))
            right.append(data.draw(st.lists(pair.filter(lambda p: p[0] < p[1]), max_size=3)))
        split = word_windows(asked(["a"] * len(given), given, right), tokenizers, 32)
        examples = Units.of(split)
        size = len(examples.labels)
        inside = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
        found, plain = spans_of(examples, inside), runs(split, inside)
        assert len(found) == len(given)
        each = [(number, a, b) for number, spans in enumerate(plain) for a, b in spans]
        assert each == [tuple(span) for span in found.predicted_spans.tolist()]
        characters = marks(right, given), marks(plain, given)
        both = {(number, *span) for number, of_one in enumerate(right) for span in of_one}
        of_spans = 2 * len(both & {*each}) / max(len(both) + len({*each}), 1)
        expected = [score(*characters, zero_division=0) for score in SCORES]
        assert list(values(found).values()) == pytest.approx([*expected, of_spans])
        file = tmp_path / "found.safetensors"
        SavedPredictions(SPAN_TAGS, np.zeros(len(found)), {"model": found}).write(file)
        again = SavedPredictions.read(file, "characters").models["model"]
        assert values(again) == values(found)

    check()


SCORES = (f1_score, precision_score, recall_score)


def chosen(toy, contexts, right, words):
    """words: of each window those that are predicted to be in an answer."""
    split = word_windows(asked(["a"] * len(contexts), contexts, right), [toy], 32)
    marked = [
        word in of for window, of in zip(split, words, strict=True) for word in window["words"]
    ]
    examples = Units.of(split)
    return split, spans_of(examples, np.array(marked)), examples


def test_a_cut_into_words_costs(toy):
    """An answer that ends inside of a word cannot be found exactly; a run holds its white space."""
    edges, _, _ = chosen(toy, ["old-dog cat"], [[(3, 4)]], [[]])
    assert edges[0]["words"] == ["old", "-", "dog", "cat"]
    assert edges[0]["label"] == [0, 1, 0, 0], "words that an answer only touches are outside"
    split, found, _ = chosen(toy, ["very olden dog"], [[(0, 8)]], [["very", "olden"]])
    assert split[0]["label"] == [1, 1, 0]
    assert found.predicted_spans.tolist() == [[0, 0, 10]]
    assert values(found)["character_f1"] == pytest.approx(2 * 8 / (10 + 8))
    assert values(found)["span_f1"] == 0


def test_policies_are_compared_by_the_characters_of_their_targets(toy):
    contexts = [" ".join([word, CONTEXT] * 4) for word in ("cat", "dog", "snow", "rain") * 5]
    split = word_windows(asked(["a"] * 20, contexts, [[(0, 3)]] * 20), [toy], 32)
    examples = Units.of(split)
    good = torch.nn.functional.one_hot(torch.from_numpy(examples.labels), 2) * 4.0
    signals = {"good": Signals(good), "bad": Signals(torch.flip(good, [1]) / 2)}
    of_data = examples.labels, examples.keys, SPAN_TAGS
    found = compare(signals, *of_data, words=examples, group_keys=examples.keys)
    assert (found.over, found.metric, found.examples) == ("characters", "character_f1", 20)
    for name, of_teacher in signals.items():
        whole = spans_of(examples, of_teacher.logits.numpy().argmax(1) == 1)
        assert found.teachers[name].score == pytest.approx(values(whole)["character_f1"])
    assert found.teachers["good"].score > 0.8 > found.teachers["bad"].score


# --------------------------------------------------------------------------------------- answers


@settings(max_examples=60)
@given(
    starts=st.lists(st.integers(-50, 50), min_size=2, max_size=9, unique=True),
    most=st.integers(1, 12),
    data=st.data(),
)
def test_best_spans_are_those_of_all(starts, most, data):
    """Against all spans, one after the other. The ends are chosen so that no two sums are alike."""
    count = len(starts)
    ends = [data.draw(st.integers(-50, 50)) + number / 16 for number in range(count)]
    inside = [True, *(data.draw(st.booleans()) for _ in range(count - 1))]
    first = next((at for at in range(1, count) if inside[at]), count)
    inside = [at == 0 or (at >= first and any(inside[at:])) for at in range(count)]
    logits = torch.tensor([starts, ends], dtype=torch.float32)
    logits = logits.masked_fill(~torch.tensor(inside), LACKING)
    every = [
        (starts[i] + ends[j], i, j)
        for i in range(1, count)
        for j in range(i, min(i + most, count))
        if inside[i] and inside[j]
    ]
    [found] = best_spans(logits, most).tolist()
    assert len(found) == BEST
    kept = [(score, int(i), int(j)) for i, j, score in found if score > LACKING / 2]
    expected = sorted(every, reverse=True)[:BEST]
    assert [score for score, *_ in kept] == [score for score, *_ in expected]
    assert set(kept) <= set(every)


def test_a_logit_that_is_not_finite_shows():
    logits = torch.zeros(2, 40)
    logits[1, 7] = torch.nan
    assert not best_spans(logits, 4).isfinite().all()


def test_spans_of_two_windows_are_one_answer(tiny_models):
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    context = " ".join(["cat", "dog", "snow", "rain", "bread"] * 10)
    split = question_windows(asked(["we saw"], [context], [None]), tokenizer, 32, 10)
    examples = Units.of(split)
    one, two, _ = split
    spans = np.full((3, BEST, 3), [0, 0, LACKING])
    place = context.index("dog", two["first"])  # in both windows
    for number, (row, score) in enumerate([(one, 1.0), (two, 3.0)]):
        at = 1 + row["begins"].index(place - row["first"])
        spans[number, 0] = at, at + 1, score
        spans[number, 1] = at + 1, at + 1, 2.0 + number / 2
    [answers] = ranked_answers(spans, examples)
    assert [(a.text, a.start, a.score) for a in answers] == [
        ("dog snow", place, 3.0),
        ("snow", place + 4, 2.5),
    ]


def answers(ranked, right):
    return AnswerPredictions(ranked, right, len(right))


WORDS = ["the", "The", "an", "cat", "Cat", "cats", "x-ray", "xray", ",", "...", "\u00e9", "\u2014"]
said = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)


@settings(max_examples=40)
@given(st.lists(st.tuples(said, st.lists(said, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_squad_scores_are_the_librarys(pairs):
    library = squad(
        [{"id": str(n), "prediction_text": text} for n, (text, _) in enumerate(pairs)],
        [
            {"id": str(n), "answers": {"text": right, "answer_start": [0] * len(right)}}
            for n, (_, right) in enumerate(pairs)
        ],
    )
    ours = answers([[text] for text, _ in pairs], [right for _, right in pairs])
    assert value(ExactMatch, ours) == pytest.approx(float(library["exact_match"]) / 100)
    assert value(SquadF1, ours) == pytest.approx(float(library["f1"]) / 100, abs=1e-6)


ranked_lists = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=9), min_size=1, max_size=6)


@settings(max_examples=50)
@given(ranked_lists, st.data())
def test_bioasq_scores_are_by_the_definition(ranked, data):
    """Strict accuracy c1 / n, lenient accuracy c5 / n, MRR the mean of 1 / r(i)."""
    right = [data.draw(st.lists(st.sampled_from("ABCXY"), min_size=1)) for _ in ranked]
    firsts = []
    for given_, golden in zip(ranked, right, strict=True):
        five = list(dict.fromkeys(given_))[:5]
        hits = [rank for rank, text in enumerate(five, 1) if text.upper() in golden]
        firsts.append(hits[0] if hits else 0)
    ours = answers(ranked, right)
    assert value(StrictAccuracy, ours) == pytest.approx(np.mean([first == 1 for first in firsts]))
    assert value(LenientAccuracy, ours) == pytest.approx(np.mean([first > 0 for first in firsts]))
    assert value(MRR, ours) == pytest.approx(np.mean([1 / f if f else 0.0 for f in firsts]))


def test_case_and_white_space_do_not_count_for_bioasq():
    assert first_right(["b", " Il-2  gene"], ["IL-2 gene"]) == 2
    assert first_right(["il 2 gene"], ["IL-2 gene"]) is None


# ------------------------------------------------------------------------------------- intervals


def test_intervals_are_over_texts_and_questions(toy):
    """One example with many words weighs as one: drawn by words the interval would be narrow."""
    truth = [["B-gene"] * 50, *[["B-disease"]] * 4]
    right = predictions_of(truth, truth)
    wrong = predictions_of(truth, [["O"] * 50, *truth[1:]])
    low, high = paired_interval(right, wrong, EntityF1(EntityF1.Settings(), TAGS))
    assert low == 0.0 and high > 0.9
    given = toy, [CONTEXT + " rain" * 30, "snow"], [[(4, 7)], [(0, 4)]]
    split, found, examples = chosen(*given, [["cat"], [], ["snow"]])
    _, other, _ = chosen(*given, [[], [], ["snow"]])
    low, high = paired_interval(found, other, CharacterF1(CharacterF1.Settings(), SPAN_TAGS))
    assert len(split) == 3 and low <= 0.0 and high == 1.0
    assert np.flatnonzero(examples.is_first).tolist() == [0, 2]
    assert examples.counts == {"examples": 2, "windows": 3}
    alone = word_predictions(found.logits[-1:], examples.at(np.array([2])), SPAN_TAGS)
    assert alone.answers.tolist() == [[0, 0, 4]]
    assert values(alone)["character_f1"] == 1.0
    cats = [["cat"]] * 40
    one, two = (answers([["cat"]] * n + [["dog"]] * (40 - n), cats) for n in (30, 10))
    kept = AnswerPredictions.of_arrays(one.arrays(), [])
    assert (kept.ranked, kept.right, kept.windows) == (one.ranked, one.right, one.windows)
    low, high = paired_interval(one, two, ExactMatch(ExactMatch.Settings(), []))
    assert 0.3 < low < 0.5 < high < 0.7
