"""A task's data, without a run."""

import copy
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from kinds import change, write
from toys import make_tiny_bert

from ds_distill.data.open_source import open_source
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.models.reference import ModelReference
from ds_distill.recipe import LONE_TASK, Recipe
from ds_distill.recipe.load import validate
from ds_distill.recipe.tasks import TASKS
from ds_distill.tasks.kind import TaskData


class Made:
    """The data of a recipe's task, in a folder of their own, and the bars that were shown."""

    def __init__(self, settings, folder, *models):
        recipe = validate(Recipe, settings)
        task = recipe.tasks_by_name[LONE_TASK]
        source = open_source(task)
        kind = TASKS[task.type].load()(task, source.labels)
        self.bars = []
        self.models = [ModelReference(path.name, str(path)) for path in models]
        self.data = TaskData(
            recipe,
            LONE_TASK,
            source,
            folder,
            World.start(),
            kind=kind,
            models=lambda: self.models,
            bar=self.bar,
        )

    @contextmanager
    def bar(self, label, total):
        self.bars.append(label)
        yield SimpleNamespace(advance=lambda steps: None)


def test_equal_tokenizers_share_a_table_that_is_made_once(
    masked_lm_settings, tiny_models, tmp_path
):
    again = shutil.copytree(tiny_models["toy"], tmp_path / "again")
    settings = copy.deepcopy(masked_lm_settings)
    for bars in (
        ["tokenises test for toy"],
        [],  # another process finds the files
    ):
        made = Made(settings, tmp_path / "data", tiny_models["toy"], again)
        tables = made.data.tables("test", made.models)
        assert tables["toy"] is tables["again"]
        assert made.bars == bars
        assert len(made.data.examples("test")) == len(tables["toy"].lengths)
        tokenizer, known = made.data.shared_tokens(made.models)
        assert known == len(tokenizer) == made.data.vocabulary(made.models[0])


def test_rows_that_pad_a_vocabulary_are_no_tokens(masked_lm_settings, tiny_models, tmp_path):
    padded = shutil.copytree(tiny_models["toy"], tmp_path / "padded")
    change(padded / "config.json", vocab_size=128)
    made = Made(copy.deepcopy(masked_lm_settings), tmp_path / "data", tiny_models["toy"], padded)
    toy, other = made.models
    tokens = len(made.data.tokenizer(toy))
    assert made.data.rows(other) == 128 > tokens == made.data.rows(toy)
    assert made.data.taught_tokens([other, toy]) == {"padded": tokens, "toy": tokens}
    assert made.data.shared_tokens([other, toy])[1] == tokens


@pytest.mark.parametrize("trains", [True, False])
def test_the_training_split_is_of_the_first_training(
    masked_lm_settings, tiny_models, tmp_path, trains
):
    settings = copy.deepcopy(masked_lm_settings)
    *trainings, evaluation = settings["phases"]
    trainings[0]["fine-tune"]["split"] = "validation"
    settings["phases"] = [*trainings, evaluation] if trains else [evaluation]
    made = Made(settings, tmp_path, tiny_models["toy"])
    assert made.data.training_split == ("validation" if trains else None)


def test_what_fits_routing_is_no_training(toy_settings, tiny_models, tmp_path):
    phases = [{"expertise": {"split": "validation"}}, *toy_settings["phases"]]
    made = Made({**toy_settings, "phases": phases}, tmp_path, tiny_models["toy"])
    assert made.data.training_split == "train"


def test_texts_stay_where_they_are_and_a_split_that_has_changed_is_refused(
    toy_settings, toy_task, tiny_models, tmp_path
):
    source = shutil.copytree(toy_task, tmp_path / "source")
    task = {**toy_settings["task"], "data": {"path": str(source)}}
    settings = {**toy_settings, "task": task}
    made = Made(settings, tmp_path / "data", tiny_models["toy"])
    tables = made.data.tables("train", made.models)
    assert len(made.data.examples("train")) == len(tables["toy"].lengths)
    names = {file.name.partition("-")[0] for file in (tmp_path / "data" / "train").iterdir()}
    assert names == {"examples.json", "tokens"}, "no copy of the texts"
    first, *lines = (source / "train.jsonl").read_text().splitlines(keepends=True)
    for changed in (lines, [first.replace("animal", "food"), *lines]):
        (source / "train.jsonl").write_text("".join(changed))
        with pytest.raises(UserError, match="split train is not what the run began with"):
            Made(settings, tmp_path / "data", tiny_models["toy"]).data.examples("train")


@pytest.mark.parametrize("kind", ["token-classification", "extractive-qa"])
def test_a_later_model_that_lacks_tokens_of_rows_is_refused(kind, tiny_models, tmp_path):
    """One that reads letters has no room for the windows of words that another fills."""
    words = ["cat", "dog"] * 30
    row = {"tokens": words, "tags": ["O"] * 60, "question": "we saw", "context": " ".join(words)}
    row["answers"] = [{"text": "cat", "start": 0}]
    write(tmp_path / "source" / "train.jsonl", [row])
    labels = {"labels": ["O", "B-x"]} if kind == "token-classification" else {}
    task = {"type": kind, "data": {"path": str(tmp_path / "source")}, "max_length": 32, **labels}
    phases = [{"fine-tune": {"models": "toy"}}]
    models = {"teachers": {"toy": {"model": "m"}}, "student": {"model": "m"}}
    training = {"learning_rate": 1.0e-3, "batch_size": 8, "epochs": 1}
    settings = {"name": "x", "task": task, **models, "training": training, "phases": phases}
    made = Made(settings, tmp_path / "data", tiny_models["toy"])
    assert len(made.data.examples("train")) > 1
    letters = [*"catdogwes", *(f"##{letter}" for letter in "catdogwes")]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    other = make_tiny_bert(tmp_path / "letters", [*special, *letters])
    with pytest.raises(UserError, match="letters cuts texts into other tokens"):
        made.data.tables("train", [ModelReference("letters", str(other))])
