"""Token classification with a teacher whose tags of words are in a file."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import seqeval.metrics
import torch
from kinds import json_lines, write
from runs import digests, evaluation, run_here
from safetensors.numpy import load_file
from toys import TOY_FILLERS, TOY_TAGS, recipe_of, write_toy_words
from unit.test_predictions import opened_words, words_task

from ds_distill import load_recipe
from ds_distill.cache.reader import CacheReader
from ds_distill.check.check import check_all
from ds_distill.data import predictions
from ds_distill.data import spans as data_spans
from ds_distill.data.batches import Units
from ds_distill.data.open_source import open_source
from ds_distill.data.predictions import open_predictions
from ds_distill.data.spans import word_keys
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.windows import word_windows
from ds_distill.errors import UserError
from ds_distill.files import read_json
from ds_distill.models.file_teacher import FileTeacher


def rows_of(settings, split):
    file = Path(settings["task"]["data"]["path"]) / f"{split}.jsonl"
    return json_lines(file)


@pytest.fixture(scope="module")
def settings(tiny_models, tmp_path_factory):
    data = write_toy_words(tmp_path_factory.mktemp("words") / "data")
    return recipe_of("said", data=data, toy=tiny_models["toy"])


def said_in_file(settings, folder, lines):
    file = write(folder / "said.jsonl", lines)
    settings["teachers"]["said"] = {"predictions": str(file)}
    settings["phases"][0]["fine-tune"]["models"] = ["other"]


def test_a_file_of_a_models_logits_teaches_what_the_model_does(settings, tmp_path):
    run = run_here(settings, tmp_path / "model")
    reader, lines = CacheReader(run / "cache" / "01-cache"), {}
    for split in ("transfer", "validation", "test"):
        lists = [row["tokens"] for row in rows_of(settings, split)]
        indices = reader.indices(torch.from_numpy(word_keys(lists)))
        logits = reader.read("said", indices).logits
        parts = logits.split([len(words) for words in lists])
        for words, part in zip(lists, parts, strict=True):
            lines[json.dumps(words)] = {"tokens": words, "logits": part.tolist()}
    made = copy.deepcopy(settings)
    said_in_file(made, tmp_path, [lines[key] for key in sorted(lines)])
    other = run_here(made, tmp_path / "file")
    ours, theirs = digests(run), digests(other)
    models = [name for name in ours if "average" in name or "expertise" in name]
    assert len([name for name in models if name.startswith("models/")]) == 2
    assert [ours[name] for name in models] == [theirs[name] for name in models]
    assert evaluation(run)["comparisons"] == evaluation(other)["comparisons"]
    assert read_json(run / "routing.json") == read_json(other / "routing.json")


def test_long_texts_and_gaps(settings, tmp_path):
    """What is said of a text's words is said of the windows in which it is read; and a teacher is
    judged on the texts that its file has, counted again by seqeval."""
    made = copy.deepcopy(settings)
    made["task"]["max_length"] = 8
    lines, truth, said = [], [], []
    for split, lacks in (("transfer", 11), ("validation", 9), ("test", 7)):
        for number, row in enumerate(rows_of(settings, split)):
            tags = row.get("tags") or ["O"] * len(row["tokens"])
            pairs = zip(row["tokens"], tags, strict=True)
            tags = ["O" if word == "cat" else tag for word, tag in pairs]
            if number >= lacks:
                lines.append({"tokens": row["tokens"], "predicted": tags, "confidence": 0.9})
                if split == "test":
                    said.append(tags)
                    truth.append(row["tags"])
    said_in_file(made, tmp_path, lines)
    del made["phases"][2]
    made["phases"][2]["distil"]["routing"] = "average"
    run = run_here(made, tmp_path)
    notes = [note for note in check_all(load_recipe(tmp_path / "recipe.yaml")) if "said" in note]
    assert ["has nothing of" in note for note in notes] == [True] * 3
    cached = CacheReader(run / "cache" / "01-cache")
    assert cached.manifest.teachers["said"].not_given > 27, "windows"
    record = evaluation(run)
    of_file = record["models"]["said"]
    assert (of_file["examples"], of_file["not_given"]) == (73, 7)
    assert of_file["entity_f1"] == pytest.approx(seqeval.metrics.f1_score(truth, said))
    assert 0 < of_file["entity_f1"] < 1
    [scores] = [of for of in read_json(run / "teachers.json") if of["teacher"] == "said"]
    assert scores["examples"] == 71
    assert any(row["other"] == "said" for row in record["comparisons"])
    saved = load_file(run / "predictions" / "03-evaluate.safetensors")
    assert not [name for name in saved if name.startswith("said/")]


def test_windows_say_what_their_text_does(tiny_models, tmp_path):
    """Of three texts the file has two. The third begins as the second does, so that its first
    window is one of the second's, and it is not known for that."""
    draw = np.random.default_rng(0)
    known = TOY_FILLERS.split()
    lists = [[str(word) for word in draw.choice(known, size)] for size in (5, 45)]
    lists.append([*lists[1][:12], *reversed(lists[1][:20])])
    task = words_task(tmp_path, [{"tokens": words, "tags": ["O"] * len(words)} for words in lists])
    given = [draw.normal(size=(len(words), len(TOY_TAGS))).round(3) for words in lists[:2]]
    known = zip(lists[:2], given, strict=True)
    lines = [{"tokens": words, "logits": logits.tolist()} for words, logits in known]
    source = open_source(task, tmp_path / "cache")
    found = open_predictions(write(tmp_path / "said.jsonl", lines), source)
    tokenizer = load_tokenizer(str(tiny_models["toy"]), of_words=True)
    split = word_windows(source.read("train"), [tokenizer], 10)
    words = Units.of(split)
    in_windows = found.with_windows([split])
    keys = np.stack([np.asarray(split[name][:]) for name in ("key_hi", "key_lo")], axis=1)
    there = in_windows.find(keys) >= 0
    assert there[words.number < 2].all() and 0 < there[words.number == 2].sum() < 4
    assert words.of_whole_examples(there).tolist() == (words.number < 2).tolist()
    begins, of_row = np.asarray(split["first"][:]), words.of_rows.numpy()
    signals = FileTeacher(in_windows)(torch.from_numpy(keys[of_row]), torch.from_numpy(of_row))
    assert signals.reported.tolist() == there[of_row].tolist()
    for window in np.flatnonzero(words.number < 2):
        rows = words.rows_of(np.array([window]))
        begin = begins[window]
        wanted = given[words.number[window]][begin : begin + len(rows)]
        assert np.allclose(signals.logits[rows].numpy(), wanted, atol=1e-6)
    assert (signals.logits[~signals.reported] == 0).all()


