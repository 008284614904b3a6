"""Masked-LM as a task: its recipe, its texts, its masks, its models, its numbers."""

import gzip
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kinds import texts_split
from transformers import AutoTokenizer, BertConfig

from ds_distill.data.batches import Collator, Units
from ds_distill.data.masking import Masking, masked_rows
from ds_distill.data.open_source import open_source
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.predict import score_tokens
from ds_distill.errors import UserError
from ds_distill.evaluation.predictions import TokenScores
from ds_distill.evaluation.scores import build_metrics, model_report
from ds_distill.keys import content_keys
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import check_masked_lm
from ds_distill.models.load import MASKED_LM, load_model
from ds_distill.recipe.tasks import Data, MaskedLM
from ds_distill.types import Signals

TEXTS = ["the cat and the dog", "rain", "soup with bread and cheese", "a new day", "fog, snow."]


# ------------------------------------------------------------------------------------ texts


def read(path, cache, **data):
    task = MaskedLM(data=Data.model_validate({"path": str(path), **data}))
    return open_source(task, cache).read("train")


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_a_line_is_a_text(name, tmp_path):
    content = "\ufeff first , with = signs =\r\n\n   \nzwei ä\tß\nzwei ä\tß\nlast without an end"
    (tmp_path / name).write_bytes(
        gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
    )
    found = read(tmp_path, tmp_path / "cache")
    texts = ["first , with = signs =", "zwei ä\tß", "zwei ä\tß", "last without an end"]
    assert list(found["text"]) == texts
    keys = np.stack([found["key_hi"], found["key_lo"]], axis=1)
    np.testing.assert_array_equal(keys, content_keys(texts))


