"""Each kind of task: cached and live teachers teach the same, scores are what another library
counts on the shipped student alone, and what is said of it is of its kind."""

import json
from pathlib import Path

import numpy as np
import pytest
import seqeval.metrics
import torch
import yaml
from kinds import json_lines
from runs import evaluation, losses, results, run_here
from scipy import stats
from sklearn.metrics import f1_score
from toys import recipe_of
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from ds_distill import predict
from ds_distill.cache.reader import CacheReader
from ds_distill.data.open_source import open_source
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.windows import question_windows, word_windows
from ds_distill.recipe.metrics.answers import word_f1
from ds_distill.recipe.tasks import TASKS

KINDS = ("token-classification", "character-spans", "extractive-qa", "multi-label", "regression")
MODELS = ("first", "second", "average", "live")


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return str(request.param)


@pytest.fixture(scope="module")
def settings(kind, materials):
    return recipe_of(kind, materials=materials)


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory):
    return run_here(settings, tmp_path_factory.mktemp("kind"))


def test_live_teachers_give_the_losses_of_cached_ones(run):
    cached, live = (losses(run, phase) for phase in ("average", "live"))
    assert len(cached) == len(live) > 10
    assert live == pytest.approx(cached, rel=1e-4)


SAID = {
    "token-classification": ("words", "entity_f1", ["entity F1"]),
    "character-spans": ("characters", "character_f1", ["character F1", "span F1", "read in"]),
    "extractive-qa": ("answers", "squad_f1", ["SQuAD F1", "exact match"]),
    "multi-label": ("labels", "micro_f1", ["micro F1"]),
    "regression": ("numbers", "pearson", ["Pearson", "MSE ↓", "undefined"]),
}
"""Kind -> what it is scored over, by what, and what the report calls that."""
OF_OTHERS = ("masked", "ccuracy", "most frequent", "eliab")
"""Words that make no sense of numbers."""


def test_what_is_recorded_and_said_is_of_the_kind(run, kind):
    over, metric, words = SAID[kind]
    record, whole = evaluation(run), results(run)
    assert (record["over"], record["metric"]) == (over, metric)
    assert {*MODELS} <= record["models"].keys()
    examples = {model["examples"] for model in record["models"].values()}
    assert examples == {len(rows(run, "test"))}, "not its windows"
    trained = [use["examples"] for use in whole["uses"] if use["split"] == "train"]
    assert max(trained) == len(rows(run, "train"))
    card = (run / "student" / "README.md").read_text()
    page, _, _ = (run / "report.html").read_text().partition("<h2>The recipe</h2>")
    assert [word for word in words if word not in page] == []
    said = [word for text in (page, card, whole["verdict"]) for word in OF_OTHERS if word in text]
    assert kind != "regression" or said == []
    if (run / "routing.json").is_file():
        routing = json.loads((run / "routing.json").read_text())
        assert (routing["over"], routing["metric"]) == (over, metric)


def rows(run, split):
    folder = Path(yaml.safe_load((run / "recipe.yaml").read_text())["task"]["data"]["path"])
    if (file := folder / f"{split}.jsonl").is_file():
        return json_lines(file)
    names, *lines = (line.split("\t") for line in (folder / f"{split}.tsv").read_text().split("\n"))
    return [dict(zip(names, line, strict=True)) for line in lines if line != [""]]


# ---------------------------------------------------------- the shipped student in transformers


def test_the_student_scores_the_same_in_transformers(run, kind, settings, tmp_path):
    record = evaluation(run)
    expected = record["models"][results(run)["student"]][record["metric"]]
    assert expected > 0.2, "it learnt something that can be compared"
    tokenizers = [
        load_tokenizer(teacher["model"], of_words=True) for teacher in settings["teachers"].values()
    ]
    task = TASKS[kind].model_validate(settings["task"])
    split = open_source(task, cache_folder=tmp_path).read("test")
    found = COUNTED[kind](run, split, tokenizers, task)
    assert found == pytest.approx(expected, abs=1e-5)