def logits_of(found, words):
    [at] = found.find(word_keys([words]))
    return None if at < 0 else found.logits[found.first[at] :][: len(words)]


def test_each_form_is_read(tmp_path):
    sure, rest = math.log(0.8), math.log(0.05)
    tags = {"tokens": ["a", "cat"], "predicted": ["O", "B-animal"], "confidence": [1, 0.8]}
    shares = {"tokens": ["rice"], "probabilities": [{"B-food": 0.8, "O": 0.2}]}
    found = opened_words(tmp_path, [tags])
    assert logits_of(found, ["a", "cat"])[1] == pytest.approx([rest, sure, rest, rest, rest])
    assert logits_of(found, ["a", "cat"])[0].argmax() == 0 and logits_of(found, ["rice"]) is None
    found = opened_words(tmp_path, [shares])
    assert logits_of(found, ["rice"])[0, 3] == pytest.approx(sure)
    logits = [[0.5, 1.0, -2.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0, 2.0]]
    found = opened_words(tmp_path, [{"tokens": ["a", "cat"], "logits": logits}])
    assert logits_of(found, ["a", "cat"]).tolist() == logits
    # By ids, in the data a number or a name.
    by_id = [{"key": "two", "predicted": ["B-food"]}, {"key": "1", "predicted": None}]
    found = opened_words(tmp_path, by_id)
    assert logits_of(found, ["rice"])[0].argmax() == 3 and len(found) == 1
    spans = [{"start": 2, "end": 5, "type": "animal"}]
    rows = [{"text": "a cat", "spans": spans}, {"text": "rice", "spans": []}]
    task, file = words_task(tmp_path / "texts", rows), tmp_path / "texts" / "said.jsonl"
    lines = [
        {"text": "a cat", "predicted": spans, "confidence": 0.8},
        {"text": "rice", "predicted": ["B-food"]},
    ]
    found = open_predictions(write(file, lines), open_source(task, tmp_path / "cache"))
    of_cat = logits_of(found, ["a", "cat"])[1].tolist()
    assert of_cat == pytest.approx([rest, sure, rest, rest, rest])
    assert logits_of(found, ["rice"])[0].argmax() == 3


def test_spans_that_an_earlier_version_took_are_not_taken(tmp_path, monkeypatch):
    spans = [{"start": 0, "end": 1, "type": "animal", "text": "cat"}]
    task, file = words_task(tmp_path, [{"text": "a cat", "spans": []}]), tmp_path / "said.jsonl"
    source = open_source(task, tmp_path / "cache")
    write(file, [{"text": "a cat", "predicted": spans}])
    with monkeypatch.context() as before:
        before.setattr(predictions, "VERSION", 3)
        before.setattr(data_spans, "_check_own_text", lambda *given: None)
        assert len(open_predictions(file, source)) == 1
    with pytest.raises(UserError, match=r"1: 'predicted': span 0 is 'cat', and .* are 'a'"):
        open_predictions(file, source)
