"""A masked-LM teacher's signals are cached per mask variant, and a student trains from the cache as
from the live teacher."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from toys import make_tiny_bert, toy_vocabulary
from transformers import BertForMaskedLM

from ds_distill.cache.reader import CacheReader
from ds_distill.caching.fidelity import MUCH

VARIANTS = 2
CODECS_AND_STATES: list[tuple[str, list[int]]] = [
    ("dense", []),
    ("dense", [-1]),
    ("topk", [-1]),
    ("compact", [-1]),
]
LOSSES = {"cross_entropy": {}, "kl": {"temperature": 2.0}}


def cache(phase: str, /, **codec: Any) -> dict[str, Any]:
    kept = {"splits": "train", "dtype": "float32", "batch_size": 16, "codec": codec}
    return {"cache": {"name": phase, **kept}}


def distil(name: str, teachers: str) -> dict[str, Any]:
    return {
        "distil": {"name": f"distil-{name}", "teachers": teachers, "losses": LOSSES}
        | {"save_as": name, "epochs": VARIANTS + 1}
    }


@pytest.fixture(scope="module")
def recipe(masked_lm_settings: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(masked_lm_settings)
    data["task"]["masking"] = {**data["task"].get("masking", {}), "variants": VARIANTS}
    data["phases"] = [
        {"fine-tune": {"models": "bert", "epochs": 2}},
        distil("live", "live"),
        cache("whole", name="dense"),
        distil("dense", "cached"),
        cache("top", name="topk", entries=200, temperature=2.0),
        distil("topk", "cached"),
        cache("small", name="compact", threshold=1e-4, temperature=2.0),
        distil("compact", "cached"),
    ]
    data["logging"] = {"every": 1}
    data["padding"] = "never"
    return data


@pytest.fixture(scope="module")
def run(recipe: dict[str, Any], ds_distill: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked-lm-cache")
    (folder / "mlm.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    done = ds_distill("run", "mlm.yaml", "--folder", folder / "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def curve(run: Path, student: str, term: str) -> torch.Tensor:
    events = map(json.loads, (run / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [e[term] for e in events if e["event"] == "train" and e["phase"] == student]
    return torch.tensor(steps, dtype=torch.float64)


def test_dense_signals_train_as_the_live_teacher_does(run: Path) -> None:
    live = curve(run, "live", "loss")
    assert len(live) > 3 * (VARIANTS + 1)
    # The teacher's batches were others, so that its sums were rounded in another order.
    torch.testing.assert_close(curve(run, "dense", "loss"), live, rtol=1e-4, atol=0)


def test_the_cache_is_compared_with_the_teacher_run_again(run: Path) -> None:
    """dense keeps float32: what is left is the teacher's own, from one batch to another."""
    near = {}
    for phase in ("02-whole", "04-top", "06-small"):
        record = json.loads((run / "run" / "phases" / f"{phase}.json").read_text())
        near[phase] = record["fidelity"]["bert"]
    assert all(0 < measured["batches"] < 1e-5 for measured in near.values())
    assert near["02-whole"]["cached"] < 1e-5
    assert 1e-5 < near["04-top"]["cached"] < 0.02 and 1e-5 < near["06-small"]["cached"] < 0.1


@pytest.mark.parametrize(("codec", "error"), [("topk", 0.02), ("compact", 0.05)])
def test_encoded_logits_train_within_the_codecs_error(run: Path, codec: str, error: float) -> None:
    """All entries of the toy vocabulary are kept, in 8 and 4 bits each."""
    live, packed = curve(run, "live", "kl"), curve(run, codec, "kl")
    cross_entropy = [curve(run, name, "cross_entropy")[0] for name in ("live", codec)]
    assert cross_entropy[0] == cross_entropy[1], "masks and labels are the live run's"
    assert (packed / live - 1).abs()[:10].max() < error
    assert packed[-1] < 0.5 * packed[0]


