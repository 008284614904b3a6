"""Shipped students that find entities, spans and answers: what they say of a text is what an
evaluation scores, in the same windows."""

import io
import json

import datasets
import numpy as np
import pytest
import seqeval.metrics
import torch
from kinds import CONTEXT, TAGS, asked, collator, jsonl, read
from slow_windows import first_tokens
from toys import make_tiny_bert, toy_vocabulary
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from ds_distill.check.models import Models
from ds_distill.data.batches import Units
from ds_distill.data.spans import word_keys, words_of
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.windows import word_windows
from ds_distill.errors import UserError
from ds_distill.evaluation.predictions import SpanPredictions, word_predictions
from ds_distill.keys import numbered_keys
from ds_distill.models.encoder import read_signals
from ds_distill.predictors.file import predict_file
from ds_distill.predictors.prediction import load_predictor
from ds_distill.recipe import Recipe
from ds_distill.recipe.tags import SPAN_TAGS
from ds_distill.recipe.tasks import ExtractiveQA, TokenClassification
from ds_distill.run.publish import keep_settings
from ds_distill.tasks.extractive_qa import ExtractiveQAKind
from ds_distill.tasks.labelled import TokenClassificationKind


def tagger_of(toy, folder, tags, length=16, seed=0):
    """Of random weights, which find entities everywhere."""
    torch.manual_seed(seed)
    names = dict(enumerate(tags))
    model = AutoModelForTokenClassification.from_pretrained(
        toy, num_labels=len(tags), id2label=names, label2id={v: k for k, v in names.items()}
    )
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(str(toy))
    tokenizer.model_max_length = length
    tokenizer.save_pretrained(folder)
    return load_predictor(folder)


@pytest.fixture(scope="module")
def folder(tiny_models, tmp_path_factory):
    tagger_of(tiny_models["toy"], found := tmp_path_factory.mktemp("tagger"), TAGS)
    return found


@pytest.fixture(scope="module")
def tagger(folder):
    return load_predictor(folder)


@pytest.fixture(scope="module")
def finder(tiny_models, tmp_path_factory):
    found = tmp_path_factory.mktemp("finder")
    tagger_of(tiny_models["toy"], found, SPAN_TAGS, 32, seed=1)
    return found


# -------------------------------------------------------------------------------------- entities


def test_words_are_read_before_a_text_as_training_reads_them(folder, tmp_path):
    """So what is written is a teacher's file for the same data."""
    file, output = tmp_path / "both.jsonl", io.StringIO()
    file.write_text('{"text": "rain-snow", "tokens": ["rain-snow"]}\n')
    predict_file(folder, file, output, progress=lambda _: None)
    [tag] = json.loads(output.getvalue())["predicted"]
    assert tag in TAGS


def test_entities_of_a_text_are_those_of_its_words_by_the_model(tagger):
    given_ = ["the cat, a dog (very old) saw snow", "", "  \n", "rain"]
    of_texts = [found["predicted"] for found in tagger.predictions(given_)]
    assert of_texts[0] and of_texts[1] == of_texts[2] == []
    for text, found in zip(given_, of_texts, strict=True):
        words = [text[start:end] for start, end in words_of(text)]
        [of_words] = tagger.predictions([words])
        expected = seqeval.metrics.sequence_labeling.get_entities(of_words["predicted"])
        assert [one["type"] for one in found] == [kind for kind, _, _ in expected]
        for one, (_, first, last) in zip(found, expected, strict=True):
            assert text[one["start"] : one["end"]] == one["text"]
            assert one["text"].startswith(words[first]) and one["text"].endswith(words[last])
            assert 0 < one["probability"] <= 1
        if words:
            encoded = tagger.tokenizer([words], is_split_into_words=True, return_tensors="pt")
            with torch.no_grad():
                best = (
                    tagger._model(**encoded).logits[0].argmax(1)[first_tokens(encoded, len(words))]
                )
            assert of_words["predicted"] == [TAGS[number] for number in best.tolist()]


@pytest.mark.parametrize("tags", [["X", "NOUN", "VERB"], ["O", "B-gene", "I-gene", "NOUN"]])
def test_words_of_a_text_have_tags_that_are_no_entities(tags, tiny_models, tmp_path):
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


