"""Questions: windows and their tokens' characters, best spans, scores of answers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_windows import windows_of_question
from torchmetrics.functional.text import squad
from toys import make_tiny_bert, toy_vocabulary
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer

from ds_distill.cache.schema import SignalSchema
from ds_distill.check.models import Models
from ds_distill.data.batches import Collator, Examples
from ds_distill.data.open_source import open_source
from ds_distill.data.question_windows import NO_ANSWER, prepare
from ds_distill.data.rows import cut_to, span_rows
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import load_tokenizer, tokens_fingerprint
from ds_distill.errors import UserError
from ds_distill.evaluation.answers import (
    BEST,
    AnswerPredictions,
    best_spans,
    ranked_answers,
)
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.keys import content_keys
from ds_distill.losses import KL, CrossEntropy, Seen
from ds_distill.models.encoder import read_signals
from ds_distill.models.packing import packed_attention
from ds_distill.planning.caches import example_bytes
from ds_distill.predictors.answering import Answerer
from ds_distill.predictors.prediction import load_predictor
from ds_distill.reads import Reads
from ds_distill.recipe import Recipe
from ds_distill.recipe.metrics.answers import (
    MRR,
    ExactMatch,
    LenientAccuracy,
    SquadF1,
    StrictAccuracy,
    first_right,
)
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import ExtractiveQA
from ds_distill.run.publish import keep_settings
from ds_distill.tasks.extractive_qa import ExtractiveQAKind
from ds_distill.types import LACKING, Batch, Signals
from ds_distill.views import PackedView, PaddedView

HOSTILE = [
    *("\u200b", "\u00ad", "\ufe0f", "\u0007", "\u00a0", "\u2028", " ", "  ", "\t", "\ufffd"),
    *("e\u0301", "\u0301", "\u05d0\u05d1", "\u0627\u0644", "\ufdfa", "\U0001f468\u200d\U0001f469"),
    *("Parkinson", "IL-2", "\u4e2d\u56fd", "a b ", "[SEP]", "</s>", "\u2581", "##s", "\u0130", "'"),
]
pieces = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
)
contexts = st.lists(pieces, min_size=1, max_size=40).map("".join)


FOUR = ("bert-base-cased", "pubmedbert-uncased", "deberta-v3-base", "roberta-base")


@pytest.fixture(scope="module")
def real(vocabularies: dict[str, Path]) -> dict[str, Any]:
    """Tokenizers of unlike kinds."""
    return {name: load_tokenizer(str(vocabularies[name])) for name in FOUR}


def rows_of(question: str, context: str, spans: list[tuple[int, int]] | None) -> datasets.Dataset:
    """One question, with answers at these characters."""
    keys = content_keys([question], [context])
    answers = None
    if spans is not None:
        answers = [{"text": context[start:end], "start": start} for start, end in spans]
    row = {"text": [question], "text_b": [context], "answers": [answers]}
    row |= {"copy": [7], "group": [7]}
    return datasets.Dataset.from_dict({**row, "key_hi": keys[:, 0], "key_lo": keys[:, 1]})


# ------------------------------------------------------------------------- windows and characters


def tokens_of(tokenizer: Any, question: str, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Positions of the tokens of a window, and the characters of each without white space."""
    encoded = tokenizer(question, text, return_offsets_mapping=True)
    positions = [at for at, part in enumerate(encoded.sequence_ids(0)) if part == 1]
    found = []
    for at in positions:
        start, end = encoded["offset_mapping"][at]
        inside = [place for place in range(start, end) if not text[place].isspace()]
        found.append((min(inside), max(inside) + 1) if inside else (end, end))
    return positions, found


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(question=contexts, context=contexts, length=st.sampled_from([32, 48, 384]), data=st.data())
def test_answers_come_back_to_the_same_characters(
    real: dict[str, Any], question: str, context: str, length: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(context) - 1))
    end = data.draw(st.integers(start + 1, len(context)))
    for tokenizer in real.values():
        split = prepare(rows_of(question, context, [(start, end)]), tokenizer, length, 8)
        held_rows = [(row["text"], row["text_b"], row["at"]) for row in split]
        assert held_rows == windows_of_question(tokenizer, length, 8, question, context)
        for row in split:
            at, text = row["at"], row["text_b"]
            assert question.startswith(row["text"])
            assert context[at : at + len(text)] == text
            positions, spans = tokens_of(tokenizer, row["text"], text)
            encoded = tokenizer(row["text"], text, return_token_type_ids=True)
            assert len(encoded["input_ids"]) <= length, "nothing is cut when it is tokenised"
            for name in ("input_ids", "token_type_ids"):
                assert row[f"{tokens_fingerprint(tokenizer)}:{name}"] == encoded[name]
            assert (row["begins"], row["ends"]) == ([a for a, _ in spans], [b for _, b in spans])
            assert row["tokens"] == len(spans)
            assert not positions or row["first"] == positions[0]
            held = [
                number
                for number, (a, b) in enumerate(spans)
                if any(start <= at + place < end for place in range(a, b))
            ]
            if start < at or end > at + len(text) or not held:
                assert row["label"] == [NO_ANSWER, NO_ANSWER]
                continue
            assert row["label"] == [1 + held[0], 1 + held[-1]]
            held_spans = [spans[number] for number in held]
            whole = min(a for a, _ in held_spans), max(b for _, b in held_spans)
            if whole == (start - at, end - at):  # an answer of whole tokens
                first, last = (label - 1 for label in row["label"])
                found = text[row["begins"][first] : row["ends"][last]]
                assert found == context[start:end]


