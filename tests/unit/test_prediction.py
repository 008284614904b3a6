"""Predicting with a student: as transformers' pipeline does, for texts and for files."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import TOY_FILLERS, make_tiny_bert, toy_vocabulary
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)
from typer.testing import CliRunner

from ds_distill.cli.commands import app
from ds_distill.errors import UserError
from ds_distill.predictors.file import predict_file
from ds_distill.predictors.prediction import load_predictor, predict
from ds_distill.recipe.tasks import SingleLabel
from ds_distill.run.publish import keep_settings

LABELS = ["animal", "food", "weather"]
DRAW = random.Random(0)
TEXTS = [" ".join(DRAW.choices(TOY_FILLERS.split(), k=DRAW.randint(1, 30))) for _ in range(40)]
LENGTH = 16
"""Tokens; half of the texts are longer."""


def save(folder: Path, **config: Any) -> Path:
    make_tiny_bert(folder, toy_vocabulary())
    settings = {**BertConfig.from_pretrained(folder).to_dict(), "initializer_range": 0.9, **config}
    settings |= {"id2label": dict(enumerate(LABELS)), "label2id": None}
    with torch.random.fork_rng():  # whichever tests ran before, it says more than one thing
        torch.manual_seed(1)
        BertForSequenceClassification(BertConfig.from_dict(settings)).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = LENGTH
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("many"), problem_type="multi_label_classification")


def from_file(model: Path, file: Path, **options: Any) -> tuple[list[Any], list[str]]:
    output, sentences = io.StringIO(), list[str]()
    predict_file(model, file, output, progress=sentences.append, **options)
    return list(map(json.loads, output.getvalue().splitlines())), sentences


# ------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_probabilities_are_those_of_transformers_pipeline(model: Path, batch_size: int) -> None:
    theirs = pipeline("text-classification", model=str(model), top_k=None)(TEXTS, truncation=True)
    ours = list(predict(model, TEXTS, batch_size=batch_size))
    assert len({found["predicted"] for found in ours}) > 1, "the toy says more than one thing"
    for one, other in zip(ours, theirs, strict=True):
        expected = {found["label"]: found["score"] for found in other}
        assert one["probabilities"] == pytest.approx(expected, abs=1e-5)
        assert one["predicted"] == max(expected, key=expected.__getitem__)


def test_any_number_of_labels(many: Path) -> None:
    theirs = pipeline("text-classification", model=str(many), top_k=None)(TEXTS, truncation=True)
    ours = list(predict(many, TEXTS))
    assert len({len(found["predicted"]) for found in ours}) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert one["probabilities"] == pytest.approx(
            {found["label"]: found["score"] for found in other}, abs=1e-5
        )
        assert one["predicted"] == [name for name in LABELS if one["probabilities"][name] > 0.5]


def test_pairs_are_not_texts(model: Path) -> None:
    pairs = [(text, TEXTS[0]) for text in TEXTS[:5]]
    theirs = pipeline("text-classification", model=str(model), top_k=None)(
        [{"text": first, "text_pair": second} for first, second in pairs], truncation=True
    )
    for one, other in zip(predict(model, pairs), theirs, strict=True):
        expected = {found["label"]: found["score"] for found in other}
        assert one["probabilities"] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match="some texts are pairs"):
        list(predict(model, [*pairs, "a text"]))


@pytest.mark.parametrize("setting", [{"padding_side": "left"}, {"pad_token": None}])
def test_texts_are_padded_as_in_training(setting: dict[str, Any], tmp_path: Path) -> None:
    """On the right, and with id 0 where the tokenizer has no token for it. A student of a tokenizer
    that pads on the left was evaluated well, and answered otherwise beside longer texts."""
    folder = save(tmp_path)
    expected = [predict_one(folder, text) for text in TEXTS]
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **setting}))
    for one, alone in zip(predict(folder, TEXTS), expected, strict=True):
        assert one["probabilities"] == pytest.approx(alone["probabilities"], abs=1e-5)


def predict_one(model: Path, text: str) -> dict[str, Any]:
    [found] = predict(model, [text])
    return found


def test_a_model_of_one_output_predicts_a_number(tmp_path: Path) -> None:
    """As many cross-encoders are published, without a `problem_type`."""
    folder = save(tmp_path)
    config = BertConfig.from_pretrained(folder, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    found = list(predict(folder, TEXTS[:5]))
    assert all(set(one) == {"predicted"} for one in found)
    assert len({one["predicted"] for one in found}) == 5


def test_texts_that_are_cut_are_counted(model: Path) -> None:
    classifier = load_predictor(model)
    classifier.predictions(TEXTS, 8)
    longer = sum(
        len(AutoTokenizer.from_pretrained(model)(text).input_ids) > LENGTH for text in TEXTS
    )
    assert 0 < classifier.cut == longer < len(TEXTS)
    tokenizer, first = AutoTokenizer.from_pretrained(model), TEXTS[0][:12]
    pairs = [(first, text[:30]) for text in TEXTS]
    longer += sum(len(tokenizer(*pair).input_ids) > LENGTH for pair in pairs)
    before = classifier.cut
    classifier.predictions(pairs, 8)
    assert before < classifier.cut == longer < before + len(pairs)
    assert list(predict(model, [])) == []


# ------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    "ending", ["jsonl", "csv", "tsv", "parquet", "txt", "jsonl.gz", "stdin", "lines"]
)
def test_a_file_of_each_kind(
    model: Path, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"texts.{ending}"
    rows = [{"text": text, "id": str(number)} for number, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if ending in ("csv", "tsv"):
        pd.DataFrame(rows).to_csv(file, index=False, sep="\t" if ending == "tsv" else ",")
    elif ending == "parquet":
        pd.DataFrame(rows).to_parquet(file)
    elif ending == "jsonl.gz":
        file.write_bytes(gzip.compress(lines.encode()))
    else:
        plain = "\n\n".join(TEXTS)
        content = plain if ending in ("txt", "lines") else lines
        file.write_text(content)
        if ending in ("stdin", "lines"):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
            file = Path("-")
    found, sentences = from_file(model, file)
    for row, expected, text in zip(found, predict(model, TEXTS), TEXTS, strict=True):
        assert row["text"] == text and row["predicted"] == expected["predicted"]
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-6)
    if ending not in ("txt", "lines"):
        assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert sentences[-1].startswith("40 texts in ") and "were cut at 16 tokens" in sentences[-1]


def test_a_label_that_is_there_stays(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"text_a": TEXTS[0], "text_b": TEXTS[1], "label": "food"}) + "\n")
    [row], _ = from_file(model, file)
    [expected] = predict(model, [(TEXTS[0], TEXTS[1])])
    assert row["label"] == "food" and row["predicted"] == expected["predicted"]
    [alone], _ = from_file(model, file, text="text_b")
    [expected] = predict(model, [TEXTS[1]])
    assert alone["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-6)


def test_what_a_file_has_beside_texts_is_json_and_what_is_replaced_is_told(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "texts.parquet"
    rows = {"text": TEXTS[:2], "x": [0.5, float("nan")], "predicted": ["food", "food"]}
    pd.DataFrame(rows).to_parquet(file)
    found, sentences = from_file(model, file)
    assert [row["x"] for row in found] == [0.5, None]
    assert [row["predicted"] for row in found] == [
        one["predicted"] for one in predict(model, TEXTS[:2])
    ]
    assert sentences[0] == f"Note: what {file} has as predicted is replaced"
    found, sentences = from_file(model, write_lines(tmp_path / "plain.txt"))
    assert len(sentences) == 1, "nothing to note"


def write_lines(file: Path) -> Path:
    file.write_text("\n".join(TEXTS[:2]) + "\n")
    return file


def test_a_file_is_not_replaced_by_its_predictions(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "mine"}\n')
    done = CliRunner().invoke(app, ["predict", "somewhere", str(file), "--output", str(file)])
    assert "is the file of the texts. Name another one." in str(done.exception)
    assert file.read_text() == '{"text": "mine"}\n'


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"text": "body"}, {"body": TEXTS[0], "text": "no text of the run's"}),
        ({"text": "one", "text_b": "two"}, {"one": TEXTS[0], "two": TEXTS[1], "text": "other"}),
        ({"text": "body"}, {"text": TEXTS[0]}),
    ],
)
def test_the_runs_own_files_have_the_columns_of_its_recipe(
    tmp_path: Path, columns: dict[str, str], row: dict[str, str]
) -> None:
    """Others those that are read by default."""
    folder = save(tmp_path / "student")
    keep_settings(folder, SingleLabel(data={"path": ".", "columns": columns}, max_length=LENGTH))
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps(row) + "\n")
    [found], _ = from_file(folder, file)
    texts = [text for text in row.values() if text in TEXTS]
    [expected] = predict(folder, [(texts[0], texts[1]) if len(texts) > 1 else texts[0]])
    assert found["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-6)


@pytest.mark.parametrize(
    "damage", [3, {}, {"a": 3}, {"a": {"columns": "text"}}, {"a": {"columns": [["text"], [3], []]}}]
)
def test_settings_that_are_none_are_left_out(tmp_path: Path, damage: Any) -> None:
    folder = save(tmp_path / "student", task_specific_params=damage)
    assert {len(names) for names in load_predictor(folder).columns} == {1, 2}
    assert load_predictor(folder).columns[-2:] == (("text",), ("text_a", "text_b"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"texts": "a"}\n', "no column 'text'; it has: texts.* Did you mean `texts`"),
        ('{"text": "a"}\n{"text": 3}\n', ":2: 'text' must be a text, got the number 3"),
        ('{"text": "a"}\n{"id": 3}\n', ":2: no 'text'; it has 'id'. Every row needs it"),
        ('{"text": "a"}\nb\n', ":2: not readable as JSON"),
        ("", "is empty"),
    ],
)
def test_rows_that_cannot_be_read(model: Path, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        from_file(model, file)


def test_what_is_no_classifier_is_refused(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_predictor(tmp_path / "nothing")
    with pytest.raises(UserError, match="was not trained on this task"):
        load_predictor(tiny_models["toy"])
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(UserError, match="no student yet"):
        load_predictor(tmp_path)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Path:
    """A model for questions, in windows of 32 tokens. Its scores are of like size."""
    folder = tmp_path_factory.mktemp("answers")
    torch.manual_seed(0)
    model = AutoModelForQuestionAnswering.from_pretrained(tiny_models["toy"])
    torch.nn.init.normal_(model.qa_outputs.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_models["toy"], model_max_length=32).save_pretrained(folder)
    return folder


def test_answers_are_the_best_spans_of_the_context(answers: Path) -> None:
    """Of all spans, one after the other, where a context fits a window."""
    model = AutoModelForQuestionAnswering.from_pretrained(answers)
    tokenizer = AutoTokenizer.from_pretrained(answers)
    questions = ["we saw", "they had soup"]
    long = " ".join(TEXTS)
    pairs = [(questions[number % 2], text) for number, text in enumerate(TEXTS)]
    pairs.append((questions[0], long))
    for pair, found in zip(pairs, predict(answers, pairs, batch_size=7), strict=True):
        question, context = pair
        scores = [answer["score"] for answer in found["candidates"]]
        assert scores == sorted(scores, reverse=True) and 1 <= len(scores) <= 5
        assert found["predicted"] == found["candidates"][0]["text"]
        for answer in found["candidates"]:
            assert context[answer["start"] : answer["end"]] == answer["text"]
        encoded = tokenizer(question, context, return_tensors="pt")
        if encoded.input_ids.shape[1] > 32:
            continue
        with torch.no_grad():
            logits = model(**encoded)
        inside = [at for at, part in enumerate(encoded.sequence_ids(0)) if part == 1]
        sums = [
            float(logits.start_logits[0, i] + logits.end_logits[0, j])
            for i in inside
            for j in inside
            if i <= j
        ]
        assert scores == pytest.approx(sorted(sums, reverse=True)[:5], abs=1e-4)
    [nothing] = predict(answers, [("we saw", " ")])
    assert nothing == {"predicted": "", "candidates": []}
    assert list(predict(answers, [])) == []


def test_files_of_questions(answers: Path, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    right = [{"text": "saw", "start": 3}]
    asked = {"question": "we saw", "context": TEXTS[0], "id": 3, "answers": right}
    file.write_text(json.dumps(asked) + "\n")
    [row], sentences = from_file(answers, file)
    assert row["answers"] == right, "not what the model makes of it"
    [expected] = predict(answers, [("we saw", TEXTS[0])])
    assert row["id"] == 3 and row["predicted"] == expected["predicted"]
    assert sentences[-1].startswith("1 texts in ")
    [swapped], _ = from_file(answers, file, text="context", text_b="question")
    [expected] = predict(answers, [(TEXTS[0], "we saw")])
    assert swapped["predicted"] == expected["predicted"]
    with pytest.raises(UserError, match=r"'context', but this model reads pairs of a question"):
        from_file(answers, file, text="context")
    with pytest.raises(UserError, match="no column 'text'; it has: question, context, id, answers"):
        from_file(model, file)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """They predicted the first label, with probabilities of NaN."""
    folder = save(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"][1, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="is not finite, as of weights that are not"):
        list(predict(folder, TEXTS))


@pytest.mark.parametrize("limit", [-5, 2, "many", float("nan"), True])
def test_an_odd_limit_of_the_tokenizer_is_refused(limit: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": limit}))
    with pytest.raises(UserError, match=f"model_max_length={limit}"):
        load_predictor(folder)


def test_ids_beyond_the_embeddings_are_refused(tmp_path: Path) -> None:
    """Also where there are no more tokens than embeddings: the model ended in an IndexError."""
    folder = save(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"][TOY_FILLERS[0]] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="has 5001 tokens, but its embeddings only"):
        load_predictor(folder)


def test_half_a_character_is_no_text(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(r'{"text": "a \ud83d b"}')
    with pytest.raises(UserError, match=r"texts\.jsonl:1: 'text' holds half of a surrogate pair"):
        from_file(model, file)


def test_what_a_line_says_is_the_row_whatever_a_terminal_makes_of_it(
    model: Path, tmp_path: Path
) -> None:
    file, output = tmp_path / "texts.jsonl", io.StringIO()
    row = {"text": "a", "id": "\x1b[31m \x9b \u202e \ud83d", "more": float("nan")}
    file.write_text(json.dumps(row))
    predict_file(model, file, output, progress=lambda sentence: None)
    assert output.getvalue().isascii()
    assert json.loads(output.getvalue())["id"] == row["id"]