KNOWN = ["the", "cat", "saw", "a", "very", "old", "dog", "\u200b", "abcdefghijklmnopqrs"]


def test_long_texts_are_scored_as_predict_reads_them(tagger, tmp_path):
    """In the same windows: each word once, under the text's one number. Before, what did not fit
    the first window counted as O."""
    draw = np.random.default_rng(0)
    rows = [
        {"tokens": draw.choice(KNOWN, size).tolist(), "tags": draw.choice(TAGS, size).tolist()}
        for size in (3, 60, 1, 25, 11)
    ]
    lists = [row["tokens"] for row in rows]
    source = read("token-classification", tmp_path, rows)
    split = word_windows(source, [tagger.tokenizer], 16)
    examples, collate = collator(split, tagger.tokenizer, 16)
    assert len(examples) > len(rows) + 5
    view = collate(np.arange(len(examples))).views["student"]
    with torch.no_grad():
        logits = read_signals(tagger._model, view).logits.numpy()
    kind = TokenClassificationKind(TokenClassification(data={"path": "x"}, max_length=16), TAGS)
    scored = kind.scored(logits, examples)
    expected = [tag for one in tagger.predictions(lists) for tag in one["predicted"]]
    assert [TAGS[number] for number in scored.predicted] == expected
    assert [TAGS[number] for number in scored.labels] == [t for row in rows for t in row["tags"]]
    report = kind.report(scored)
    dropped = sum(word == "\u200b" for words in lists for word in words)
    assert (report["examples"], report["words"]) == (5, 100)
    assert report["words_without_token"] == dropped > 0
    firsts = np.flatnonzero(kind.counted(examples))
    assert examples.counts == {"examples": 5, "windows": len(examples)}
    groups = numbered_keys(examples.group_keys.numpy())
    assert (groups[firsts][examples.number] == groups).all(), "folds are of texts"
    short = torch.from_numpy(word_keys(lists))[[0, 2]]
    assert torch.equal(examples.keys[firsts[[0, 2]]], short), "found in a cache as before"
    some = examples.at(np.flatnonzero(np.isin(examples.number, [1, 4])))
    assert len(some.whole()[1]) == 2 + 1
    again = Units.of(word_windows(source.select([0, 2]), [tagger.tokenizer], 16))
    assert len(again) == 2, "as it is where all fit"


# ----------------------------------------------------------------------------------------- spans


def test_predicted_spans_are_those_of_an_evaluation(finder):
    """Of one tokenizer alone the windows are the same."""
    predictor = load_predictor(finder)
    long = " ".join([CONTEXT, "rain, \u200b and"] * 4)
    pairs = [("which animal", long), ("what", CONTEXT), ("", "snow"), ("which", "  ")]
    found = [one["predicted"] for one in predictor.predictions(pairs)]
    assert found[-1] == [] and any(found[0])
    rows = asked(*map(list, zip(*pairs[:-1], strict=True)), [[]] * 3)
    split = word_windows(rows, [predictor.tokenizer], 32)
    logits = []
    for window in split:
        encoded = predictor.tokenizer(
            [window["question"]], [window["words"]], is_split_into_words=True, return_tensors="pt"
        )
        with torch.no_grad():
            of_tokens = predictor._model(**encoded).logits[0]
        firsts = first_tokens(encoded, len(window["words"]), 1)
        logits += [of_tokens[max(first, 0)].tolist() for first in firsts]
    examples = Units.of(split)
    whole = word_predictions(np.array(logits), examples, SPAN_TAGS)
    assert isinstance(whole, SpanPredictions) and whole.numbers()["words_without_token"] == 4
    spans = [(n, s["start"], s["end"]) for n, of in enumerate(found) for s in of]
    assert spans == [tuple(span) for span in whole.predicted_spans.tolist()]
    for (_, context), of_one in zip(pairs, found, strict=True):
        for span in of_one:
            assert span.keys() == {"start", "end", "text", "probability"}
            assert context[span["start"] : span["end"]] == span["text"]
            assert 0.5 <= span["probability"] <= 1


