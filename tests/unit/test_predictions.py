"""Teachers whose predictions are in a file."""

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as tr
import yaml
from kinds import json_lines, write
from runs import command_line, evaluation, loaded, written
from toys import TOY_WORDS, make_tiny_bert, make_toy_classifier, toy_vocabulary

from ds_distill import Batch, Bundle, PaddedView, Router
from ds_distill.cache.reader import CacheReader, describe
from ds_distill.check.check import check_all
from ds_distill.data.open_source import open_source
from ds_distill.data.predictions import LEAST, FilePredictions, open_predictions
from ds_distill.errors import UserError
from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.files import read_json
from ds_distill.keys import content_keys
from ds_distill.losses import KL, CrossEntropy, TeacherCrossEntropy
from ds_distill.models.file_teacher import FileTeacher
from ds_distill.recipe.tasks import TASKS
from ds_distill.types import Signals

LABELS = ["no", "yes", "so"]
TEXTS = ["first text", "second, with a comma", "third text", "fourth text"]


def opened(file, kind="single-label", texts="text", **columns):
    """A file's predictions of a task whose data lie beside it."""
    data = file.parent / f"{file.name}.data"
    label = {"multi-label": ["yes"], "regression": 1.5}.get(kind, "yes")
    row = {"text": "a", "text_b": "b"} if "text_b" in columns else {"text": "a"}
    write(data / "train.jsonl", [{**row, "label": label}] * 2)
    settings = {"type": kind, "data": {"path": str(data), "columns": columns}}
    if kind != "regression":
        settings["labels"] = LABELS
    task = TASKS[kind].model_validate(settings)
    return open_predictions(file, open_source(task, file.parent / "converted"))


TAGS = ["O", "B-animal", "I-animal", "B-food", "I-food"]


def words_task(folder, rows, **columns):
    write(folder / "data" / "train.jsonl", rows)
    data = {"path": str(folder / "data"), "columns": columns}
    return TASKS["token-classification"].model_validate({"data": data, "labels": TAGS})


def opened_words(folder, lines, **columns):
    """What a file says of the words of two texts, which have ids."""
    rows = [
        {"tokens": ["a", "cat"], "tags": ["O", "B-animal"], "key": 1},
        {"tokens": ["rice"], "tags": ["B-food"], "key": "two"},
    ]
    task = words_task(folder, rows, **{"id": "key", **columns})
    source = open_source(task, folder / "cache")
    return open_predictions(write(folder / "said.jsonl", lines), source, ["train"])


def logits_of(file, *texts):
    """In the order of the texts; None of one that is not there."""
    found = file.find(content_keys(list(texts)))
    return [None if at < 0 else file.logits[file.first[at]].tolist() for at in found]


# ----------------------------------------------------------------------------------- what is read

