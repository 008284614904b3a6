"""The card that is shipped with a student, read back as the hub's own library reads it."""

import html
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from texts import check_text

from ds_distill.recipe.schema import Recipe
from ds_distill.reporting.model_card import model_card

LABELS = ["good", "bad"]
FIGURES = {
    "role": "student",
    "parameters": 0,
    "to_baseline": {"difference": 0.25, "interval": [0.2, 0.3]},
    "examples": 500,
    "accuracy": 0.71999,
    "macro_f1": 0.70001,
    "ece": 0.1234,
}
ENVIRONMENT = {"ds_distill": "0.1", "packages": {"torch": "2.13", "triton": None}}


PHASES = [{"distil": {"losses": {"kl": {}}}}, {"evaluate": {"split": "test"}}]


def make_results(splits, labels, metric="accuracy", **model):
    figures = {**FIGURES, "per_class": dict.fromkeys(labels, 0.5), **model}
    models = {"student": figures, "bert": {**figures, "role": "teacher"}}
    rule = {"answer": "good", "rule": "the most frequent class", "split": "train"}
    over = model.get("over", "masked tokens" if "tokens" in model else "classes")
    settings = {"leave_out": ["bad|one"]} if metric == "micro_recall" else {}
    judged = {"over": over, "metric": metric, "metric_settings": settings, "comparisons": []}
    judged["baseline"] = {**figures, **rule}
    evaluations = [
        {"kind": "evaluate", "task": "task", "split": split, "models": models, **judged}
        for split in splits
    ]
    return {
        "student": "student",
        "task": "task",
        "phases": [{"kind": "distil"}, *evaluations],
        "verdict": "Accuracy 72.0% of 500 examples.",
        "environment": ENVIRONMENT,
    }


def make_recipe(**changes):
    data = {
        "name": "a-run",
        "task": {"data": {"path": "someone/data-set", "config": "emotion"}, "max_length": 48},
        "teachers": {"bert": {"model": "google-bert/bert-large-uncased"}},
        "student": {"model": "distilbert-base-uncased", "layers": [0, 2]},
        "phases": PHASES,
    }
    return Recipe.model_validate({**data, **changes})


def card_of(recipe, results=None):
    """Metadata and text."""
    content = model_card(recipe, results or make_results(["test"], LABELS))
    card = ModelCard(content)
    assert card.data.to_dict() == yaml.safe_load(content.split("---\n")[1]), "nothing is lost"
    return card.data.to_dict(), card.text


def left_out(results, task, teacher):
    why = {teacher: "is best at no class: nearest on a|b"}
    results["phases"].insert(0, {"kind": "expertise", "task": task, "left_out": why})


def test_a_whole_card():
    results = make_results(["test"], LABELS, metric="micro_recall", micro_recall=0.654321)
    left_out(results, "task", "kiwi")
    left_out(results, "another", "emu")
    results["phases"][2]["trained"] = [{"output": "student", "pairs": True}]
    content = model_card(make_recipe(), results)
    check_text(Path(__file__).with_name("model_card.txt"), content)
    [result, *_] = ModelCard(content).data.eval_results
    assert (result.dataset_split, result.metric_value) == ("test", 0.6543)
    # What a teacher has seen elsewhere is not known; of one that was trained here it is.
    results["phases"][2]["trained"] = [{"output": "bert", "pairs": True}]
    other = model_card(make_recipe(), results)
    assert "Whether bert had seen it is not known" in content and "not known" not in other
    assert "text_pair" in content and "text_pair" not in other, "of the student's own data"


def of(path, **more):
    return {"data": {"path": path, **more}, "max_length": 48}


HARD = {"path": "judges/hard", "config": "v2", "split": "challenge"}
MORE = [{"path": "someone/data-set"}, {"path": "others/more", "config": "small"}]
TASKS = {
    # All hub data are named, and figures are of the split's own.
    "several": (of("someone/data-set", config="emotion", splits={"train": MORE, "test": HARD}), {}),
    "of two": (of("a/b", splits={"test": [{"path": "judges/hard"}, {"path": "others/more"}]}), {}),
    "names of splits": (of("a/b", splits={"test": "test_matched", "train": "train"}), {}),
    "of the data folder": (of("data:set"), {}),
    "masked-lm": (
        {"type": "masked-lm", **of("docstrings:torch")},
        {"tokens": 1234, "loss": 2.1, "perplexity": 8.1234567},
    ),
    # Its metric has a name on the hub that macro F1 has too.
    "labels": (of("a/b"), {"metric": "micro_f1", "micro_f1": 0.6, "over": "labels"}),
}


def test_cards_of_other_tasks():
    text = ""
    for name, (task, model) in TASKS.items():
        card = model_card(make_recipe(task=task), make_results(["test"], LABELS, **model))
        text += f"==== {name}\n{card}"
        metadata = ModelCard(card).data.to_dict()
        assert metadata == yaml.safe_load(card.split("---\n")[1]), "nothing is lost"
    check_text(Path(__file__).with_name("other_model_cards.txt"), text)