def of_entities(run, split, tokenizers, task):
    """In the windows that every model reads, each word where it has most around it."""
    model = AutoModelForTokenClassification.from_pretrained(run / "student")
    tokenizer = AutoTokenizer.from_pretrained(run / "student")
    truth = [row["tags"] for row in rows(run, "test")]
    predicted = [[] for _ in truth]
    windows = word_windows(split, tokenizers, task.max_length)
    assert len(windows) > len(truth)
    for window in windows:
        encoded = tokenizer(window["words"], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            best = model(**encoded).logits[0].argmax(dim=1).tolist()
        of_word = encoded.word_ids(0)
        for at, owned in enumerate(window["owned"]):
            tag = model.config.id2label[best[of_word.index(at)]]
            predicted[window["number"]] += [tag] if owned else []
    return float(seqeval.metrics.f1_score(truth, predicted))


def of_characters(run, split, tokenizers, task):
    model = AutoModelForTokenClassification.from_pretrained(run / "student")
    truth, seen = ([np.zeros(len(row["text_b"]), dtype=bool) for row in split] for _ in range(2))
    for marked, row in zip(truth, split, strict=True):
        for answer in row["answers"]:
            marked[answer["start"] : answer["start"] + len(answer["text"])] = True
    before = {}  # question -> words inside -> their last character
    windows = word_windows(split, tokenizers, task.max_length)
    assert len(windows) > len(split)
    for row in windows:
        encoded = tokenizers[0](
            row["question"], row["words"], is_split_into_words=True, return_tensors="pt"
        )
        parts, words = encoded.sequence_ids(0), encoded.word_ids(0)
        with torch.no_grad():
            inside = model(**encoded).logits[0].argmax(dim=1).tolist()
        ends = before.setdefault(row["number"], {})
        for at in np.flatnonzero(np.logical_and(row["counted"], row["owned"])):
            [token, *_] = (n for n, word in enumerate(words) if word == at and parts[n] == 1)
            if inside[token]:
                number, start, end = row["first"] + at, row["starts"][at], row["ends"][at]
                seen[row["number"]][ends.get(number - 1, start) : end] = True
                ends[number] = end
    return float(f1_score(np.concatenate(truth), np.concatenate(seen)))


def of_answers(run, split, tokenizers, task):
    """Every span of every window, one after the other."""
    model = AutoModelForQuestionAnswering.from_pretrained(run / "student")
    tokenizer = AutoTokenizer.from_pretrained(run / "student")
    best = {}
    for row in question_windows(split, tokenizer, task.max_length, task.overlap):
        encoded = tokenizer(
            row["text"], row["text_b"], return_offsets_mapping=True, return_tensors="pt"
        )
        offsets = encoded.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            found = model(**encoded)
        starts, ends = found.start_logits[0].tolist(), found.end_logits[0].tolist()
        inside = [at for at, part in enumerate(encoded.sequence_ids(0)) if part == 1]
        for i in inside:
            for j in (j for j in inside if i <= j < i + task.max_answer_length):
                answer = row["text_b"][offsets[i][0] : offsets[j][1]]
                span = starts[i] + ends[j], answer
                best[row["number"]] = max(best.get(row["number"], span), span)
    values = [
        max(word_f1(best[number][1], right["text"]) for right in row["answers"])
        for number, row in enumerate(split)
    ]
    return sum(values) / len(values)


def of_labels(run, split, tokenizers, task):
    model = AutoModelForSequenceClassification.from_pretrained(run / "student")
    assert model.config.problem_type == "multi_label_classification"
    encoded = tokenizers[0]([*split["text"]], padding=True, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**encoded).logits > 0
    names = list(model.config.id2label.values())
    truth = [[name in row["label"] for name in names] for row in rows(run, "test")]
    return float(f1_score(truth, predicted.numpy(), average="micro"))


def of_numbers(run, split, tokenizers, task):
    config = AutoModelForSequenceClassification.from_pretrained(run / "student").config
    assert (config.problem_type, config.num_labels) == ("regression", 1)
    test = rows(run, "test")
    labels = [float(row["label"]) for row in test]
    found = list(predict(run, [(row["text_a"], row["text_b"]) for row in test]))
    assert all(each.keys() == {"predicted"} for each in found)
    numbers = [each["predicted"] for each in found]
    theirs = pipeline("text-classification", model=str(run / "student"))(
        [{"text": row["text_a"], "text_pair": row["text_b"]} for row in test]
    )
    assert [each["score"] for each in theirs] == pytest.approx(numbers, abs=1e-5)
    own = evaluation(run)["models"][results(run)["student"]]
    assert own["spearman"] == pytest.approx(stats.spearmanr(numbers, labels).statistic, abs=1e-3)
    assert own["mse"] == pytest.approx(np.mean(np.square(np.subtract(numbers, labels))), rel=1e-4)
    [cache] = (run / "cache").iterdir()
    assert CacheReader(cache).read("first", np.arange(9)).logits.shape == (9, 1)
    return float(stats.pearsonr(numbers, labels).statistic)


COUNTED = {
    "token-classification": of_entities,
    "character-spans": of_characters,
    "extractive-qa": of_answers,
    "multi-label": of_labels,
    "regression": of_numbers,
}

CONTEXT = "the day and " * 18 + "tiger again"
"""Of several windows."""


def test_the_student_and_its_card_find_words_in_a_text(run, kind, capsys, monkeypatch):
    if kind in ("multi-label", "regression"):
        return
    text = CONTEXT if kind != "token-classification" else "we saw a tiger, and some soup"
    given = text if kind == "token-classification" else ("we saw", text)
    [found] = predict(run, [given])
    spans = found["candidates"][:1] if kind == "extractive-qa" else found["predicted"]
    words = {text[span["start"] : span["end"]] for span in spans}
    assert any("tiger" in word for word in words), words
    assert kind == "extractive-qa" or words == {span["text"] for span in spans}
    if kind == "token-classification":
        tag = pipeline("token-classification", str(run / "student"))
        assert {one["start"] for one in tag(text)} >= {span["start"] for span in spans}
        return
    card = (run / "student" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace("Who wrote it?", "we saw").replace('"Somebody wrote it. " * 1000', "text")
    monkeypatch.chdir(run / "student")
    exec(code, {"text": text})
    assert "tiger" in capsys.readouterr().out
