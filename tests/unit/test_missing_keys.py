"""JSON Lines whose rows have not all the same keys: what is read, or refused, is the same whichever
row lacks one."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import write

from ds_distill.data.groups import ID, Groups, teacher_names
from ds_distill.data.open_source import open_source
from ds_distill.data.readers import open_file, text
from ds_distill.errors import UserError
from ds_distill.recipe.tasks import TASKS

SPAN = {"start": 0, "end": 1, "type": "LOC"}
ASKED = {"question": "q", "context": "a"}
ROWS = {
    # of a kind of task: the key that a row may lack, and a row
    "single-label": ("label", {"text": "a", "label": "x"}),
    "multi-label": ("label", {"text": "a", "label": ["x"]}),
    "regression": ("label", {"text": "a", "label": 0.5}),
    "token-classification": ("tags", {"tokens": ["a"], "tags": ["O"]}),
    "token-classification of spans": ("spans", {"text": "a", "spans": [SPAN]}),
    "extractive-qa": ("answers", {**ASKED, "answers": [{"text": "a", "start": 0}]}),
    "character-spans": ("answers", {**ASKED, "answers": [{"start": 0, "end": 1}]}),
}
LABELS = {"text": ["x", "y"], "words": ["O", "B-LOC", "I-LOC"]}


def opened(folder, kind, rows, given=True, **columns):
    """given: whether the recipe names the labels."""
    write(folder / "train.jsonl", rows)
    entry = TASKS[kind.split()[0]]
    task = {"data": {"path": str(folder), "columns": columns}}
    if given and "labels" in entry.model_fields:
        task["labels"] = LABELS[entry.rows]
    return open_source(entry.model_validate(task), folder / "cache")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*ROWS]), st.integers(3, 6), st.integers(0, 5), st.booleans())
def test_a_row_without_a_label_is_refused_wherever_it_stands(
    tmp_path_factory, kind, count, at, given
):
    folder, (key, row), at = tmp_path_factory.mktemp("a"), ROWS[kind], at % count
    rows = [dict(row) for _ in range(count)]
    if kind == "single-label":
        rows[at - 1]["label"] = "y"
    del rows[at][key]
    here, there = folder / f"train.jsonl:{at + 1}", folder / f"train.jsonl:{2 if at == 0 else 1}"
    here, there = re.escape(str(here)), re.escape(str(there))
    what = f"{here}: no (label|tags|answers) in {key!r}, but {there}"
    given = given or kind in ("multi-label", "token-classification")  # which have one label else
    for need in (False, True):
        with pytest.raises(UserError, match=rf"{what} has (one|some)\."):
            opened(folder, kind, rows, given).read("train", need_labels=need)


@given(at=st.integers(0, 4))
@settings(max_examples=10, deadline=None)
def test_names_of_examples_may_be_missing_in_any_row(tmp_path_factory, at):
    names = [{"id": n, "patient": f"p{n // 2}", "follow": f"t{n % 2}"} for n in range(5)]
    names[at] = {}
    rows = [{"text": f"text {n}", "label": "xy"[n % 2], **more} for n, more in enumerate(names)]
    columns = {"id": "id", "group": "patient", "teacher": "follow"}
    data = opened(tmp_path_factory.mktemp("a"), "single-label", rows, **columns).read("train")
    for half in ID:
        assert [value is None for value in data[half]] == [n == at for n in range(5)]
    found = teacher_names(data)
    assert [found[0][n] if n >= 0 else None for n in found[1]] == [m.get("follow") for m in names]
    groups = Groups.of(data).group_keys[:, 0].tolist()
    for one in range(5):
        for other in range(one):
            same = names[one].get("patient", one) == names[other].get("patient", other)
            assert (groups[one] == groups[other]) == same


def test_a_text_or_list_of_words_that_a_row_lacks_is_refused_there(tmp_path):
    whole = {"text": "a", "tokens": ["a"], "tags": ["O"]}
    labelled = {"text": "a", "label": "x"}
    for kind, row, key, other in (
        ("token-classification", whole, "tokens", "text"),
        ("single-label", labelled, "text", "label"),
    ):
        for lacks in range(3):
            rows = [{other: row[other]} if at == lacks else row for at in range(3)]
            says = rf"train\.jsonl:{lacks + 1}: no {key!r}; it has {other!r}"
            with pytest.raises(UserError, match=says):
                opened(tmp_path, kind, rows).read("train")


keys = st.text(st.characters(), min_size=1, max_size=3)  # half of a surrogate pair, too


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.dictionaries(keys, st.integers() | st.text() | st.none()), min_size=1))
def test_columns_are_the_keys_of_all_rows_in_their_order(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("a")
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    wanted = [*dict.fromkeys(key for row in rows for key in row)]
    assert open_file(folder / "a.jsonl").columns() == wanted


def test_converted_rows_are_not_read_again(tmp_path, monkeypatch):
    """A start of a run over millions of rows, on each rank, reads none of them."""
    first = opened(tmp_path, "single-label", [{"text": "a"}, {"text": "b"}])
    assert first.read("train")["text"][:] == ["a", "b"]
    with monkeypatch.context() as patch:
        patch.setattr(text.JsonLines, "rows", None)
        again = open_source(first.task, first.cache_folder)
        assert again.read("train")["text"][:] == ["a", "b"]
    changed = opened(tmp_path, "single-label", [{"text": "a"}, {"text": "b", "label": "x"}])
    with pytest.raises(UserError, match=r"train\.jsonl:1: no label"):
        changed.read("train")


@pytest.mark.parametrize("key", ["label", "patient", "follow", "id"])
def test_a_key_that_the_first_rows_lack_is_refused(key, tmp_path, monkeypatch):
    """Of those alone columns are known: in silence it would not be read."""
    monkeypatch.setattr(text, "BATCH", 2)
    rows = [{"text": "a"}, {"text": "b"}, {"text": "c", "other": 1}, {"text": "d", key: "x"}]
    columns = {"id": "id", "group": "patient", "teacher": "follow"}
    (tmp_path / "test.jsonl").write_text(json.dumps({**dict.fromkeys(columns.values(), "x")}))
    with pytest.raises(UserError, match=rf"train\.jsonl:4: has {key!r}, and none of the first 2"):
        opened(tmp_path, "single-label", rows, **columns).read("train")