def test_rows_that_pad_a_vocabulary_say_nothing(
    run: Path, recipe: dict[str, Any], ds_distill: Any, tmp_path: Path
) -> None:
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
        given["phases"] = [distil("live", "live"), cache("top", name="topk", temperature=2.0)]
        given["phases"].append(distil("topk", "cached"))
        given["phases"][0]["distil"]["losses"] = given["phases"][2]["distil"]["losses"] = {
            "kl": {"temperature": 2.0}
        }
        folder = tmp_path / f"padded-{padded}"
        folder.mkdir()
        (folder / "mlm.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
        done = ds_distill("run", "mlm.yaml", "--folder", folder / "run", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        found[padded] = {name: curve(folder, name, "kl") for name in ("live", "topk")}
    for name, plain in found[False].items():
        # Padded matrices are multiplied in other blocks, so that sums are rounded in another order.
        torch.testing.assert_close(found[True][name], plain, rtol=1e-3, atol=1e-5)


@pytest.mark.further
def test_ranks_with_a_sharded_teacher_and_padding_write_the_same_signals(
    run: Path, recipe: dict[str, Any], ds_distill: Any
) -> None:
    [teacher] = (run / "run" / "models").glob("00-*")
    short = copy.deepcopy(recipe)
    short["teachers"]["bert"]["model"] = str(teacher)
    short["phases"] = [recipe["phases"][2], recipe["phases"][3]]
    short["padding"] = "always"
    (run / "two.yaml").write_text(yaml.safe_dump(short, sort_keys=False))
    command = ["cache", "build", "two.yaml", "deepspeed=zero3_fp32", "--num-gpus", "2"]
    done = ds_distill(*command, "--folder", run / "two", cwd=run)
    assert done.returncode == 0, done.stdout + done.stderr
    one = CacheReader(run / "run" / "cache" / "02-whole")
    two = CacheReader(run / "two" / "cache" / "00-whole")
    keys = torch.from_numpy(one._index.keys)
    assert two.holds(keys).all() and len(keys) == two.manifest.examples
    attention = [reader.manifest.teachers["bert"].fingerprint["attention"] for reader in (one, two)]
    assert attention == ["example by example", "padded"]
    for variant in range(VARIANTS):
        outputs = [
            reader.read("bert", reader.indices(keys), variant).logits for reader in (one, two)
        ]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.further
def test_ranks_without_a_chosen_token_train_from_every_codec(
    recipe: dict[str, Any], ds_distill: Any, tmp_path: Path
) -> None:
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
    (tmp_path / "none.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    command = ["launch", "none.yaml", "--num-gpus", "2", "--folder", tmp_path / "run"]
    done = ds_distill(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    reader = CacheReader(tmp_path / "run" / "cache" / "00-keep-dense-0")
    rows = reader.indices(torch.from_numpy(reader._index.keys))
    tokens = [len(reader.read("bert", rows[at : at + 1])) for at in range(len(rows))]
    assert 0 in tokens and sum(tokens) > 0
    first = curve(tmp_path, "dense-0", "cross_entropy")
    for codec, hidden in CODECS_AND_STATES:
        name = f"{codec}-{len(hidden)}"
        assert torch.equal(curve(tmp_path, name, "cross_entropy"), first)
        assert curve(tmp_path, name, "loss").isfinite().all()
    # A top of 64 loses most of so flat a teacher, and the build warns.
    lost = {
        record.stem[3:]: json.loads(record.read_text())["fidelity"]["bert"]["lost"]
        for record in (tmp_path / "run" / "phases").glob("*-keep-*.json")
    }
    assert lost["keep-dense-0"] < 1e-3 and lost["keep-topk-1"] > 0.5
    outputs = " ".join(done.stdout.split())
    assert outputs.count("WARNING:") == sum(share > MUCH for share in lost.values())
    assert "set in the cache phase codec: {name: compact}, or {name: dense}" in outputs


def test_a_cache_of_other_masks_is_refused(
    run: Path, recipe: dict[str, Any], ds_distill: Any
) -> None:
    other = copy.deepcopy(recipe)
    [teacher] = (run / "run" / "models").glob("00-*")
    other["teachers"]["bert"]["model"] = str(teacher)
    other["task"]["masking"]["seed"] = 5
    shared = {**recipe["phases"][2]["cache"], "folder": str(run / "run" / "cache" / "02-whole")}
    other["phases"] = [{"cache": shared}, recipe["phases"][3]]
    (run / "other.yaml").write_text(yaml.safe_dump(other, sort_keys=False))
    done = ds_distill("cache", "build", "other.yaml", "--folder", run / "other", cwd=run)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "masking" in done.stderr and "'seed': 1" in done.stderr and "'seed': 5" in done.stderr