def test_no_window_is_of_white_space_alone(real: dict[str, Any]) -> None:
    """RoBERTa's tokenizer makes tokens of it: those between words, and where the text before them
    filled a window, they were windows of their own."""
    tokenizer = real["roberta-base"]
    at_the_end = ["a." * pairs + "\u00a0" for pairs in range(21, 45)]
    for context in (*at_the_end, "a b " * 5 + " " * 300 + "c d"):
        split = prepare(rows_of("Who?", context, None), tokenizer, 48, 8)
        assert all(text.strip() for text in split["text_b"])
        held = [(row["text"], row["text_b"], row["at"]) for row in split]
        assert held == windows_of_question(tokenizer, 48, 8, "Who?", context)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(context=contexts, overlap=st.integers(1, 10))
def test_windows_hold_every_token_and_overlap(
    real: dict[str, Any], context: str, overlap: int
) -> None:
    for name, tokenizer in real.items():
        split = prepare(rows_of("who", context, None), tokenizer, 32, overlap)
        whole = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
        spans = [(a, b) for a, b in whole["offset_mapping"] if context[a:b].strip()]
        held = [(row["at"], row["at"] + len(row["text_b"])) for row in split]
        for a, b in spans:
            inside = range(
                a + len(context[a:b]) - len(context[a:b].lstrip()), a + len(context[a:b].rstrip())
            )
            assert any(s <= inside[0] and inside[-1] < e for s, e in held), (name, context, a, b)
        for (one, end), (other, later) in pairwise(held):
            assert one < other and end < later
            shared = sum(other <= a and b <= end for a, b in spans)
            assert shared <= overlap
        assert [row["label"] for row in split] == [[-1, -1]] * len(split)


