"""A model with NaN outputs for some examples is refused, with their locations, in every phase."""

import copy
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from kinds import json_lines, write
from pydantic import TypeAdapter
from runs import loaded, results
from toys import break_word, make_tiny_bert, make_toy_classifier, toy_vocabulary, write_toy_task

from ds_distill.data.open_source import open_source
from ds_distill.engine.engine import LossScale
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import Task
from ds_distill.run.execute import execute
from ds_distill.training import loop
from ds_distill.training.progress import Progress, why_astray

WORD = "snow"


pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    sizes = {"train": 60, "validation": 60, "test": 60, "transfer": 60}
    return write_toy_task(tmp_path_factory.mktemp("task") / "toy", sizes)


@pytest.fixture(scope="module")
def settings(task, toy_settings, tmp_path_factory):
    """The toy recipe with trained teachers, `first` sound and `second` not."""
    made = copy.deepcopy(toy_settings)
    folder = tmp_path_factory.mktemp("models")
    first = make_toy_classifier(folder / "first")
    second = make_toy_classifier(folder / "second", broken_word=WORD)
    made["teachers"] = {
        name: {"model": str(model), "below_majority": "warn"}
        for name, model in {"first": first, "second": second}.items()
    }
    made["task"]["data"]["path"] = str(task)
    made["training"]["epochs"] = 1
    made["logging"]["every"] = 3
    return made


def refused(settings, phases, folder):
    """How a run of some phases ends."""
    folder.mkdir(exist_ok=True)
    with pytest.raises(UserError) as raised:
        execute(loaded({**settings, "phases": phases}, folder), folder / "run")
    return str(raised.value)


def named(message):
    """(location, first words) of the examples that a message names."""
    found = re.findall(r"(\S+:\d+) '([^']*)'", message)
    assert 1 <= len(found) <= 3, message
    return found


def check_examples(message, file):
    """It names lines of a file with the broken word."""
    lines = [row["text"] for row in json_lines(file)]
    for location, words in named(message):
        name, _, number = location.rpartition(":")
        text = lines[int(number) - 1]
        assert name == str(file) and WORD in text.split(), message
        assert text.startswith(words.removesuffix(" ..."))


KL = {"losses": {"kl": {"temperature": 2.0}}}
LIVE = {"distil": {"split": "train", "teachers": "live", "routing": "average", **KL}}


def test_evaluation_and_expertise(settings, task, tmp_path):
    train = {"fine-tune": {"models": "student"}}
    phases = [{"expertise": {"split": "validation"}}, LIVE]
    for message, split in (
        (refused(settings, [train, {"evaluate": {"split": "test"}}], tmp_path), "test"),
        (refused(settings, phases, tmp_path / "expertise"), "validation"),
    ):
        file = task / f"{split}.jsonl"
        rows = json_lines(file)
        bad = sum(WORD in row["text"] for row in rows)
        assert message.startswith(f"teachers.second: its outputs for {bad} of {len(rows)} examples")
        check_examples(message, file)


def test_a_live_teacher_not_the_learning_rate_is_blamed(settings, task, tmp_path):
    message = refused(settings, [LIVE], tmp_path)
    assert message.startswith("teachers.second: ") and "of a batch" in message
    check_examples(message, task / "train.jsonl")


@pytest.mark.parametrize("deepspeed", ["zero1_fp32", "zero0_bf16"])
def test_gradients_that_are_not_finite_where_the_loss_is(
    deepspeed, settings, tmp_path, monkeypatch, capsys
):
    """As of a root at 0. DeepSpeed leaves such a step out without a word: it is told and counted,
    and a training of nothing else ends."""
    training = {**settings["training"], "batch_size": 4}  # 15 steps
    phase = {"distil": {**LIVE["distil"]}}
    sound = {**settings, "teachers": {"first": settings["teachers"]["first"]}}
    sound |= {"training": training, "deepspeed": deepspeed}
    began, broken = loop.start_engine, [2, 3, 7]

    def start(job, run, total):
        calls = itertools.count()
        [weight] = [
            w for name, w in job.bundle.student.named_parameters() if name.endswith("r.bias")
        ]
        weight.register_hook(lambda of: of * (torch.nan if next(calls) in broken else 1.0))
        return began(job, run, total)

    monkeypatch.setattr(loop, "start_engine", start)
    execute(loaded({**sound, "phases": [phase]}, tmp_path), tmp_path / "run")
    assert results(tmp_path / "run")["phases"][0]["trained"][0]["skipped"] == 3
    assert "gradients are not finite at step 3, where the loss is" in capsys.readouterr().out
    assert (tmp_path / "run" / "not-finite-student-step-3.jsonl").is_file()
    broken[:] = range(15)
    message = refused(sound, [phase], tmp_path / "all")
    assert (
        "gradients are not finite in 10 steps one after the other, the last of them step 10"
        in message
    )


def test_weights_that_a_training_starts_from_are_blamed(settings, tmp_path):
    message = refused(settings, [{"fine-tune": {"models": "second"}}, LIVE], tmp_path)
    assert message.startswith("teachers.second.model=") and "word_embeddings.weight" in message


