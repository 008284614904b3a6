"""The recipes with 24-layer teachers, with models of real size and random weights, on two ranks: a
few steps of each phase on real texts. 25 GB of disk, 16 GB of memory, minutes."""

import gzip
import json
import math
import shutil
from itertools import islice
from pathlib import Path

import pytest
import yaml
from processes import events
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertTokenizer,
    RobertaTokenizer,
)

import ds_configs
from ds_distill.recipe import dump_recipe, load_recipe

CONFIGS = Path(ds_configs.__file__).parent / "models"
MODELS = {
    "google-bert/bert-large-uncased": 335_174_458,
    "FacebookAI/roberta-large": 355_412_057,
    "microsoft/deberta-v3-large": 435_061_760,
    "distilbert/distilbert-base-uncased": 66_985_530,
}
"""Their parameters, the head of a masked-LM included."""


@pytest.fixture(scope="module")
def models(tmp_path_factory, shared_data):
    """A folder of random models, masked-LMs as the published ones are, with real vocabularies."""
    folder, vocabs = tmp_path_factory.mktemp("large"), shared_data / "vocabs"
    for name in MODELS:
        (folder / name).mkdir(parents=True)
        config = AutoConfig.from_pretrained(CONFIGS / name)
        AutoModelForMaskedLM.from_config(config).save_pretrained(folder / name)
        tokenizer = tokenizer_of(name, folder / name, vocabs)
        tokenizer.save_pretrained(folder / name)
    yield folder
    shutil.rmtree(folder)


def tokenizer_of(name, folder, vocabs):
    if "roberta" in name:
        files = (vocabs / "roberta-base" / "vocab.json", vocabs / "roberta-base" / "merges.txt")
        return RobertaTokenizer(*map(str, files))
    if "deberta" in name:
        shutil.copyfile(vocabs / "deberta-v3-base" / "spm.model", folder / "spm.model")
        return AutoTokenizer.from_pretrained(folder)
    words = (vocabs / "bert-base-uncased" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})


@pytest.fixture(scope="module")
def texts(tmp_path_factory, shared_data):
    folder = tmp_path_factory.mktemp("texts")
    files = {"train": "wikipedia_en_train.txt.gz", "test": "wikitext2_test.txt.gz"}
    for split, name in files.items():
        with gzip.open(shared_data / "raw_general" / name, "rt", encoding="utf-8") as lines:
            (folder / f"{split}.txt").write_text("".join(islice(filter(str.strip, lines), 40)))
    return folder


def written(name, models, data, folder):
    """The recipe with few, small steps and examples; models, phases, losses, stage and dtype are
    its own."""
    settings = yaml.safe_load(dump_recipe(load_recipe(name)))
    settings["task"]["data"] |= {"config": None, "limit": {"train": 16, "test": 4}, **data}
    settings["task"]["max_length"] = 32
    for phase in (next(iter(phase.values())) for phase in settings["phases"]):
        if "learning_rate" in phase:
            phase |= {"steps": 2, "batch_size": 8, "micro_batch_size": 4}
    settings |= {"models_folder": str(models), "logging": {"every": 1}}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


@pytest.mark.parametrize("name", ["large-teachers", "large-masked-lm"])
def test_a_recipe_of_large_teachers_runs_live_and_cached(
    name, models, texts, shared_data, ds_distill, tmp_path
):
    data = {"path": str(texts), "splits": {}}
    if name == "large-teachers":
        splits = {"train": "train", "validation": "val", "test": "test"}
        data = {"path": str(shared_data / "tweeteval_emotion"), "splits": splits}
    recipe = written(name, models, data, tmp_path)
    first = {}
    for teachers in ("live", "cached"):
        folder = tmp_path / teachers
        command = ["launch", recipe, "--num-gpus", "2", "--folder", folder]
        command += [f"phases.distil.teachers={teachers}"]
        ds_distill(*command, cwd=tmp_path, timeout=3600)
        losses = [event for event in events(folder) if event["event"] == "train"]
        assert losses and all(math.isfinite(event["loss"]) for event in losses)
        first[teachers] = next(e["kl"] for e in losses if e["phase"] == "student")
        results = json.loads((folder / "results.json").read_text())
        [judged] = [record for record in results["phases"] if record["kind"] == "evaluate"]
        assert results["student"] in judged["models"]
        shutil.rmtree(folder)
    # Under a cache teachers ran once, in batches of another size; in bf16 their words differ.
    assert first["live"] == pytest.approx(first["cached"], rel=0.05)


def test_the_models_are_of_real_size(models):
    for name, parameters in MODELS.items():
        model = AutoModelForMaskedLM.from_pretrained(models / name)
        assert model.num_parameters() == pytest.approx(parameters, rel=0.01), name
