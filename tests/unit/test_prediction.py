"""Predicting with a student: as transformers' pipeline does, for texts and for files."""

import gzip
import io
import json
import random
from pathlib import Path

import pandas as pd
import pytest
import torch
from kinds import change, jsonl, write
from safetensors.torch import load_file, save_file
from toys import TOY_FILLERS, make_tiny_bert, toy_vocabulary
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)

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


def save(folder, **config):
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
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return save(tmp_path_factory.mktemp("many"), problem_type="multi_label_classification")


def from_file(model, file, **options):
    output, sentences = io.StringIO(), list[str]()
    predict_file(model, file, output, progress=sentences.append, **options)
    return list(map(json.loads, output.getvalue().splitlines())), sentences


def of_rows(model, folder, *rows, **options):
    return from_file(model, write(folder / "texts.jsonl", [*rows]), **options)


def check_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one["predicted"] == other["predicted"]
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)


# ------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize(
    ("kind", "pairs", "batch_size"),
    [("model", False, 7), ("model", False, 100), ("model", True, 32), ("many", False, 32)],
)
def test_probabilities_are_those_of_transformers_pipeline(kind, pairs, batch_size, request):
    folder = request.getfixturevalue(kind)
    given = [(text, TEXTS[0]) for text in TEXTS] if pairs else TEXTS
    asked = [{"text": one, "text_pair": other} for one, other in given] if pairs else TEXTS
    theirs = pipeline("text-classification", model=str(folder), top_k=None)(asked, truncation=True)
    ours = list(predict(folder, given, batch_size=batch_size))
    expected = [{found["label"]: found["score"] for found in other} for other in theirs]
    best = [max(each, key=each.__getitem__) for each in expected]
    above = [[name for name in LABELS if each[name] > 0.5] for each in expected]
    right = above if kind == "many" else best
    wanted = [{"predicted": p, "probabilities": e} for p, e in zip(right, expected, strict=True)]
    check_same(ours, wanted)
    assert len({str(found["predicted"]) for found in ours}) > 1, "the toy says more than one thing"


@pytest.mark.parametrize("setting", [{"padding_side": "left"}, {"pad_token": None}])
def test_texts_are_padded_as_in_training(setting, tmp_path):
    """On the right, and with id 0 where the tokenizer has no token for it. A student of a tokenizer
    that pads on the left was evaluated well, and answered otherwise beside longer texts."""
    folder = save(tmp_path)
    classifier = load_predictor(folder)
    expected = [classifier.predictions([text], 1)[0] for text in TEXTS]
    change_tokenizer(folder, setting)
    check_same(predict(folder, TEXTS), expected)


def change_tokenizer(folder, setting):
    change(folder / "tokenizer_config.json", **setting)


def test_a_model_of_one_output_predicts_a_number(tmp_path):
    """As many cross-encoders are published, without a `problem_type`."""
    folder = save(tmp_path)
    config = BertConfig.from_pretrained(folder, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    found = list(predict(folder, TEXTS[:5]))
    assert all(set(one) == {"predicted"} for one in found)
    assert len({one["predicted"] for one in found}) == 5


def test_texts_that_are_cut_are_counted(model):
    classifier, tokenizer = load_predictor(model), AutoTokenizer.from_pretrained(model)
    pairs = [(TEXTS[0][:12], text[:30]) for text in TEXTS]
    expected = 0
    for given in ([(text,) for text in TEXTS], pairs):
        longer = sum(len(tokenizer(*one).input_ids) > LENGTH for one in given)
        assert 0 < longer < len(given)
        classifier.predictions([one if len(one) > 1 else one[0] for one in given], 8)
        expected += longer
        assert classifier.cut == expected
    assert list(predict(model, [])) == []


# ------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "txt", "jsonl.gz", "stdin", "lines"])
def test_a_file_of_each_kind(model, tmp_path, ending, monkeypatch):
    file = tmp_path / f"texts.{ending}"
    rows = [{"text": text, "id": str(number)} for number, text in enumerate(TEXTS)]
    lines = jsonl(rows)
    content = "\n\n".join(TEXTS) if ending in ("txt", "lines") else lines
    if ending in ("csv", "tsv"):
        pd.DataFrame(rows).to_csv(file, index=False, sep="\t" if ending == "tsv" else ",")
    elif ending == "parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        file.write_bytes(gzip.compress(lines.encode()) if ending[-2:] == "gz" else content.encode())
    if ending in ("stdin", "lines"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        file = Path("-")
    found, sentences = from_file(model, file)
    check_same(found, predict(model, TEXTS))
    assert [row["text"] for row in found] == TEXTS
    if ending not in ("txt", "lines"):
        assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert sentences[-1].startswith("40 texts in ") and "were cut at 16 tokens" in sentences[-1]


def test_what_a_row_has_stays_and_what_is_replaced_is_told(model, tmp_path):
    row = {"text_a": TEXTS[0], "text_b": TEXTS[1], "label": "food"}
    found, told = of_rows(model, tmp_path, row)
    check_same(found, predict(model, [(TEXTS[0], TEXTS[1])]))
    assert found[0]["label"] == "food" and len(told) == 1, "nothing to note"
    found, _ = of_rows(model, tmp_path, row, text="text_b")
    check_same(found, predict(model, [TEXTS[1]]))
    file = tmp_path / "texts.parquet"
    rows = {"text": TEXTS[:2], "x": [0.5, float("nan")], "predicted": ["food", "food"]}
    pd.DataFrame(rows).to_parquet(file)
    found, told = from_file(model, file)
    assert [row["x"] for row in found] == [0.5, None]
    check_same(found, predict(model, TEXTS[:2]))
    assert told[0] == f"Note: what {file} has as predicted is replaced"


def test_what_a_line_says_is_the_row_whatever_a_terminal_makes_of_it(model, tmp_path):
    file, output = tmp_path / "texts.jsonl", io.StringIO()
    row = {"text": "a", "id": "\x1b[31m \x9b \u202e \ud83d", "more": float("nan")}
    file.write_text(json.dumps(row))
    predict_file(model, file, output, progress=lambda sentence: None)
    assert output.getvalue().isascii()
    assert json.loads(output.getvalue())["id"] == row["id"]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"text": "body"}, {"body": TEXTS[0], "text": "no text of the run's"}),
        ({"text": "one", "text_b": "two"}, {"one": TEXTS[0], "two": TEXTS[1], "text": "other"}),
        ({"text": "body"}, {"text": TEXTS[0]}),
    ],
)
def test_the_runs_own_files_have_the_columns_of_its_recipe(tmp_path, columns, row):
    """Others those that are read by default."""
    folder = save(tmp_path / "student")
    keep_settings(folder, SingleLabel(data={"path": ".", "columns": columns}, max_length=LENGTH))
    texts = tuple(text for text in row.values() if text in TEXTS)
    found, _ = of_rows(folder, tmp_path, row)
    check_same(found, predict(folder, [texts if len(texts) > 1 else texts[0]]))