def test_the_learning_rate_is_blamed_where_no_teacher_is(settings, task, tmp_path):
    sound = {**settings, "teachers": {"first": settings["teachers"]["first"]}}
    message = refused(sound, [{"distil": {**LIVE["distil"], "learning_rate": 1e30}}], tmp_path)
    assert "set a lower learning_rate" in message and "teachers." not in message
    [(step, terms, file)] = re.findall(r"at step (\d+) \(([^)]+)\)\. (\S+) has", message)
    assert int(step) > 1 and terms == "kl"
    rows, texts = json_lines(Path(file)), json_lines(task / "train.jsonl")
    batch = settings["training"]["batch_size"]
    assert len(rows) in (batch, len(texts) % batch)
    for row in rows:
        number = int(row["at"].rpartition(":")[2])
        assert texts[number - 1]["text"] == row["text"]


def test_a_cache(settings, task, tmp_path):
    phases = [{"cache": {"splits": ["transfer", "validation"]}}, LIVE]
    message = refused(settings, phases, tmp_path)
    assert message.startswith("teachers.second: ") and "Its weights are damaged" in message
    check_examples(message, task / "transfer.jsonl")


@pytest.fixture
def broken_lm(masked_lm_settings, tmp_path):
    """A recipe whose masked-LM teacher has a broken word, which masks do not show as another."""
    from transformers import BertForMaskedLM

    model = make_tiny_bert(tmp_path / "bert", toy_vocabulary())
    sound = make_tiny_bert(tmp_path / "student", toy_vocabulary())
    break_word(model, BertForMaskedLM, WORD)
    made = {**masked_lm_settings, "student": {"model": str(sound)}}
    made["teachers"] = {"bert": {"model": str(model)}}
    made["task"] = {**made["task"], "masking": {"rate": 0.2, "seed": 1, "shown": "mask"}}
    return made


def check_lines(message, split, settings):
    """It names lines of the split."""
    file = Path(settings["task"]["data"]["path"]) / f"{split}.txt"
    lines = file.read_text().splitlines()
    for location, words in named(message):
        name, _, number = location.rpartition(":")
        assert name == str(file) and lines[int(number) - 1].startswith(words.removesuffix(" ..."))


def test_masked_lms(broken_lm, tmp_path):
    """The word is in every batch: all outputs are NaN."""
    message = refused(broken_lm, [{"evaluate": {"split": "test"}}], tmp_path)
    assert message.startswith("teachers.bert: ") and "of 60 examples of split test" in message
    check_lines(message, "test", broken_lm)
    message = refused(broken_lm, [{"distil": KL}], tmp_path / "live")
    assert message.startswith("teachers.bert: ") and "train.txt:" in message


def test_a_masked_lm_whose_layers_alone_are_read_is_named_by_its_outputs(broken_lm, tmp_path):
    """Where a layer is not finite, they are not either."""
    losses = {"cosine": {"rows": "tokens"}, "attention_kl": {"layers": {2: 2, 1: 1}}}
    message = refused(broken_lm, [{"distil": {"losses": losses}}], tmp_path)
    assert message.startswith("teachers.bert: its outputs for "), message
    check_lines(message, "train", broken_lm)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "txt"])
def test_sources_tell_where_a_text_stands(kind, tmp_path):
    """Past what is no example, and the first of those with the same text."""
    file = tmp_path / f"train.{kind}"
    texts = ["one", "two, of\ntwo lines", "three", "one", "four"]
    # Of csv after the header, and a text of two lines in both columns; of lines with blank ones.
    at = {"csv": (2, 6, 8), "jsonl": (1, 5, 9), "parquet": (1, 3, 5), "txt": (1, 3, 7)}
    expected = dict(zip(("one", "three", "four"), at[kind], strict=True))
    columns = {"text_b": "other"} if kind in ("csv", "jsonl") else {}
    rows = [
        {"text": text, "other": f"beside {text}", "label": "ab"[n % 2]}
        for n, text in enumerate(texts)
    ]
    if kind in ("csv", "parquet"):
        write(file, rows)
    else:
        lines = [*map(json.dumps, rows)] if kind == "jsonl" else ["one", "three", "one", "four"]
        file.write_text("\n\n".join(lines) + "\n")
    settings = {"data": {"path": str(file), "columns": columns}}
    task = TypeAdapter(Task).validate_python(
        {**settings, **({"type": "masked-lm"} if kind == "txt" else {})}
    )
    source = open_source(task, tmp_path / "cache")
    wanted = list(expected)
    beside = [f"beside {text}" for text in wanted] if columns else None
    keys = [tuple(key) for key in content_keys(wanted, beside).tolist()]
    found = source.locations("train", {*keys, (0, 0)})
    between = ", row " if kind == "parquet" else ":"
    assert found == {
        key: f"{file}{between}{expected[text]}" for key, text in zip(keys, wanted, strict=True)
    }


@pytest.mark.parametrize(
    ("skipped", "scale", "is_astray"),
    [
        (9, None, False),
        (10, None, True),
        (10, LossScale(4.0, 1.0), False),
        (49, LossScale(1024.0, None), False),
        (50, LossScale(1024.0, None), True),
        (2, LossScale(1.0, 1.0), True),
    ],
)
def test_a_training_has_gone_astray_after_so_many_skipped_steps(skipped, scale, is_astray):
    """In fp16 also where the scale is at its least, at which DeepSpeed raises in the next one."""
    progress = Progress(step=70, skipped_in_a_row=skipped)
    assert (why_astray(progress, scale) is not None) is is_astray
