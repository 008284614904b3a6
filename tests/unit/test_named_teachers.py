"""The policy `column`: data name the teacher that an example follows."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from kinds import json_lines, write
from safetensors.torch import load_file
from toys import make_tiny_bert, make_toy_classifier, toy_vocabulary

from ds_distill import Batch, PaddedView, Router
from ds_distill.check.data import named_teacher_mistakes
from ds_distill.data.batches import Units
from ds_distill.data.groups import teacher_ids
from ds_distill.data.open_source import open_source
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.windows import split_long, word_windows
from ds_distill.errors import UserError
from ds_distill.keys import name_id
from ds_distill.recipe import Recipe
from ds_distill.recipe.tasks import TASKS
from ds_distill.types import Signals

NAMES = ["first", None, "second", "first"]


def written(folder, rows, split="train"):
    return write(folder / f"{split}.jsonl", rows).parent


def read(folder, kind="single-label", split="train", **data):
    settings = {"type": kind, "data": {"path": str(folder), **data}}
    task = TASKS[kind].model_validate(settings)
    return open_source(task, folder.with_suffix(".cache")).read(split)


def ids(names):
    return [name_id(name) if name else 0 for name in names]


def test_names_are_read_from_any_file(tmp_path):
    rows = [
        {"text": f"text {n}", "label": "ab"[n % 2], "who": name} for n, name in enumerate(NAMES)
    ]
    folder = written(tmp_path / "data", rows)
    written(folder, [{"text": "other", "label": "a"}], "test")
    columns = {"columns": {"teacher": "who"}}
    assert teacher_ids(read(folder, **columns)).tolist() == ids(NAMES)
    assert teacher_ids(read(folder)) is None
    assert teacher_ids(read(folder, split="test", **columns)) is None
    few = read(folder, limit={"train": 2}, **columns)
    assert teacher_ids(few).tolist() == ids([NAMES[int(text[-1])] for text in few["text"]])
    lines = "".join(f"text {n},{'ab'[n % 2]},{name or ''}\n" for n, name in enumerate(NAMES))
    (tmp_path / "one.csv").write_text("text,label,who\n" + lines)
    assert teacher_ids(read(tmp_path / "one.csv", **columns)).tolist() == ids(NAMES)
    other = {"splits": {"more": {"path": str(folder), "columns": {"teacher": "who"}}}}
    assert teacher_ids(read(folder, split="more", **other)).tolist() == ids(NAMES)
    with pytest.raises(UserError, match=r"'hwo' \(task.data.columns.teacher\).*who"):
        read(folder, columns={"teacher": "hwo"})
    written(folder, [*rows, {"text": "odd", "label": "a", "who": ["first"]}])
    with pytest.raises(
        UserError,
        match=r"train.jsonl:5: the teacher .* must be a name or a whole number, got a list",
    ):
        read(folder, **columns)


def test_windows_follow_the_teacher_of_the_whole(tmp_path):
    make_tiny_bert(tmp_path / "model", toy_vocabulary())
    tokenizer = load_tokenizer(str(tmp_path / "model"), None)
    of_words = load_tokenizer(str(tmp_path / "model"), None, of_words=True)
    columns = {"columns": {"teacher": "who"}}
    rows = [
        {"text": " ".join([word] * size), "tokens": [word] * size, "tags": ["O"] * size, "who": who}
        for word, size, who in zip("abcd", (3, 40, 90, 5), NAMES, strict=True)
    ]
    rows[0]["tags"][0] = "B-x"
    folder = written(tmp_path / "rows", rows)
    made = {
        "text": split_long(read(folder, "masked-lm", **columns), [tokenizer], 16),
        "words": word_windows(read(folder, "token-classification", **columns), [of_words], 16),
    }
    for column, windows in made.items():
        wanted = ids([NAMES["abcd".index(of_one[0][0])] for of_one in windows[column]])
        examples = Units.of(windows)
        assert examples.teacher_ids is not None and len(windows) > 8
        assert examples.teacher_ids.tolist() == wanted
        some = examples.at(np.array([3, 1])).teacher_ids
        assert some.tolist() == [wanted[3], wanted[1]]


def test_a_batch_of_ones_own_names_teachers():
    view = PaddedView(torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64))
    signals = {name: Signals(torch.randn(3, 2)) for name in ("first", "second")}
    batch = Batch.from_views({"student": view}, teacher_names=["second", None, "first"])
    target = Router("column")(signals, batch.to("cpu"))
    assert target.weights.tolist() == [[0, 0.5, 1], [1, 0.5, 0]]
    assert torch.equal(target.logits[0], signals["second"].logits[0])
    with pytest.raises(ValueError, match="the batch names none: give `teacher_names`"):
        Router("column")(signals, Batch.from_views({"student": view}))
    with pytest.raises(ValueError, match=r"teacher_names must be torch.int64 \[3\]"):
        Batch.from_views({"student": view}, teacher_names=["first"])


def test_a_teacher_that_may_be_left_out_is_not_named(toy_settings):
    """Its examples would follow the others alike without a word."""
    fits = {"expertise": {"leave_out": "unqualified"}}
    source = None  # no split is read
    for follow, says in (
        (None, ["may leave it out. Set follow: [first, second]"]),
        (["first"], []),
    ):
        distil = {"routing": "column", "follow": follow, "losses": {"kl": {}}}
        recipe = Recipe.model_validate({**toy_settings, "phases": [fits, {"distil": distil}]})
        found = [*map(str, named_teacher_mistakes(recipe, "task", source, {}))]
        assert len(found) == len(says) and all(map(str.__contains__, found, says)), found


def test_a_run_follows_the_column(toy_settings, tmp_path, monkeypatch):
    """Of examples that all name `first` the student learns what that teacher alone teaches it, bit
    for bit; a name that is no teacher's is refused where it stands."""
    toy = Path(toy_settings["task"]["data"]["path"])
    folder = tmp_path / "data"
    shutil.copytree(toy, folder)
    rows = json_lines(toy / "transfer.jsonl")

    model = {"model": str(make_toy_classifier(tmp_path / "model")), "below_majority": "warn"}
    others = {"animal": "food", "food": "weather", "weather": "animal"}
    teachers = {"first": model, "second": {**model, "labels": others}}

    def name(names):
        written(folder, [{**row, "who": names.get(row["text"][0])} for row in rows], "transfer")

    def recipe(**routings):
        how = {"split": "transfer", "teachers": "cached", "losses": {"kl": {"temperature": 2.0}}}
        distil = [
            {"distil": {**how, "name": name, "save_as": name, **routing}}
            for name, routing in routings.items()
        ]
        settings = {**toy_settings, "training": {**toy_settings["training"], "epochs": 1}}
        data = {"path": str(folder), "columns": {"teacher": "who"}}
        settings["task"] = {**settings["task"], "data": data}
        phases = [{"cache": {"splits": "transfer"}}, *distil]
        settings |= {"teachers": teachers, "phases": phases, "deepspeed": "zero0_fp32"}
        return runs.written(settings, tmp_path)

    def student(of):
        [found] = (tmp_path / "run").rglob(f"*{of}/model.safetensors")
        return load_file(found)

    both = {"named": {"routing": "column"}, "lone": {"follow": ["first"]}}
    everything = {letter: "first" for row in rows for letter in row["text"][0]}
    name(everything)
    runs.command_line("run", recipe(**both), "--folder", tmp_path / "run")
    named, lone = student("named"), student("lone")
    assert named.keys() == lone.keys()
    assert all(torch.equal(named[key], lone[key]) for key in named)

    def check(message, **routings):
        with pytest.raises(UserError, match=message):
            runs.command_line("check", recipe(**routings))

    letter = rows[4]["text"][0]
    name({**everything, letter: "frist"})
    check(
        r"phases.named.routing: column: .*transfer.jsonl:\d+.*'frist' is no teacher of this "
        r"phase, which has first, second. Did you mean `first`",
        **both,
    )
    written(folder, rows, "transfer")
    check(r"columns.teacher", **both)