def test_a_student_judged_on_other_tasks_has_their_figures():
    """As one of all types of entities, which is judged by type. Its data are those of all parts."""
    splits = {"train": [{"path": "data:genes"}, {"path": "data:drugs"}]}
    tasks = {
        "drugs": {"data": {"path": "data:drugs"}, "max_length": 48},
        "all": {"data": {"path": "data:genes", "splits": splits}, "max_length": 48},
    }
    distil = {"distil": {"task": "all", "losses": {"kl": {}}}}
    recipe = make_recipe(
        task=None, tasks=tasks, phases=[distil, {"evaluate": {"task": "drugs", "split": "test"}}]
    )
    results = {**make_results(["test"], LABELS), "task": "all"}
    results["phases"][0]["task"], results["phases"][1]["task"] = "all", "drugs"
    text = model_card(recipe, results)
    assert "evaluated on other tasks than its own: drugs" in text and "evaluated only" not in text
    assert "## Accuracy on test, task drugs" in text and "72.0%" in text
    assert "data: `genes`, `drugs`." in text
    assert "model-index" not in text, "the hub's figures are of a model's own task"


# --------------------------------------------------------------------- what judged, and what not

CHOOSES = [{"fine-tune": {"models": "bert", "split": "train"}}]
FITS = [{"expertise": {"split": "extra"}}]


@pytest.mark.parametrize(
    ("phases", "splits", "judged"),
    [
        (CHOOSES, ["validation"], None),
        (CHOOSES, ["train"], None),
        (CHOOSES, [], None),
        (FITS, ["extra"], None),
        (CHOOSES, ["test", "validation"], "test"),
        (CHOOSES, ["test", "test-2"], "test-2"),
        (FITS, ["validation"], None),  # the distillation's epochs are chosen by it
    ],
)
def test_no_figure_is_of_what_made_the_student(phases, splits, judged):
    recipe = make_recipe(phases=[*phases, *PHASES])
    metadata, text = card_of(recipe, make_results(splits, LABELS))
    if judged is None:
        assert not {"model-index", "metrics", "model_name"} & metadata.keys()
        assert "72.0" not in text and "0.720" not in text
        only = f"It was evaluated only on data that was used to make it ({', '.join(splits)})"
        assert (only if splits else "No evaluate phase came after it") in text
    else:
        [result] = metadata["model-index"][0]["results"]
        assert result["dataset"]["split"] == judged and f"## Accuracy on {judged}\n" in text


# --------------------------------------------------------------------- what is not on the hub


def test_local_folders_are_no_names_of_the_hub(tmp_path, tiny_models, monkeypatch):
    """Not even those that look like one; nor does a card tell where they lie."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_models["toy"], tmp_path / "org" / "model")
    (tmp_path / "org" / "data").mkdir()
    for path in ("org/model", str(tmp_path / "org" / "model")):
        data = {"path": "org/data"}
        recipe = make_recipe(
            student={"model": path}, teachers={"t": {"model": path}}, task={"data": data}
        )
        metadata, text = card_of(recipe)
        assert not {"base_model", "datasets", "license", "language"} & metadata.keys()
        assert "the local folder `model`" in text and str(tmp_path) not in text
        [result] = metadata["model-index"][0]["results"]
        assert (result["dataset"]["name"], result["dataset"]["type"]) == ("data", "local")


def test_licence_and_language_are_those_of_its_start(tmp_path, tiny_models):
    folder = tmp_path / "models" / "base"
    shutil.copytree(tiny_models["toy"], folder)

    def start(card):
        (folder / "README.md").write_text(card)
        recipe = make_recipe(student={"model": "org/base"}, models_folder=str(tmp_path / "models"))
        metadata, _ = card_of(recipe)
        assert metadata["base_model"] == "org/base", "a copy of a hub model is still that"
        return {key: metadata.get(key) for key in ("license", "license_name", "language", "tags")}

    own = ["knowledge-distillation", "ds-distill"]
    none = {"license": None, "license_name": None, "language": None, "tags": own}
    assert start("---\nlicense: apache-2.0\nlanguage: [en, de]\ntags: [x]\n---\n# Base\n") == {
        **none,
        "license": "apache-2.0",
        "language": ["en", "de"],
    }
    other = start("---\nlicense: other\nlicense_name: theirs\nlanguage: en\n---\n")
    assert other == {**none, "license": "other", "license_name": "theirs", "language": "en"}
    for odd in ("license: [", "- a", "no: 1", "license: {a: 1}", "language: no  # false, in YAML"):
        assert start(f"---\n{odd}\n---\n") == none
    assert start("# Base\n") == none
    (folder / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    recipe = make_recipe(student={"model": str(folder)})
    assert "license" not in card_of(recipe)[0]


# ------------------------------------------------------------------------------ odd names

ODD = ["a|b", "<b>", "one\ntwo", "&amp;", "naïve", "</script><img src=x onerror=alert(1)>"]


def test_what_a_stranger_calls_a_label_is_no_html_and_keeps_the_table_whole():
    results = make_results(["test"], ODD)
    results["verdict"] = f"Best at {ODD[-1]}: 74.1% \u202e"
    text = model_card(make_recipe(), results)
    assert r"Best at &lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;: 74.1% \u202e" in text
    assert "<" not in text.partition("## How it was made")[2]
    table = text[text.index("### accuracy by class") :]
    _, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rows]
    assert {len(row) for row in cells} == {3}
    shown = [html.unescape(row[0].strip().replace(r"\|", "|")) for row in cells]
    assert shown == [" ".join(label.split()) for label in ODD]