def test_a_file_of_questions_gets_spans(finder, tmp_path):
    file, said, output = tmp_path / "asked.jsonl", [], io.StringIO()
    file.write_text(jsonl([{"question": f"which {n}", "context": CONTEXT} for n in range(3)]))
    predict_file(finder, file, output, progress=said.append)
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [line["question"] for line in lines] == [f"which {n}" for n in range(3)]
    assert all(CONTEXT[s["start"] : s["end"]] == s["text"] for x in lines for s in x["predicted"])
    (tmp_path / "texts.txt").write_text("a cat\n")
    with pytest.raises(UserError, match="no column 'question'; it has: text"):
        predict_file(finder, tmp_path / "texts.txt", output, progress=said.append)
    with pytest.raises(UserError, match="give pairs of a question and its context"):
        load_predictor(finder).predictions(["a cat"])


# --------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("shipped", [True, False])
def test_answers_are_read_as_by_the_evaluation_of_the_run(shipped, tiny_models, tmp_path):
    """Answers as short, windows that overlap as much; by a model of random weights, whose answers
    are of any length. One that no run has shipped has the defaults."""
    torch.manual_seed(0)
    context = " ".join(["the cat saw a very old tiger before the rain"] * 8)
    pairs = [("who saw it", context), ("the dog", "some small bread")]
    own = {"stride": 3, "max_answer_length": 2} if shipped else {}
    task = ExtractiveQA(data={"path": "."}, max_length=32, **own)
    AutoModelForQuestionAnswering.from_pretrained(tiny_models["toy"]).save_pretrained(tmp_path)
    load_tokenizer(str(tiny_models["toy"])).save_pretrained(tmp_path)
    if shipped:
        keep_settings(tmp_path, task)
        AutoModelForQuestionAnswering.from_pretrained(tmp_path).save_pretrained(tmp_path)
    answerer = load_predictor(tmp_path)
    answerer.max_length = 32
    answerer.overlap = min(answerer.overlap, 10)
    assert (answerer.max_answer_length, answerer.overlap) == ((2, 3) if shipped else (30, 10))
    rows = {key: [one[at] for one in pairs] for at, key in enumerate(("text", "text_b"))}
    rows |= {"answers": [None, None], "copy": [0, 1], "group": [0, 1]}
    judged = ExtractiveQAKind(task, []).prepare(
        datasets.Dataset.from_dict(rows), lambda: [answerer.tokenizer], tmp_path / "judged.arrow"
    )
    assert judged["text_b"][:] == answerer._windows(pairs)["text_b"][:]
    found = [one["candidates"][0]["text"] for one in answerer.predictions(pairs)]
    assert (max(len(text.split()) for text in found) <= 2) == shipped


def test_windows_must_go_on():
    with pytest.raises(ValueError, match="a third of max_length=60: set at most 20"):
        ExtractiveQA(data={"path": "x"}, max_length=60, stride=21)
    assert ExtractiveQA(data={"path": "x"}, max_length=60).overlap == 20


@pytest.mark.parametrize("kind", ["extractive-qa", "masked-lm"])
def test_models_must_have_the_same_tokens(kind, tmp_path, tiny_models, toy_settings):
    """The rows that pad a model's embeddings do not count."""
    words = toy_vocabulary()
    other = make_tiny_bert(tmp_path / "other", [*words[:5], *reversed(words[5:])])
    padded = make_tiny_bert(tmp_path / "padded", [*words, "more"])
    AutoTokenizer.from_pretrained(tiny_models["toy"]).save_pretrained(padded)
    (tmp_path / "texts.txt").write_text("we saw a cat\n")

    def mistakes(teacher):
        data = {"path": str(tmp_path / "texts.txt")}
        changed = {
            "task": {"type": kind, "data": data, "max_length": 32},
            "teachers": {"first": {"model": str(teacher)}},
            "phases": [{"evaluate": {"split": "train"}}],
        }
        recipe = Recipe.model_validate({**toy_settings, **changed})
        return [*map(str, Models(recipe, on_gpu=False).mistakes())]

    [mistake] = mistakes(other)
    assert "teachers.first.model: its tokenizer" in mistake
    assert f"task.type={kind} all models must have the same vocabulary" in mistake
    assert mistakes(tiny_models["toy"]) == mistakes(padded) == []