def test_windows_of_words_share_the_tokens_of_the_overlap(tiny_models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    context = " ".join(["cat", "dog", "snow", "rain"] * 20)
    split = prepare(rows_of("we saw", context, [(4, 7), (24, 27)]), tokenizer, 32, 9)
    ends = [row["at"] + len(row["text_b"]) for row in split]
    assert {row["tokens"] for row in list(split)[:-1]} == {32 - 3 - 2}
    shared = [
        context[row["at"] : end].split() for row, end in zip(list(split)[1:], ends, strict=False)
    ]
    assert {len(words) for words in shared} == {9}
    assert split[0]["label"] == [2, 2], "the second word of the context"
    assert split[1]["label"] == [NO_ANSWER, NO_ANSWER]
    assert list(split["answers"]) == [["dog", context[24:27]]] * len(split)
    crossing = [(ends[0] - 3, ends[0] + 5)]
    split = prepare(rows_of("we saw", context, crossing), tokenizer, 32, 9)
    assert split[0]["label"] == [NO_ANSWER, NO_ANSWER] != split[1]["label"]
    [lone] = prepare(rows_of("we saw", "a cat", None), tokenizer, 32, 9)
    key = content_keys(["we saw"], ["a cat"])[0].tolist()
    assert [lone["key_hi"], lone["key_lo"]] == key, "a context that fits is found by its own key"


def test_models_must_have_the_same_tokens(
    tmp_path: Path, tiny_models: dict[str, Path], toy_settings: dict[str, Any]
) -> None:
    """The rows that pad a model's embeddings do not count."""
    words = toy_vocabulary()
    other = make_tiny_bert(tmp_path / "other", [*words[:5], *reversed(words[5:])])
    padded = make_tiny_bert(tmp_path / "padded", [*words, "more"])
    AutoTokenizer.from_pretrained(tiny_models["toy"]).save_pretrained(padded)

    def mistakes(kind: str, teacher: Path) -> list[str]:
        (tmp_path / "texts.txt").write_text("we saw a cat\n")
        data = {"path": str(tmp_path / "texts.txt")}
        settings = {
            **toy_settings,
            "task": {"type": kind, "data": data, "max_length": 32},
            "teachers": {"first": {"model": str(teacher)}},
            "phases": [{"evaluate": {"split": "train"}}],
        }
        return Models(Recipe.model_validate(settings), on_gpu=False).mistakes()

    for kind in ("extractive-qa", "masked-lm"):
        [mistake] = mistakes(kind, other)
        assert "teachers.first.model: its tokenizer" in mistake
        assert f"task.type={kind} all models must have the same vocabulary" in mistake
        assert mistakes(kind, tiny_models["toy"]) == mistakes(kind, padded) == []


# ------------------------------------------------------------------------------------------ rows


ROWS: list[dict[str, Any]] = [
    {"question": "who?", "context": "a cat saw", "answers": [{"text": "cat", "start": 2}]},
    {
        "question": "what?",
        "context": "a cat saw",
        "answers": {"text": ["saw"], "answer_start": [6]},
    },
]


def written(folder: Path, rows: list[dict[str, Any]], **data: Any) -> datasets.Dataset:
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ExtractiveQA(data={"path": str(folder), **data})
    return open_source(task, cache_folder=folder / "cache").read("train")


def test_rows_are_read_as_files_and_as_the_hub_have_them(tmp_path: Path) -> None:
    split = written(tmp_path / "data", ROWS)
    assert list(split["text"]) == ["who?", "what?"]
    assert split[1]["answers"] == [{"text": "saw", "start": 6}]
    assert list(split["label"]) == [1, 1]
    assert len(set(split["group"])) == 1, "questions about one context are one group"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"context": "b", "answers": []}, "no 'question'"),
        ({"question": 3, "context": "b"}, "'question' must be a text"),
        ({"question": "a", "context": "\ud800"}, "half of a surrogate pair"),
        ({"question": "a", "context": "b", "answers": []}, "empty list"),
        ({"question": "a", "context": "b", "answers": "b"}, "must be a list of"),
        ({"question": "a", "context": "b"}, "no answers in 'answers', but"),
        ({"question": "a", "context": "b", "answers": [{"text": "b"}]}, "a text and a start"),
        (
            {"question": "a", "context": "ab", "answers": [{"text": "b", "start": 0}]},
            "from character 0 on .there is 'a'.. It stands at 1 to 2, exclusive",
        ),
        (
            {"question": "a", "context": "🎉 ab b", "answers": [{"text": "b", "start": 8}]},
            "there is ''.. It counts bytes of UTF-8: in characters it is 5 to 6",
        ),
        (
            {"question": "a", "context": "b", "answers": {"text": ["b", "b"], "answer_start": [0]}},
            "`text` and `answer_start` must be lists as long as each other",
        ),
        (
            {"question": "a", "context": "ab", "answers": [{"text": "b", "start": -1}]},
            "does not stand in the context from character -1",
        ),
    ],
)
def test_mistakes_in_rows_name_their_location(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        written(tmp_path / "data", [*ROWS, row])
    assert "train.jsonl:3" in str(error.value)


def test_answers_of_other_data_can_be_left_out(tmp_path: Path) -> None:
    written(tmp_path / "data", ROWS)
    other = {"path": str(tmp_path / "data"), "split": "train"}
    task = ExtractiveQA(
        data={
            "path": str(tmp_path / "data"),
            "splits": {"transfer": {**other, "labels": "none"}, "more": other},
        }
    )
    source = open_source(task, cache_folder=tmp_path / "cache")
    assert list(source.read("transfer")["label"]) == [-1, -1]
    assert list(source.read("transfer")["answers"]) == [None, None]
    assert list(source.read("more")["label"]) == [1, 1]
    with pytest.raises(UserError, match="labels=none"):
        source.read("transfer", need_labels=True)


# --------------------------------------------------------------------------------------- batches


def collator(folder: Path, model: Path, **options: Any) -> tuple[Examples, Collator]:
    tokenizer = load_tokenizer(str(model))
    long = {"question": "we saw", "context": " ".join(["snow", "rain"] * 20 + ["cat"])}
    rows = [ROWS[0], {**long, "answers": [{"text": "cat", "start": 200}]}]
    assert long["context"][200:] == "cat"
    split = prepare(written(folder, rows), tokenizer, 32, 8)
    tokenise(split, tokenizer, 32, folder / "tokens.arrow")
    examples = Examples.of(split)
    tables = {"student": TokenTable(folder / "tokens.arrow", tokenizer)}
    return examples, Collator(examples, tables, span_rows, **options)


def test_two_rows_per_window(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    examples, collate = collator(tmp_path / "data", tiny_models["toy"])
    assert examples.windows is not None and examples.windows.firsts.tolist() == [0, 1]
    last = len(examples) - 1
    assert examples.counts == {"examples": 2, "windows": len(examples)}, "as records say"
    assert examples.at(np.array([0])).counts == {"examples": 1}
    counted = ExtractiveQAKind(ExtractiveQA(data={"path": "data"}), []).counted(examples)
    assert np.flatnonzero(counted).tolist() == [0, 1], "metrics are of questions"
    batch = collate(np.array([last, 0, 1]))
    view = batch.views["student"]
    assert isinstance(view, PaddedView) and view.candidates is not None
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    for window, text in enumerate(["cat", "cat", "[CLS]"]):
        start, end = batch.labels[2 * window : 2 * window + 2].tolist()
        ids = view.input_ids[window, view.candidates[window, start : end + 1]].tolist()
        assert tokenizer.convert_ids_to_tokens(ids) == [text]
    short = view.candidates[1]
    assert short[4:].tolist() == [-1] * (len(short) - 4) and len(short) > 4
    open_ = tokenizer.convert_ids_to_tokens(view.input_ids[1, short[:4]].tolist())
    assert open_ == ["[CLS]", "a", "cat", "saw"]
    assert batch.row_sets["all"].tolist() == batch.row_sets["labelled"].tolist() == [*range(6)]
    assert view.example_indices.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.keys[:2].tolist() == [examples.keys[last].tolist()] * 2
    empty = collate(np.array([], dtype=np.int64))
    assert len(empty.labels) == 2 and not any(map(len, empty.row_sets.values()))


FAMILIES = ("bert", "roberta", "deberta-v2", "distilbert", "albert", "electra", "modernbert")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "pad_token_id": 0,
    }
    if family == "modernbert":
        sizes |= {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    attention = packed_attention(config)
    options = {"attn_implementation": attention} if attention else {}
    model = AutoModelForQuestionAnswering.from_config(config, **options).eval()
    ids = torch.randint(3, 50, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    candidates = torch.tensor([[0, 3, 4, 5], [0, 2, 3, -1]])
    view = PaddedView(ids, mask, candidates=candidates)
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask)
        here = read_signals(model, view, Reads({-1}))
        assert here.hidden[-1].shape == (4, 32)
        for turn, expected in enumerate((whole.start_logits, whole.end_logits)):
            rows = here.logits[turn::2]
            torch.testing.assert_close(rows[0], expected[0, candidates[0]])
            torch.testing.assert_close(rows[1, :3], expected[1, candidates[1, :3]])
            assert rows[1, 3] == LACKING
        if attention:
            packed = read_signals(model, PackedView.of(view), Reads({-1}))
            torch.testing.assert_close(packed.logits, here.logits)
            torch.testing.assert_close(packed.hidden[-1], here.hidden[-1])


@pytest.mark.parametrize("term", [KL({"temperature": 2.0}), CrossEntropy()])
def test_losses_do_not_depend_on_padding(term: Any) -> None:
    torch.manual_seed(0)
    logits = {"student": torch.randn(4, 6), "teacher": torch.randn(4, 6)}
    found = []
    for longer in (0, 5):
        wide = {
            name: torch.nn.functional.pad(values, (0, longer), value=LACKING).requires_grad_()
            for name, values in logits.items()
        }
        ids = torch.ones(2, 6 + longer, dtype=torch.int64)
        candidates = torch.where(torch.arange(6 + longer) < 6, torch.arange(6 + longer), -1)
        view = PaddedView(ids, torch.ones_like(ids), candidates=candidates.expand(2, -1))
        batch = Batch.from_views({"student": view}, torch.tensor([0, 1, 2, 3]))
        teachers = {"teacher": Signals(wide["teacher"].detach())}
        loss = term(Seen(Signals(wide["student"]), batch, teachers))
        loss.sum().backward()
        gradient = wide["student"].grad
        assert gradient is not None and (gradient[:, 6:] == 0).all()
        found.append((loss.detach(), gradient[:, :6]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@given(data=st.data())
def test_cached_rows_are_as_long_as_their_contexts(dtype: Any, data: st.DataObject) -> None:
    """Rows of unlike lengths come back from a cache's columns, whatever the batch they were in."""
    tokens = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    candidates = torch.full((len(tokens), 1 + max(tokens)), -1)
    for row, count in zip(candidates, tokens, strict=True):
        row[: 1 + count] = torch.arange(1 + count)
    known = (candidates >= 0).repeat_interleave(2, dim=0)
    numbers = torch.tensor(
        data.draw(st.lists(st.integers(-99, 99), min_size=known.numel(), max_size=known.numel()))
    )
    logits = numbers.reshape(known.shape).float().masked_fill(~known, LACKING)
    schema = SignalSchema(dtype=dtype, classes=9, ragged=True, mask_variants=1)
    encoded = schema.encode(Signals(logits))
    assert encoded.finite.all()
    [column] = schema.record_batch([encoded], np.full(len(tokens), 2)).columns
    assert len(column) == len(tokens)
    decoded = schema.decode(encoded.columns)
    assert decoded.logits.shape == (len(logits), 9)
    assert torch.equal(cut_to(candidates, decoded).logits, logits)
    shares = schema.log_probs(encoded.columns)[:, : known.shape[1]]
    torch.testing.assert_close(shares.exp(), logits.softmax(1))
    other = candidates.clone()
    other[0, 0] = -1
    with pytest.raises(ValueError, match="other tokens than the batch's"):
        cut_to(other, decoded)


def test_what_a_cache_takes_is_planned() -> None:
    task = ExtractiveQA(data={"path": "data"}, max_length=64)
    config, phase = AutoConfig.for_model("bert", hidden_size=8), Cache(splits="train", hidden=[-1])
    schema = ExtractiveQAKind(task, []).signal_schema(phase, config, lambda _: None, None)
    sizes = [size for size in schema.items.values() if size is not None]
    assert example_bytes(phase, task, config, 2, 50.0) == 2 * sum(sizes)


# ---------------------------------------------------------------------------------------- answers


@given(
    starts=st.lists(st.integers(-50, 50), min_size=2, max_size=9, unique=True),
    most=st.integers(1, 12),
    data=st.data(),
)
def test_best_spans_are_those_of_all(starts: list[int], most: int, data: st.DataObject) -> None:
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


def test_a_logit_that_is_not_finite_shows() -> None:
    logits = torch.zeros(2, 40)
    logits[1, 7] = torch.nan
    assert not best_spans(logits, 4).isfinite().all()


def test_spans_of_two_windows_are_one_answer(tiny_models: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(tiny_models["toy"]))
    context = " ".join(["cat", "dog", "snow", "rain", "bread"] * 10)
    examples = Examples.of(prepare(rows_of("we saw", context, None), tokenizer, 32, 10))
    assert examples.windows is not None and len(examples) == 3
    one, two, _ = examples.windows.table
    spans = np.full((3, BEST, 3), [0, 0, LACKING])
    place = context.index("dog", two["at"])  # in both windows
    for number, (row, score) in enumerate([(one, 1.0), (two, 3.0)]):
        at = 1 + row["begins"].index(place - row["at"])
        spans[number, 0] = at, at + 1, score
        spans[number, 1] = at + 1, at + 1, 2.0 + number / 2
    [answers] = ranked_answers(spans, examples.windows)
    assert [(a.text, a.start, a.score) for a in answers] == [
        ("dog snow", place, 3.0),
        ("snow", place + 4, 2.5),
    ]


words = st.sampled_from(
    [
        "the",
        "The",
        "a",
        "an",
        "cat",
        "Cat",
        "cats",
        "x-ray",
        "xray",
        ",",
        "...",
        "and",
        "\u00e9",
        "\u2014",
    ]
)
texts = st.lists(words, max_size=5).map(" ".join)


@pytest.mark.parametrize("shipped", [True, False])
def test_predict_reads_as_the_evaluation_of_the_run(
    shipped: bool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Answers as short, windows that overlap as much; by a model of random weights, whose answers
    are of any length. One that no run has shipped has the defaults."""
    torch.manual_seed(0)
    context = " ".join(["the cat saw a very old tiger before the rain"] * 8)
    pairs = [("who saw it", context), ("the dog", "some small bread")]
    own: dict[str, Any] = {"stride": 3, "max_answer_length": 2} if shipped else {}
    task = ExtractiveQA(data={"path": "."}, max_length=32, **own)
    AutoModelForQuestionAnswering.from_pretrained(tiny_models["toy"]).save_pretrained(tmp_path)
    load_tokenizer(str(tiny_models["toy"])).save_pretrained(tmp_path)
    if shipped:
        keep_settings(tmp_path, task)
        AutoModelForQuestionAnswering.from_pretrained(tmp_path).save_pretrained(tmp_path)
    answerer = load_predictor(tmp_path)
    assert isinstance(answerer, Answerer)
    answerer.max_length = 32
    answerer.overlap = min(answerer.overlap, 10)
    assert (answerer.max_answer_length, answerer.overlap) == ((2, 3) if shipped else (30, 10))
    rows = {key: [one[at] for one in pairs] for at, key in enumerate(("text", "text_b"))}
    rows |= {"answers": [None, None], "copy": [0, 1], "group": [0, 1]}
    kind = ExtractiveQAKind(task, [])
    judged = kind.prepare(datasets.Dataset.from_dict(rows), lambda: [answerer.tokenizer])
    assert judged["text_b"][:] == answerer._windows(pairs)["text_b"][:]
    found = [one["candidates"][0]["text"] for one in answerer.predictions(pairs)]
    assert (max(len(text.split()) for text in found) <= 2) == shipped


def predictions(ranked: list[list[str]], right: list[list[str]]) -> AnswerPredictions:
    return AnswerPredictions(ranked, right, len(right))


def value(metric: Any, of: AnswerPredictions) -> float:
    return float(metric(metric.Settings(), []).value(of))


@settings(deadline=None)
@given(st.lists(st.tuples(texts, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_squad_scores_are_the_librarys(pairs: list[tuple[str, list[str]]]) -> None:
    library = squad(
        [{"id": str(n), "prediction_text": text} for n, (text, _) in enumerate(pairs)],
        [
            {"id": str(n), "answers": {"text": right, "answer_start": [0] * len(right)}}
            for n, (_, right) in enumerate(pairs)
        ],
    )
    ours = predictions([[text] for text, _ in pairs], [right for _, right in pairs])
    assert value(ExactMatch, ours) == pytest.approx(float(library["exact_match"]) / 100)
    assert value(SquadF1, ours) == pytest.approx(float(library["f1"]) / 100, abs=1e-6)


ranked_lists = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=9), min_size=1, max_size=6)


@given(ranked_lists, st.data())
def test_bioasq_scores_are_by_the_definition(ranked: list[list[str]], data: st.DataObject) -> None:
    """Strict accuracy c1 / n, lenient accuracy c5 / n, MRR the mean of 1 / r(i)."""
    right = [data.draw(st.lists(st.sampled_from("ABCXY"), min_size=1)) for _ in ranked]
    c1 = c5 = 0
    ranks = 0.0
    for answers, golden in zip(ranked, right, strict=True):
        five: list[str] = []
        for answer in answers:
            if answer not in five and len(five) < 5:
                five.append(answer)
        hits = [rank for rank, text in enumerate(five, 1) if text.upper() in golden]
        c1 += bool(hits) and hits[0] == 1
        c5 += bool(hits)
        ranks += 1 / hits[0] if hits else 0.0
    ours = predictions(ranked, right)
    assert value(StrictAccuracy, ours) == pytest.approx(c1 / len(ranked))
    assert value(LenientAccuracy, ours) == pytest.approx(c5 / len(ranked))
    assert value(MRR, ours) == pytest.approx(ranks / len(ranked))


def test_case_and_white_space_do_not_count_for_bioasq() -> None:
    assert first_right(["b", " Il-2  gene"], ["IL-2 gene"]) == 2
    assert first_right(["il 2 gene"], ["IL-2 gene"]) is None


def test_differences_have_intervals_over_questions() -> None:
    right = [["cat"]] * 40
    one = predictions([["cat"]] * 30 + [["dog"]] * 10, right)
    other = predictions([["cat"]] * 10 + [["dog"]] * 30, right)
    kept = AnswerPredictions.of_arrays(one.arrays(), [])
    assert (kept.ranked, kept.right, kept.windows) == (one.ranked, one.right, one.windows)
    low, high = paired_interval(one, other, ExactMatch(ExactMatch.Settings(), []))
    assert 0.3 < low < 0.5 < high < 0.7


# ------------------------------------------------------------------------------------------ tasks


def test_windows_must_go_on() -> None:
    with pytest.raises(ValueError, match="a third of max_length=60: set at most 20"):
        ExtractiveQA(data={"path": "x"}, max_length=60, stride=21)
    assert ExtractiveQA(data={"path": "x"}, max_length=60).overlap == 20