def test_other_files_are_read_without_looking_at_their_labels(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\nfirst,x\nsecond,\n", encoding="utf-8")
    found = read(tmp_path, tmp_path / "cache")
    assert list(found["text"]) == ["first", "second"] and set(found["label"]) == {-1}


# ------------------------------------------------------------------------------------ masks


def make_collator(folder, model, cached=None, **options):
    split = texts_split(TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    table = TokenTable(tokenise(split, tokenizer, 16, folder / "tokens.arrow"), tokenizer)
    masking = Masking.of(tokenizer, rate=0.4, seed=4)
    rows = masked_rows(masking, **options)
    return Collator(Units.of(split), {"student": table}, rows, cached)


def test_epochs_cycle_through_a_fixed_number_of_mask_variants(tmp_path, tiny_models):
    everything = np.arange(len(TEXTS))
    free = make_collator(tmp_path, tiny_models["toy"])
    three = make_collator(tmp_path, tiny_models["toy"], variants=3)
    shown = [free(everything, epoch).views["student"].input_ids for epoch in range(6)]
    assert not torch.equal(shown[0], shown[3])
    for epoch in range(6):
        assert torch.equal(three(everything, epoch).views["student"].input_ids, shown[epoch % 3])


def test_cached_signals_belong_to_the_batch_or_are_refused(tmp_path, tiny_models):
    calls = []
    too_many = 0

    def cached(numbers, epoch):
        calls.append((numbers.tolist(), epoch))
        chosen = plain(numbers, epoch)
        rows = len(chosen.row_sets["all"])
        return {"bert": Signals(torch.ones(rows + too_many, 3), {-1: torch.ones(rows, 2)})}

    plain = make_collator(tmp_path, tiny_models["toy"], variants=3)
    collate = make_collator(tmp_path, tiny_models["toy"], variants=3, cached=cached)
    batch = collate(np.array([3, 0, 2]), 7)
    assert calls == [([3, 0, 2], 7)]
    assert len(batch.signals["bert"]) == len(batch.labels) == len(batch.keys) > 1
    assert batch.row_sets["all"].tolist() == list(range(len(batch.labels)))
    # No example: one dummy row, which is counted nowhere.
    batch = collate(np.array([], dtype=np.int64), 7)
    assert not len(batch.row_sets["all"])
    # Of an example in which no token was chosen, too.
    for epoch in range(3):
        batch = collate(np.array([1]), epoch)
        if not len(batch.row_sets["all"]):
            break
    assert not len(batch.row_sets["all"]) and batch.labels.tolist() == [-100]
    assert batch.signals["bert"].logits.tolist() == [[0.0] * 3]
    assert batch.views["student"].positions.tolist() == [0]
    before = len(calls)
    assert collate(np.array([3, 0, 2]), 7, signals=False).signals == {} and len(calls) == before
    too_many = 1
    with pytest.raises(ValueError, match=r"has \d+ rows of teacher 'bert' for a batch of \d+"):
        collate(np.array([3, 0, 2]), 7)


def test_every_token_may_be_a_row_and_the_masks_stay(tmp_path, tiny_models):
    plain = make_collator(tmp_path, tiny_models["bert"])
    every = make_collator(tmp_path, tiny_models["bert"], every_token=True)
    for indices in (np.arange(len(TEXTS)), np.array([1]), np.zeros(0, dtype=np.int64)):
        one, all_tokens = plain(indices), every(indices)
        view, other = one.views["student"], all_tokens.views["student"]
        assert torch.equal(view.input_ids, other.input_ids)
        tokens, masked = all_tokens.row_sets["tokens"], all_tokens.row_sets["all"]
        assert torch.equal(masked, all_tokens.row_sets["labelled"])
        if not len(indices):  # ranks stay in step, and nothing is counted
            assert len(tokens) == len(masked) == 0 and len(other.example_indices) > 0
            continue
        assert len(tokens) == len(all_tokens.labels) == int(other.attention_mask.sum())
        counted = one.row_sets["all"]
        assert torch.equal(other.positions[masked], view.positions[counted])
        assert torch.equal(all_tokens.labels[masked], one.labels[counted])
        assert int((all_tokens.labels >= 0).sum()) == len(masked)


def test_views_of_unlike_lengths_are_refused(tmp_path, tiny_models):
    """A row is one token in all views: with other lengths it would be another one in each."""
    split = texts_split(TEXTS)
    tables = {}
    for name, family in {"student": "bert", "teacher": "roberta"}.items():
        tokenizer = AutoTokenizer.from_pretrained(tiny_models[family])
        tables[name] = TokenTable(tokenise(split, tokenizer, 16), tokenizer)
    masking = Masking.of(tokenizer, 0.5, 0)
    assert not np.array_equal(tables["student"].lengths, tables["teacher"].lengths)
    with pytest.raises(ValueError, match="must have the same tokens"):
        Collator(Units.of(split), tables, masked_rows(masking))(np.arange(len(TEXTS)))


# ----------------------------------------------------------------------------------- models


def test_a_new_head_is_tied_to_the_embeddings_and_the_same_each_time(tiny_models):
    path = str(tiny_models["toy"])
    with pytest.raises(UserError, match=r"no weights for cls\.predictions.*no trained masked-LM"):
        load_model(MASKED_LM, path, new_head=False)
    first = load_model(MASKED_LM, path, new_head=True, layers=[1], seed=5)
    again = load_model(MASKED_LM, path, new_head=True, layers=[1], seed=5)
    other = load_model(MASKED_LM, path, new_head=True, layers=[1], seed=6)
    assert first.config.num_hidden_layers == len(first.bert.encoder.layer) == 1
    assert first.cls.predictions.decoder.weight is first.get_input_embeddings().weight
    dense = [model.cls.predictions.transform.dense.weight for model in (first, again, other)]
    assert torch.equal(dense[0], dense[1]) and not torch.equal(dense[0], dense[2])


def test_a_model_without_a_known_head_is_refused(tiny_models):
    tokenizer = AutoTokenizer.from_pretrained(tiny_models["toy"])
    from transformers import GPT2Config, RemBertConfig

    for config in (GPT2Config(), RemBertConfig()):
        with pytest.raises(UserError, match=f"{config.model_type}.* cannot be a masked-LM"):
            check_masked_lm("m", config, tokenizer)
    tokenizer.mask_token = None
    with pytest.raises(UserError, match="no mask token"):
        check_masked_lm("m", BertConfig(), tokenizer)


# ---------------------------------------------------------------------------------- numbers


def test_scores_are_those_of_a_plain_loop(world, tmp_path, tiny_models):
    """One text at a time through transformers' own forward, all logits at once."""
    collate = make_collator(tmp_path, tiny_models["toy"])
    models = {
        name: load_model(MASKED_LM, str(tiny_models["toy"]), new_head=True, seed=seed).eval()
        for seed, name in enumerate(("first", "second"))
    }
    for name in models:
        collate._tables[name] = collate._tables["student"]
    engine = Engine(Bundle(None, models), deepspeed_config("zero0_fp32", None, 1), world)
    found = score_tokens(engine, collate, list(models), 2)
    for name, model in models.items():
        for number in range(len(TEXTS)):
            batch = collate(np.array([number]))
            view = batch.views[name]
            with torch.no_grad():
                logits = model(**view.model_inputs()).logits[0]
            loss, right, tokens = 0.0, 0, 0
            for row in batch.row_sets["all"]:
                position, label = view.positions[row], batch.labels[row]
                loss += F.cross_entropy(logits[position], label).item()
                right += int(logits[position].argmax() == label)
                tokens += 1
            assert found[name].loss[number] == pytest.approx(loss, rel=1e-5, abs=1e-9)
            assert (found[name].right[number], found[name].tokens[number]) == (right, tokens)
        assert found[name].own is None, "neither knows a token that the other does not"
    report = model_report(found["first"], build_metrics("masked tokens"))
    total = found["first"].tokens.sum()
    assert report["tokens"] == total > len(TEXTS) / 2
    assert report["perplexity"] == pytest.approx(math.exp(found["first"].loss.sum() / total))


def test_without_masked_tokens_there_is_nothing_to_measure():
    nothing = np.zeros(3)
    with pytest.raises(UserError, match=r"task\.masking\.rate"):
        model_report(TokenScores(nothing, nothing, nothing), build_metrics("masked tokens"))
