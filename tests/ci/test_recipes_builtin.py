"""The thesis's runs end to end with tiny models on the real tweets, three teachers with three
tokenizers together."""

import json
import shutil

import pytest
import torch
import transformers as tr
from unit.test_recipes_builtin import THESIS

from ds_distill.check.check import check_recipe
from ds_distill.recipe import load_recipe

STUDENTS = ["expertise", "average", "random"]
TEACHERS = ["bert", "roberta", "deberta"]
HUB = {
    "google-bert/bert-base-uncased": "bert",
    "google-bert/bert-large-uncased": "bert",
    "FacebookAI/roberta-base": "roberta",
    "roberta-large": "roberta",  # the name without its organisation is found, too
    "microsoft/deberta-v3-base": "deberta",
    "microsoft/deberta-v3-large": "deberta",
}


@pytest.fixture(scope="module")
def models_folder(tiny_models, tmp_path_factory):
    """Tiny stand-ins under the names of the hub, the way `models_folder` looks for them."""
    root = tmp_path_factory.mktemp("hub")
    for name, tiny in HUB.items():
        place = root / name
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(tiny_models[tiny], target_is_directory=True)
    distilbert = root / "distilbert" / "distilbert-base-uncased"
    words = len(tr.AutoTokenizer.from_pretrained(tiny_models["bert"]))
    config = tr.DistilBertConfig(vocab_size=words, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tr.DistilBertModel(config).save_pretrained(distilbert)
    for file in tiny_models["bert"].glob("*token*"):
        shutil.copy(file, distilbert)
    return root


@pytest.fixture(scope="module")
def run(ds_distill, models_folder, shared_data, tmp_path_factory):
    """The folder of tweeteval-emotion on a small share of the tweets, with one epoch per phase."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    few = ["task.data.config=null", "task.data.per_class={train: 16, validation: 16, test: 20}"]
    trained = (*(f"teach-{teacher}" for teacher in TEACHERS), "control", "distil")
    few += [f"phases.{name}.epochs=1" for name in trained]
    few += [f"task.data.path={shared_data / 'tweeteval_emotion'}", f"models_folder={models_folder}"]
    ds_distill("run", "tweeteval-emotion", *few, "--folder", folder)
    return folder


@pytest.mark.parametrize("name", THESIS)
def test_local_models_take_the_place_of_the_hubs(name, models_folder):
    check_recipe(load_recipe(name, [f"models_folder={models_folder}"]))


def test_the_thesis_runs_on_real_tweets(run):
    labels = ["anger", "joy", "optimism", "sadness"]
    results = json.loads((run / "results.json").read_text())
    models = results["phases"][-1]["models"]
    roles = {"fine-tuned-student": "control", **dict.fromkeys(TEACHERS, "teacher")}
    roles |= dict.fromkeys(STUDENTS, "student")
    assert {name: model["role"] for name, model in models.items()} == roles
    assert all(list(model["per_class"]) == labels for model in models.values())
    assert all(model["examples"] == 80 for model in models.values())
    assert results["student"] in STUDENTS
    assert (run / "report.html").stat().st_size > 0
    # Each teacher read the tweets in its own tokens. BERT's are the student's, too.
    assert len([*(run / "data" / "train").glob("tokens-*.arrow")]) == 3


def test_the_shipped_student_loads_and_answers(run):
    folder = run / "student"
    model = tr.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = tr.AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "DistilBertForSequenceClassification"
    assert model.config.id2label == {0: "anger", 1: "joy", 2: "optimism", 3: "sadness"}
    logits = model(**tokenizer("so happy to be here", return_tensors="pt")).logits
    assert logits.shape == (1, 4) and torch.isfinite(logits).all()