FORMS = yaml.safe_load(Path(__file__).with_name("predictions.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_whatever_the_order(form, tmp_path):
    """A row that stands twice is one."""
    case = FORMS[form]
    rows = [{"text": text, **row} for text, row in zip(TEXTS, case["rows"], strict=False)]
    random.Random(0).shuffle(rows)
    kind = case.get("kind", "single-label")
    found = opened(write(tmp_path / "said.jsonl", [*rows, rows[0]]), kind)
    assert len(found) == sum(one is not None for one in case["says"])
    check_says(found, case["says"], as_they_are=form.startswith("logits"), kind=kind)


def check_says(found, says, *, kind="single-label", as_they_are=False):
    """Of each text the probabilities of the labels, or logits as they are."""
    shares = {"single-label": lambda of: torch.softmax(of, 0), "multi-label": torch.sigmoid}
    share = (lambda of: of) if as_they_are else shares.get(kind, lambda of: of)
    for ours, theirs in zip(logits_of(found, *TEXTS), says, strict=False):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            given = share(torch.tensor(ours, dtype=torch.float64)).tolist()
            assert given == pytest.approx(theirs, rel=1e-4, abs=LEAST / 10)


def test_cells_of_a_table(tmp_path):
    file = tmp_path / "said.csv"
    file.write_text(f'text,predicted,confidence\n{TEXTS[0]},so,0.8\n"{TEXTS[1]}",no,\nthird,,\n')
    check_says(opened(file), [[0.1, 0.1, 0.8], [1, LEAST, LEAST], None, None])
    file.write_text(f'text,probabilities\n{TEXTS[0]},"{{""yes"": 1}}"\nb,\n')
    check_says(opened(file), [[LEAST, 1, LEAST], None])
    file.write_text(f'text,predicted\n{TEXTS[0]},"[""yes""]"\n"{TEXTS[1]}",[]\n')
    both = [[LEAST, 1, LEAST], [LEAST] * 3]
    check_says(opened(file, "multi-label"), both, kind="multi-label")


def test_objects_of_parquet_have_null_for_a_missing_key_and_pairs_have_an_order(tmp_path):
    objects = [{"no": 0.5, "yes": 0.5}, {"no": None, "yes": 1}]
    table = pa.table({"text": TEXTS[:2], "probabilities": objects})
    pq.write_table(table, tmp_path / "two.parquet")
    check_says(opened(tmp_path / "two.parquet"), [[0.5, 0.5, LEAST], [LEAST, 1, LEAST]])
    pairs = [{"text": "a", "text_b": "b", "logits": [1, 2, 3]}]
    file = opened(write(tmp_path / "pairs.jsonl", pairs), text="text", text_b="text_b")
    assert file.find(content_keys(["a", "b"], ["b", "a"])).tolist() == [0, -1]


MISTAKES = yaml.safe_load(
    Path(__file__).with_name("bad_predictions.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_prediction_is_refused_where_it_stands(name, tmp_path):
    case = MISTAKES[name]
    with pytest.raises(UserError) as refused:
        if case.get("kind") == "words":
            opened_words(tmp_path, case["lines"])
        elif "keys" in case:
            rows = [
                {"text": text, "key": key} for text, key in zip("ab", case["keys"], strict=True)
            ]
            of_ids(tmp_path, rows, *case["lines"])
        else:
            opened(write(tmp_path / "wrong.jsonl", case["lines"]))
    assert [part for part in case["says"] if part not in str(refused.value)] == [], refused.value


def test_a_logit_that_is_no_float_is_refused(tmp_path):
    rows = [{"text": "a", "logits": [10**400, 0, 0]}]
    with pytest.raises(UserError, match="1: 'logits' holds what is no finite"):
        opened(write(tmp_path / "wrong.jsonl", rows))


def of_ids(folder, rows, *lines):
    """What a file says of examples that it names by the column `key`."""
    data = folder / "data"
    write(data / "train.jsonl", [{"label": "yes", **row} for row in rows])
    columns = {"id": "key", **({"text_b": "text_b"} if "text_b" in rows[0] else {})}
    given = {"type": "single-label", "data": {"path": str(data), "columns": columns}}
    task = TASKS["single-label"].model_validate({**given, "labels": LABELS})
    source = open_source(task, folder / "converted")
    return open_predictions(write(folder / "said.jsonl", [*lines]), source, ["train"])


def test_examples_are_found_by_their_ids(tmp_path):
    """A number or a name, in any order; the ids count where the file has texts, too."""
    texts, keys = "abcdd", [7, "8", None, "x", "x"]
    rows = [{"text": text, "key": key} for text, key in zip(texts, keys, strict=True)]
    named = {"8": 8, "none": 1, "x": 9, "7": 7, "nor": 1}
    lines = [{"key": key, "logits": [first, 0, 0]} for key, first in named.items()]
    lines[0]["text"] = "b, as the prompt had it"
    found = of_ids(tmp_path, rows, *lines)
    assert logits_of(found, *"abcd") == [[7.0, 0, 0], [8.0, 0, 0], None, [9.0, 0, 0]]
    assert found.unknown.startswith("2 (such as ") and found.unknown.endswith("said.jsonl:2)")
    # Other data give other examples, from the same file; so do other names of the same examples.
    rows[0]["text"] = "e"
    assert logits_of(of_ids(tmp_path, rows, *lines), "a", "e") == [None, [7.0, 0, 0]]
    for name in range(3):
        again = of_ids(tmp_path, [{**rows[0], "key": f"name {name}"}, rows[1]], *lines)
        assert logits_of(again, "b", "e") == [[8.0, 0, 0], None]
    pairs = [{"text": "a", "text_b": "b", "key": 1}, {"text": "a", "text_b": "c", "key": 2}]
    found = of_ids(tmp_path, pairs, {"key": 2, "logits": [2, 0, 0]})
    assert found.find(content_keys(["a", "a"], ["b", "c"])).tolist() == [-1, 0]


# ------------------------------------------------------------------------------------------- runs

SPLITS = ["transfer", "validation", "test"]


def texts_of(settings, split):
    file = Path(settings["task"]["data"]["path"]) / f"{split}.jsonl"
    return [row["text"] for row in json_lines(file)]


def of_cached_teachers(settings, dtype="float32"):
    """The toy recipe, whose phases after the teachers' training read them in one cache."""
    made = copy.deepcopy(settings)
    first, second, *_, distil, evaluate = made["phases"]
    cache = {"cache": {"splits": SPLITS, "dtype": dtype}}
    expertise = {"expertise": {"split": "validation", "states": False}}
    made["phases"] = [first, second, cache, expertise, distil, evaluate]
    return made


def answers(settings, file, lacks=None):
    """A file of what a careful person would say of the toy's texts, without the first so many of
    some splits."""
    rows = []
    for split in SPLITS:
        for text in texts_of(settings, split)[(lacks or {}).get(split, 0) :]:
            said = next((c for c, words in TOY_WORDS.items() if {*words.split()} & {*text.split()}))
            rows.append({"text": text, "predicted": said, "confidence": 0.9})
    return write(file, rows)


def with_answers(settings, folder, **lacks):
    """The toy recipe, whose first teacher is a file, which lacks some texts."""
    made = of_cached_teachers(settings, "float16")
    file = answers(settings, folder / "answers.jsonl", lacks)
    made["teachers"]["first"] = {"predictions": str(file)}
    del made["phases"][0]
    return made


def notes_of(settings, folder):
    found = check_all(loaded(settings, folder))
    return [note for note in found if "predictions" in note]


def test_a_check_of_a_file_with_ids(toy_settings, tmp_path):
    made = with_answers(toy_settings, tmp_path)
    data, file, lines = tmp_path / "data", tmp_path / "answers.jsonl", list[dict[str, Any]]()
    shutil.copytree(made["task"]["data"]["path"], data)
    for split in SPLITS:
        rows = enumerate(json_lines(data / f"{split}.jsonl"))
        named = [{**row, "id": f"{split} {n}"} for n, row in rows]
        write(data / f"{split}.jsonl", named)
        lines += [{"id": row["id"], "predicted": "animal"} for row in named[:-2]]
    made["task"]["data"] = {"path": str(data), "columns": {"id": "id"}}
    write(file, [*lines, {"id": "test 999", "predicted": "food"}])
    made["phases"][3]["distil"]["routing"] = "average"
    made["phases"].pop(2)
    notes = notes_of(made, tmp_path)
    assert f"ids of 1 (such as {file}:{len(lines) + 1}) of its rows are of no example" in notes[0]
    assert ["has nothing of 2 of" in note for note in notes] == [False, True, True, True]
    made["task"]["data"]["limit"] = {"test": 20}  # the file's other texts are of no split then
    assert f"ids of 39 (such as {file}:" in notes_of(made, tmp_path)[0]
    del made["task"]["data"]["limit"]
    texts = [text for split in SPLITS for text in texts_of(made, split)]
    texts[5:5] = ["no text of the data 1", "no text of the data 2"]
    write(file, [{"text": text, "predicted": "animal"} for text in texts])
    assert notes_of(made, tmp_path) == [
        f"teachers.first.predictions: 2 of its {len({*texts})} texts are in no split that is used "
        f"here (such as {file}:6)."
    ]


def test_a_run_whose_file_lacks_texts(toy_settings, tmp_path, in_this_process):
    """Told, kept in the cache as what it is, followed by nobody there, judged on what it has; the
    run stops behind the cache, and goes on."""
    settings = with_answers(toy_settings, tmp_path, transfer=37, test=5)
    notes, count = notes_of(settings, tmp_path), len(texts_of(settings, "transfer"))
    assert [note.partition(" (")[0] for note in notes] == [
        f"teachers.first.predictions: has nothing of 37 of {count} examples of split 'transfer'",
        "teachers.first.predictions: has nothing of 5 of 60 examples of split 'test'",
    ]
    assert "transfer.jsonl:1, " in notes[0] and notes[0].endswith("nobody follows it on these.")
    assert notes[1].endswith("it is judged on the others.")
    run = tmp_path / "run"
    for more in (["--until", "cache"], ["--resume"]):
        command_line("run", tmp_path / "recipe.yaml", "--folder", run, *more)
    assert read_json(run / "phases" / "01-cache.json")["not_given"] == {"first": 42}
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "Of 42 of the 320 texts of cache the file of first says nothing" in report
    reader = CacheReader(run / "cache" / "01-cache")
    keys = torch.from_numpy(content_keys(texts_of(settings, "transfer")))
    given = reader.read("first", reader.indices(keys)).reported
    assert given.tolist() == [False] * 37 + [True] * (count - 37)
    assert reader.read("second", reader.indices(keys)).reported is None
    entries = reader.manifest.teachers
    assert (entries["first"].not_given, entries["second"].not_given) == (42, None)
    assert "    not given   42 examples\n" in describe(run / "cache" / "01-cache")
    check_judged_on_what_it_has(run, settings, tmp_path / "answers.jsonl")


def test_a_cache_of_a_file_grows_and_is_of_that_file(toy_settings, tmp_path, in_this_process):
    settings = with_answers(toy_settings, tmp_path, transfer=37, test=5)
    del settings["teachers"]["second"]
    cache = settings["phases"][1]["cache"] | {"folder": str(tmp_path / "grown")}

    def built(*splits):
        settings["phases"] = [{"cache": {**cache, "splits": list(splits)}}]
        recipe = written(settings, tmp_path)
        command_line("run", recipe, "--folder", tmp_path / "-".join(splits))

    for splits, lacks in ((SPLITS[:2], 37), (SPLITS, 42)):  # the same cache, by two builds
        built(*splits)
        assert CacheReader(tmp_path / "grown").manifest.teachers["first"].not_given == lacks
    answers(settings, tmp_path / "answers.jsonl", {"transfer": 3})
    with pytest.raises(UserError, match=r"(?s)cache .*first.*weights"):
        built(SPLITS[0])


def test_a_file_that_lacks_texts_beside_a_teacher_of_some_labels(toy_settings, tmp_path):
    """The gate reads both; where the file says nothing, nobody knows an animal."""
    settings = with_answers(toy_settings, tmp_path, transfer=3)
    model = make_toy_classifier(tmp_path / "classifier")
    knows = {label: label for label in ("food", "weather")}
    settings["teachers"]["second"] = {"model": str(model), "labels": knows}
    settings["phases"] = phases = settings["phases"][1:-1]

    def mistakes(routing):
        phases[-1]["distil"]["routing"] = routing
        try:
            notes_of(settings, tmp_path)
        except UserError as error:
            return str(error)
        return ""

    for policy in ("gate", "chosen"):
        found = mistakes(policy)
        assert "second" in found and "do not know all labels" in found, found
        assert f"{policy} reads all teachers, and of some examples first says nothing" in found
    assert mistakes({"policy": "average", "mix": "losses"}) == ""
    knows["animal"] = "animal"
    assert mistakes("gate") == ""


def check_judged_on_what_it_has(run, settings, file):
    """Counted again by hand, from what the run and the file say of each test text."""
    rows = json_lines(Path(settings["task"]["data"]["path"]) / "test.jsonl")
    said = {row["text"]: row["predicted"] for row in json_lines(file)}
    record = evaluation(run)
    saved = SavedPredictions.read(run / "predictions" / "04-evaluate.safetensors", "classes")
    assert saved.models.keys() == {"second", "average", "expertise"}
    there = [at for at, row in enumerate(rows) if row["text"] in said]
    teacher = [said[rows[at]["text"]] == rows[at]["label"] for at in there]
    own = saved.models["average"]
    assert isinstance(own, ClassPredictions) and len(own) == len(rows) > len(there)
    student = [saved.labels[own.predicted[at]] == rows[at]["label"] for at in there]
    of_teacher = record["models"]["first"]
    assert (of_teacher["examples"], of_teacher["not_given"]) == (len(there), 5)
    assert of_teacher["accuracy"] == pytest.approx(np.mean(teacher))
    own = {row["other"]: row for row in record["comparisons"] if row["student"] == "average"}
    row = own["first"]
    assert row["difference"] == pytest.approx(np.mean(student) - np.mean(teacher))
    assert row["retention"] == pytest.approx(np.mean(student) / np.mean(teacher))
    assert sorted(own) == ["expertise", "first", "second"]
    assert "not_given" not in record["models"]["average"]
    always = [row["label"] == record["baseline"]["answer"] for row in rows]
    apart = np.mean(teacher) - np.mean([always[at] for at in there])
    assert of_teacher["to_baseline"]["difference"] == pytest.approx(apart)
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "The file of first says nothing of 5 of them" in report
    card = (run / "student" / "README.md").read_text(encoding="utf-8")
    assert f"| first (on {len(there)} examples) | teacher |" in card
    scores = {of["teacher"]: of for of in read_json(run / "teachers.json")}
    assert scores["first"]["examples"] == 60
    path = scores["second"]["model"][0]
    assert path == "models/00-second", "no path of a machine in what is published"


@pytest.mark.parametrize("mix", ["logits", "probabilities", "losses"])
@pytest.mark.parametrize("names", [["first"], ["first", "second"]])
def test_the_loss_against_a_plain_loop(tmp_path, mix, names):
    """A student's loss where teachers say nothing of some rows, and none of the last: of these the
    labels count, and nothing else."""
    labels = torch.tensor([0, 1, 2, -100, 1, 0])
    make_tiny_bert(tmp_path / "model", toy_vocabulary())
    model = tr.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (6, 7), generator=draw)
    view = PaddedView(ids, torch.ones_like(ids), torch.zeros_like(ids))
    says = torch.tensor([[1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 1, 0]], dtype=torch.bool)
    says[len(names) :] = False
    logits = torch.randn(2, 6, 3, generator=draw)
    signals = {
        name: Signals(logits[at].masked_fill(~says[at, :, None], 0.0), reported=says[at])
        for at, name in enumerate(names)
    }
    batch = Batch.from_views({"student": view}, labels, signals=signals)
    terms = {
        "kl": KL({"temperature": 2.0, "weight": 0.7}),
        "ce": CrossEntropy({"weight": 0.3}),
        "of_teachers": TeacherCrossEntropy({}),
    }
    router = Router({"policy": "average", "mix": mix}, temperature=2.0)
    found = Bundle(model, {}, terms, router if len(names) > 1 else None).eval()(batch)
    own = model(**batch.views["student"].model_inputs()).logits.double()
    kl = ce = of_teachers = 0.0
    for row in range(6):
        there = [at for at in range(2) if says[at, row]]
        student = torch.log_softmax(own[row] / 2, dim=0)
        of_all = logits[there, row].double()
        targets = {
            "logits": lambda said: [torch.softmax(said.mean(dim=0) / 2, dim=0)],
            "probabilities": lambda said: [torch.softmax(said / 2, dim=1).mean(dim=0)],
            "losses": lambda said: [*torch.softmax(said / 2, dim=1)],
        }
        if there:
            of_each = targets[mix](of_all)
            kl += sum(4 * (p * (p.log() - student)).sum() for p in of_each) / len(of_each)
        if labels[row] >= 0 and there:
            of_teachers -= float(torch.log_softmax(of_all, dim=1)[:, labels[row]].mean())
        if labels[row] >= 0:
            ce -= torch.log_softmax(own[row], dim=0)[labels[row]]
    taught = int(says.any(dim=0).sum())
    assert found["kl"].item() == pytest.approx(0.7 * float(kl) / taught, rel=1e-5)
    assert found["of_teachers"].item() == pytest.approx(of_teachers / 5, rel=1e-5)
    assert found["ce"].item() == pytest.approx(0.3 * float(ce) / 5, rel=1e-5)


# ------------------------------------------------------------------------------------ what is wrong


def test_what_asks_more_of_a_file_than_it_has_is_refused(toy_settings, tmp_path):
    made = with_answers(toy_settings, tmp_path, transfer=2)

    def mistakes(*overrides):
        try:
            command_line("check", written(made, tmp_path), *overrides)
        except UserError as error:
            return " ".join(str(error).split())
        return ""

    assert mistakes() == ""
    for overrides, message in {
        "phases.expertise.states=true": "phases.expertise.states: lets the gate read the teachers'",
        "phases.cache.hidden=[-1]": "phases.cache.hidden: asks for the teachers' states or",
        "phases.distil.losses.hidden_mse={}": "phases.distil.losses.hidden_mse: asks for the",
        "phases.teach-second.models=first": "trains 'first', of which there is a file of predict",
        "teachers.first.model=x/y": "teachers.first.predictions: stands beside `model`: keep one",
        "teachers.first.predictions=null": "teachers.first.model: is required and missing: name a",
        "teachers.first.labels={a: food}": "teachers.first.labels: is of a `model`, and this",
        "teachers.first.predictions=no.jsonl": "teachers.first.predictions: no.jsonl: cannot be",
        "teachers.first.predictions=data:no.jsonl": "first.predictions=data:no.jsonl: this is the",
        "phases.distil.teachers=live": "teachers.first.predictions: has nothing of 2 of 200 ex",
    }.items():
        assert message in mistakes(overrides), overrides
    answers(made, tmp_path / "answers.jsonl", {"validation": 3})
    found = mistakes()
    assert "has nothing of 3 of 60 examples of split 'validation'" in found
    assert "phase 'expertise' asks for them. Add them" in found
    answers(made, tmp_path / "answers.jsonl", {"transfer": 200})
    assert "has nothing of 200 of 200 examples of split 'transfer'" in mistakes()
    assert "and phase 'cache' asks for them" in mistakes()
    for other in ({"type": "masked-lm"}, {"type": "extractive-qa"}):
        made["task"] = {**made["task"], **other}
        assert "and a file is read for texts or words with labels, and for numbers" in mistakes()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_rows_of_an_example_are_those_of_the_file_whatever_its_number(first):
    """The first of a batch may have none that count."""
    keys = np.array([[1, 1], [2, 2]])
    logits = np.arange(10, dtype=np.float32).reshape(5, 2)
    found = FilePredictions(keys[:, 0], keys[:, 1], np.array([0, 3]), logits)
    of_rows, numbers = keys[[1, 1, 0, 0, 0]], torch.tensor([0, 0, 1, 1, 1]) + first
    signals = FileTeacher(found)(torch.from_numpy(of_rows), numbers)
    assert torch.equal(signals.logits, torch.from_numpy(logits[[3, 4, 0, 1, 2]]))
