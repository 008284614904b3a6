"""A student's vocabulary grows by words of the text, and it learns from a teacher that does not
know them (VE-KD)."""

import copy
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import curves, evaluation, interrupted, loaded, run_here
from safetensors.torch import load_file
from toys import TOY_FILLERS, recipe_of, toy_vocabulary
from transformers import AutoModelForMaskedLM, AutoTokenizer

from ds_distill import run_recipe
from ds_distill.data.tokenizer import tokens_fingerprint
from ds_distill.files import read_json
from ds_distill.recipe import LONE_TASK
from ds_distill.reporting.result_tables import evaluation_tables
from ds_distill.run.execute import execute
from ds_distill.run.run import Run

KNOWN = len(toy_vocabulary())
NEW = 46
WORDS = "zorbatin plumexol quivarene dracomase"


@pytest.fixture(scope="module")
def settings(tiny_models, tmp_path_factory):
    """Texts of words that the toy model knows, and of some that it spells."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    for split, size in {"train": 120, "test": 40}.items():
        lines = [
            " ".join([*draw.choices(TOY_FILLERS.split(), k=5), *[draw.choice(WORDS.split())] * 2])
            for _ in range(size)
        ]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return recipe_of("expanded", texts=folder, toy=tiny_models["toy"], size=str(KNOWN + NEW))


@pytest.fixture(scope="module")
def folder(settings, tmp_path_factory):
    """Of a run that was stopped between the expansion and the distillation, and resumed."""
    root = tmp_path_factory.mktemp("expanded")
    recipe = loaded(settings, root)

    def is_expanded(run, reference, **options):
        return reference.name == "student" and "models" in Path(reference.model).parts[-2:]

    with interrupted(Run, "model", is_expanded):
        run_recipe(recipe, root / "run")
    run_recipe(recipe, root / "run", resume=True)
    return root / "run"


def test_new_words_are_told(folder):
    record = read_json(folder / "phases" / "01-expand-vocabulary.json")
    assert (record["known"], record["added"]) == (KNOWN, NEW)
    assert set(record["most_frequent"]) >= set(WORDS.split())
    before, after = record["tokens_before"], record["tokens_after"]
    assert after == 9 and before > 2 * after  # five words, twice a new one, [CLS] and [SEP]
    assert record["share_of_tokens"] == pytest.approx(2 / 9)
    page = (folder / "report.html").read_text()
    assert "Words that were added" in page and "24.0, then 9.0" in page and "zorbatin" in page


def test_the_student_is_one_of_transformers(folder):
    model = AutoModelForMaskedLM.from_pretrained(folder / "student")
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    assert len(tokenizer) == model.config.vocab_size == KNOWN + NEW
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ids = tokenizer("we saw zorbatin")["input_ids"]
    assert len(ids) == 5 and ids[3] >= KNOWN
    started = load_file(folder / "models" / "01-student" / "model.safetensors")
    name = "bert.embeddings.word_embeddings.weight"
    moved = (model.state_dict()[name] - started[name]).norm(dim=1)
    used = [tokenizer.convert_tokens_to_ids(word) for word in WORDS.split()]
    assert moved[used].min() > 0.1


def test_the_teacher_is_judged_on_what_it_knows(folder):
    found = evaluation(folder)["models"]
    assert set(found) == {"bert", "student"}
    assert found["bert"]["role"] == "teacher" and found["student"]["role"] == "student"
    assert found["bert"]["tokens"] == found["student"]["tokens"] > 20
    own = found["student"]["own_tokens"]
    assert "own_tokens" not in found["bert"]
    new = 2 * 40  # of each text two words, always masked
    assert own["tokens"] == found["student"]["tokens"] + new


def test_models_of_two_vocabularies_are_compared_by_the_same_words(folder):
    """The teacher spells the new words; both are told the same and asked for the same."""
    [record] = [one for one in read_json(folder / "results.json")["phases"] if "models" in one]
    found = record["models"]
    assert found["bert"]["hidden_words"] == found["student"]["hidden_words"] > 20
    known = 1 + len(TOY_FILLERS.split())  # of random words nobody can do better than guess
    assert found["student"]["word_loss"] > math.log(known) / 2
    assert record["baseline"]["word_loss"] > 0
    texts = [(folder / "report.html").read_text(), (folder / "student" / "README.md").read_text()]
    assert "nats a word" in texts[0] and "nats a word" in texts[1]
    tables = "".join(map(str, evaluation_tables(record)))
    for part in (texts[0], tables):
        assert f"{found['student']['own_tokens']['tokens']:,}" in part
        assert f"{found['student']['own_tokens']['loss']:.3f}" in part


@pytest.mark.parametrize("long", ["split", "cut"])
def test_all_models_read_the_same_masked_tokens(long, settings, tmp_path, in_this_process):
    """Of texts that are longer than what models take, those of the grown vocabulary."""
    recipe = loaded(settings, tmp_path, f"task.long={long}", "task.max_length=8")
    run = execute(recipe, tmp_path / "run", first=2)[LONE_TASK]
    models = [replace(run.reference(name, 2), name=name) for name in ("bert", "student")]
    tables = run.data.tables("test", models)
    student = run.data.tables("test", models[1:])["student"]
    assert np.array_equal(tables["bert"].lengths, student.lengths)
    assert student.lengths.max() == 8
    # Windows are of the pieces that there were before.
    grown = tokens_fingerprint(run.data.tokenizer(models[1]))
    assert f"{grown}:input_ids" not in run.data.table("test").column_names
    assert any(name.endswith(":input_ids") for name in run.data.table("test").column_names) == (
        long == "split"
    )
    collate = run.collator(run.data.examples("test"), tables, models)
    batch = collate(np.arange(len(student.lengths)))
    teacher, own = batch.views["bert"], batch.views["student"]
    for name in ("input_ids", "attention_mask", "positions", "token_type_ids"):
        assert torch.equal(getattr(teacher, name), getattr(own, name)), name
    assert (own.input_ids < KNOWN).all() and (batch.labels >= KNOWN).any()


def test_old_rows_of_absent_words_move_by_weight_decay_alone(settings, tmp_path, in_this_process):
    """Where no loss is over the vocabulary, so that only what is read has a gradient. With
    cross-entropy the softmax over all words moves all of their rows."""
    made = copy.deepcopy(settings)
    made["phases"] = [*made["phases"][:2], {"distil": {"losses": {"cosine": {"rows": "tokens"}}}}]
    made["training"] |= {"weight_decay": 0.5}
    made["task"]["masking"]["shown"] = "mask"  # no random word is read
    root = run_here(made, tmp_path)
    name = "bert.embeddings.word_embeddings.weight"
    before, after = (
        load_file(root / "models" / folder / "model.safetensors")[name]
        for folder in ("01-student", "02-student")
    )
    rates = [curve[-1] for curve in curves(root) if curve[0] == 2]
    kept = np.prod([1 - 0.5 * rate for rate in rates])
    tokenizer = AutoTokenizer.from_pretrained(root / "student")
    absent = [*tokenizer.convert_tokens_to_ids(["tiger", "soup"]), *range(KNOWN, KNOWN + NEW)]
    assert kept < 0.99
    torch.testing.assert_close(after[absent], before[absent] * kept, rtol=1e-5, atol=1e-7)
    read = tokenizer.convert_tokens_to_ids(TOY_FILLERS.split())
    assert (after[read] - before[read] * kept).norm(dim=1).min() > 1e-3