@pytest.mark.parametrize("damage", [3, {"a": 3}, {"a": {"columns": [["text"], [3], []]}}])
def test_settings_that_are_none_are_left_out(tmp_path, damage):
    folder = save(tmp_path / "student", task_specific_params=damage)
    assert {len(names) for names in load_predictor(folder).columns} == {1, 2}
    assert load_predictor(folder).columns[-2:] == (("text",), ("text_a", "text_b"))


# -------------------------------------------------------------------------------- questions


@pytest.fixture(scope="module")
def answers(tmp_path_factory, tiny_models):
    """A model for questions, in windows of 32 tokens. Its scores are of like size."""
    folder = tmp_path_factory.mktemp("answers")
    torch.manual_seed(0)
    model = AutoModelForQuestionAnswering.from_pretrained(tiny_models["toy"])
    torch.nn.init.normal_(model.qa_outputs.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_models["toy"], model_max_length=32).save_pretrained(folder)
    return folder


def test_answers_are_the_best_spans_of_the_context(answers):
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


def test_files_of_questions(answers, model, tmp_path):
    right = [{"text": "saw", "start": 3}]
    asked = {"question": "we saw", "context": TEXTS[0], "id": 3, "answers": right}
    [row], sentences = of_rows(answers, tmp_path, asked)
    [expected] = predict(answers, [("we saw", TEXTS[0])])
    assert (row["id"], row["predicted"]) == (3, expected["predicted"])
    assert row["answers"] == right, "not what the model makes of it"
    assert sentences[-1].startswith("1 texts in ")
    [swapped], _ = of_rows(answers, tmp_path, asked, text="context", text_b="question")
    [expected] = predict(answers, [(TEXTS[0], "we saw")])
    assert swapped["predicted"] == expected["predicted"]
    with pytest.raises(UserError, match=r"'context', but this model reads pairs of a question"):
        of_rows(answers, tmp_path, asked, text="context")
    with pytest.raises(UserError, match="no column 'text'; it has: question, context, id, answers"):
        of_rows(model, tmp_path, asked)


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"texts": "a"}\n', "no column 'text'; it has: texts.* Did you mean `texts`"),
        ('{"text": "a"}\n{"text": 3}\n', ":2: 'text' must be a text, got the number 3"),
        ('{"text": "a"}\n{"id": 3}\n', ":2: no 'text'; it has 'id'"),
        ('{"text": "a"}\nb\n', ":2: not readable as JSON"),
        ("", "is empty"),
        (r'{"text": "a \ud83d b"}', r"texts\.jsonl:1: 'text' holds half of a surrogate pair"),
    ],
)
def test_rows_that_cannot_be_read(model, tmp_path, content, message):
    file = tmp_path / "texts.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        from_file(model, file)


def nan_weights(folder):
    """They predicted the first label, with probabilities of NaN."""
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"][1, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def an_id_beyond_the_embeddings(folder):
    """No more tokens than embeddings: the model ended in an IndexError."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"][TOY_FILLERS[0]] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (nan_weights, "is not finite, as of weights that are not"),
        (an_id_beyond_the_embeddings, "has 5001 tokens, but its embeddings only"),
        *(
            (lambda folder, n=n: change_tokenizer(folder, {"model_max_length": n}), f"length={n}")
            for n in (-5, 2, "many", float("nan"), True)
        ),
    ],
)
def test_a_damaged_model_is_refused(damage, message, tmp_path):
    folder = save(tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=message):
        list(predict(folder, TEXTS))


def test_pairs_among_texts_are_refused(model):
    with pytest.raises(UserError, match="some texts are pairs"):
        list(predict(model, [(TEXTS[0], TEXTS[1]), "a text"]))
