"""What `check` says of the classes of a task's examples."""

import datasets
import pytest
import transformers
from kinds import write
from runs import command_line, written

from ds_distill.check.data import class_counts


def test_a_split_without_labels_has_no_counts_whatever_the_number_of_its_texts():
    for texts in (5, 6):
        split = datasets.Dataset.from_dict({"label": [-1] * texts})
        assert class_counts(split, ["a", "b", "c"]) is None


@pytest.fixture
def check(tmp_path, tiny_models, monkeypatch):
    """Runs `check` on splits: lists of (text, label), or rows. more: keys of the recipe."""
    monkeypatch.chdir(tmp_path)

    def run(splits, more=None, **task):
        data = tmp_path / "data"
        for split, rows in splits.items():
            given = [
                row if isinstance(row, dict) else {"text": row[0], "label": row[1]} for row in rows
            ]
            write(data / f"{split}.jsonl", given)
        recipe = {
            "task": {"data": {"path": "data"}, "max_length": 32, **task},
            "student": {"model": str(tiny_models["toy"])},
            "phases": [{"fine-tune": {"models": "student"}}, {"evaluate": {"split": "test"}}],
            **(more or {}),
        }
        return command_line("check", written(recipe, tmp_path)).output

    return run


def rows(of, count):
    return [(f"{of} text number {number}", of) for number in range(count)]


def test_classes_are_counted_and_what_looks_wrong_is_named(check):
    """One `Joy` and one `Anger` made a student of five classes, and nobody said so."""
    train = [*rows("joy", 30), ("so glad", "Joy"), *rows("anger", 30), ("so cross", "Anger")]
    said = check(
        {
            "train": [*train, ("it rains", "sad"), ("it rains", "joy"), *rows("sad", 8)],
            "validation": [*rows("anger", 3), ("it rains", "anger"), ("well", "joy")],
            "test": [("good", "joy"), ("bad", "anger"), ("poor", "sad")],
        }
    )
    assert (
        "task, split train, examples of each class: joy 31, anger 30, sad 9, Anger 1, Joy 1."
        in said
    )
    assert "task, split test, examples of each class: anger 1, joy 1, sad 1, Anger 0" in said
    assert "differ in case or blanks alone: 'Anger' (1) and 'anger' (35); 'Joy' (1) and" in said
    assert "split 'validation' has no example of 3 of the classes: Anger, Joy, sad." in said
    assert "1 text(s) stand in the data more than once, with other labels (3 examples), " in said
    assert "such as 'it rains'. One of the labels" in said


def test_sets_of_labels_are_compared_as_sets(check):
    train = [("wet", ["rain", "fog"]), ("dry", []), ("wet", ["fog"]), ("wet", ["rain", "fog"])]
    said = check(
        {"train": train, "validation": train[:2], "test": [("cold", ["snow"])]},
        **{"type": "multi-label", "labels": ["rain", "fog", "snow"]},
    )
    assert "task, split train, examples of each class: fog 3, rain 2, snow 0." in said
    assert "split 'train' has no example of 1 of the classes: snow." in said
    assert "(4 examples), such as 'wet'. One" in said


def test_what_is_right_is_counted_alone(check):
    splits = {
        split: [(f"{split} {text}", label) for text, label in [*rows("joy", 3), *rows("sad", 3)]]
        for split in ("train", "validation", "test")
    }
    said = check(splits)
    assert "Note" not in said and "split test, examples of each class: joy 3, sad 3." in said


def test_a_label_of_its_own_for_each_text_is_named(check):
    """300 labels for 300 texts, as of a column of ids, were a task of 300 classes."""
    train = [(f"text {number}", f"id-{number}") for number in range(300)]
    said = check({"train": train, "validation": train[:1], "test": train[1:2]})
    assert "298 of the 300 classes have one example or none" in said


def test_classes_without_an_example_are_no_news_where_none_is_labelled(check, tiny_models):
    """Nor where labels are places in a text: their classes are those of words."""
    asked = [
        {"question": "Who?", "context": f"Bo {verb}.", "answers": [{"text": "Bo", "start": 0}]}
        for verb in ("sat", "ran", "ate")
    ]
    given = {"train": asked[:1], "validation": asked[1:2], "test": asked[2:]}
    assert "have one example or none" not in check(given, type="character-spans")

    student = transformers.BertConfig.from_pretrained(tiny_models["toy"], num_labels=3)
    transformers.BertForSequenceClassification(student).save_pretrained("teacher")
    transformers.AutoTokenizer.from_pretrained(tiny_models["toy"]).save_pretrained("teacher")
    last = {"keep": "last"}
    recipe = {
        "teachers": {"given": {"model": "teacher"}},
        "phases": [
            {"distil": {"split": "train", "teachers": "live", "losses": {"kl": {}}, **last}}
        ],
    }
    texts = {split: [{"text": f"it rains in {split}"}] for split in given}
    said = check(texts, recipe, labels=["joy", "sad", "mad"])
    assert "no mistakes" in said and "have one example or none" not in said


def test_spans_that_have_more_than_they_say_are_counted(check):
    spans = [{"start": 0, "end": 2, "type": "gene"}, {"start": 4, "end": 8, "type": "gene"}]
    split = [
        {"text": "a cat sat", "spans": []},
        {"text": "cat, dogs", "spans": spans},
        {"text": "it, dogs", "spans": [spans[0], {"start": 4, "end": 8, "type": "gene"}]},
    ]
    said = check(
        {"train": split, "validation": split, "test": split[:1]}, type="token-classification"
    )
    for split in ("train", "validation"):
        [note] = [n for n in said.splitlines() if "inside of a word" in n and repr(split) in n]
        assert "2 spans in 1 of the 3 texts" in note and f"{split}.jsonl:2" in note
    assert said.count("inside of a word") == 2
