"""A masked-LM teacher's signals are cached per mask variant, and a student trains from the cache as
from the live teacher."""

import copy

import torch
from e2e.test_masked_lm_cache import LOSSES, VARIANTS, cache, curve, distil, recipe, run  # noqa: F401
from runs import results, written
from toys import make_tiny_bert, toy_vocabulary
from transformers import BertForMaskedLM

from ds_distill.cache.reader import CacheReader
from ds_distill.caching.fidelity import MUCH

CODECS_AND_STATES = [("dense", []), ("dense", [-1]), ("compact", [-1])]


def test_ranks_without_a_chosen_token_train_from_every_codec(recipe, ds_distill, tmp_path):
    """One text per micro-step; some have no masked token in either variant. Logits are as wide as a
    real vocabulary's, with states beside them and without."""
    words = [*toy_vocabulary(), *(f"filler{number}" for number in range(9000))]
    model = make_tiny_bert(tmp_path / "wide", words)
    BertForMaskedLM.from_pretrained(model).save_pretrained(model)
    task, texts = copy.deepcopy(recipe["task"]), tmp_path / "texts"
    texts.mkdir()
    lines = ["cat dog", "rain", "soup snow", "a day", "whale"] * 2 + ["fox and wolf and bear"] * 2
    (texts / "train.txt").write_text("".join(f"{line} {at}\n" for at, line in enumerate(lines)))
    task["data"]["path"], task["max_length"] = str(texts), 8
    phases = []
    for codec, hidden in CODECS_AND_STATES:
        name = f"{codec}-{len(hidden)}"
        kept = cache(f"keep-{name}", name=codec, temperature=2.0)
        kept["cache"]["hidden"] = hidden
        step = distil(name, "cached")
        step["distil"] |= {"batch_size": 12, "micro_batch_size": 1, "epochs": 1, "keep": "last"}
        if hidden:
            step["distil"]["losses"] = {**LOSSES, "hidden_mse": {}}
        phases += [kept, step]
    named = {"teachers": {"bert": {"model": str(model)}}, "student": {"model": str(model)}}
    settings = {**recipe, **named, "task": task, "phases": phases}
    written(settings, tmp_path)
    command = ["launch", "recipe.yaml", "--num-gpus", "2", "--folder", tmp_path / "run"]
    done = ds_distill(*command, cwd=tmp_path)
    reader = CacheReader(tmp_path / "run" / "cache" / "00-keep-dense-0")
    rows = reader.indices(torch.from_numpy(reader._index.keys))
    tokens = [len(reader.read("bert", rows[at : at + 1])) for at in range(len(rows))]
    assert 0 in tokens and sum(tokens) > 0
    first = curve(tmp_path, "dense-0", "cross_entropy")
    for codec, hidden in CODECS_AND_STATES:
        name = f"{codec}-{len(hidden)}"
        assert torch.equal(curve(tmp_path, name, "cross_entropy"), first)
        assert curve(tmp_path, name, "loss").isfinite().all()
    caches = [one for one in results(tmp_path / "run")["phases"] if "fidelity" in one]
    lost = [cache["fidelity"]["bert"]["lost"] for cache in caches]
    assert lost[0] < 1e-3 and len(lost) == len(CODECS_AND_STATES)
    assert done.stdout.count("WARNING:") == sum(share > MUCH for share in lost)
