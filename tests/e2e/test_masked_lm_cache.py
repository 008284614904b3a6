"""A masked-LM teacher's signals are cached per mask variant, and a student trains from the cache as
from the live teacher."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from runs import logged, results, written
from transformers import BertForMaskedLM

VARIANTS = 2
LOSSES = {"cross_entropy": {}, "kl": {"temperature": 2.0}}


def cache(phase, /, **codec):
    kept = {"splits": "train", "dtype": "float32", "batch_size": 16, "codec": codec}
    return {"cache": {"name": phase, **kept}}


def distil(name, teachers):
    return {
        "distil": {"name": f"distil-{name}", "teachers": teachers, "losses": LOSSES}
        | {"save_as": name, "epochs": VARIANTS + 1}
    }


@pytest.fixture(scope="module")
def recipe(masked_lm_settings):
    data = copy.deepcopy(masked_lm_settings)
    data["task"]["masking"] = {**data["task"].get("masking", {}), "variants": VARIANTS}
    data["phases"] = [
        {"fine-tune": {"models": "bert", "epochs": 2}},
        distil("live", "live"),
        cache("whole", name="dense"),
        distil("dense", "cached"),
        cache("small", name="compact", threshold=1e-4, temperature=2.0),
        distil("compact", "cached"),
    ]
    data["logging"] = {"every": 1}
    data["padding"] = "never"
    return data


@pytest.fixture(scope="module")
def run(recipe, ds_distill, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked-lm-cache")
    return finished(recipe, folder, ds_distill)


def finished(recipe, folder, ds_distill):
    written(recipe, folder, "mlm")
    ds_distill("run", "mlm.yaml", "--folder", folder / "run", cwd=folder)
    return folder


def curve(run, student, term):
    steps = [event[term] for event in logged(run / "run", "train", student)]
    return torch.tensor(steps, dtype=torch.float64)


def test_dense_signals_train_as_the_live_teacher_does(run):
    live = curve(run, "live", "loss")
    assert len(live) > 3 * (VARIANTS + 1)
    # The teacher's batches were others, so that its sums were rounded in another order.
    torch.testing.assert_close(curve(run, "dense", "loss"), live, rtol=1e-4, atol=0)


def test_the_cache_is_compared_with_the_teacher_run_again(run):
    """dense keeps float32: what is left is the teacher's own, from one batch to another."""
    caches = [one for one in results(run / "run")["phases"] if "fidelity" in one]
    whole, small = (record["fidelity"]["bert"]["lost"] for record in caches)
    assert whole < 1e-6 < small < 0.05


def test_encoded_logits_train_within_the_codecs_error(run):
    """All entries of the toy vocabulary are kept, in 4 bits each."""
    live, packed = curve(run, "live", "kl"), curve(run, "compact", "kl")
    cross_entropy = [curve(run, name, "cross_entropy")[0] for name in ("live", "compact")]
    assert cross_entropy[0] == cross_entropy[1], "masks and labels are the live run's"
    assert (packed / live - 1).abs()[:10].max() < 0.05
    assert packed[-1] < 0.5 * packed[0]


def test_rows_that_pad_a_vocabulary_say_nothing(run, recipe, ds_distill, tmp_path):
    """A teacher whose embeddings are padded, with nearly all its probability on the padding, and a
    student whose are padded further learn what they do without, live and from a cache."""
    [teacher] = (run / "run" / "models").glob("00-*")
    models = {"teacher": teacher, "student": Path(recipe["student"]["model"])}
    torch.manual_seed(0)  # of the student's head
    for name, rows in (("teacher", 8), ("student", 20)):
        model = BertForMaskedLM.from_pretrained(models[name])
        for folder in (tmp_path / f"{name}-False", tmp_path / f"{name}-True"):
            shutil.copytree(models[name], folder)
            model.save_pretrained(folder)
            model.resize_token_embeddings(model.config.vocab_size + rows)
            with torch.no_grad():
                model.cls.predictions.bias[-rows:] = 30.0
    found = {}
    for padded in (False, True):
        given = copy.deepcopy(recipe)
        given["teachers"]["bert"]["model"] = str(tmp_path / f"teacher-{padded}")
        given["student"]["model"] = str(tmp_path / f"student-{padded}")
        live, cached = (distil(name, name) for name in ("live", "cached"))
        live["distil"]["losses"] = cached["distil"]["losses"] = {"kl": {"temperature": 2.0}}
        given["phases"] = [live, cache("small", temperature=2.0), cached]
        folder = tmp_path / f"padded-{padded}"
        folder.mkdir()
        finished(given, folder, ds_distill)
        found[padded] = {name: curve(folder, name, "kl") for name in ("live", "cached")}
    for name, plain in found[False].items():
        # Padded matrices are multiplied in other blocks, so that sums are rounded in another order.
        torch.testing.assert_close(found[True][name], plain, rtol=1e-3, atol=1e-5)


def test_a_cache_of_other_masks_is_refused(run, recipe, ds_distill):
    other = copy.deepcopy(recipe)
    [teacher] = (run / "run" / "models").glob("00-*")
    other["teachers"]["bert"]["model"] = str(teacher)
    other["task"]["masking"]["seed"] = 5
    shared = {**recipe["phases"][2]["cache"], "folder": str(run / "run" / "cache" / "02-whole")}
    other["phases"] = [{"cache": shared}, recipe["phases"][3]]
    written(other, run, "other")
    done = ds_distill("cache", "build", "other.yaml", "--folder", run / "other", cwd=run, code=2)
    assert "masking" in done.stderr and "'seed': 1" in done.stderr and "'seed': 5" in done.stderr
