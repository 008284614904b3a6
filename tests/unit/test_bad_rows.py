"""Data that cannot be read: one paragraph that names the place, the value and the rule, and nothing
is left half-written. The mistakes are in bad_rows.yaml."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
from kinds import TAGS, jsonl

from ds_distill.data.open_source import open_source
from ds_distill.errors import UserError
from ds_distill.recipe.tasks import TASKS

CASES = yaml.safe_load(Path(__file__).with_name("bad_rows.yaml").read_text(encoding="utf-8"))
ASKED = {"question": "who?", "context": "a cat saw"}
GOOD = {
    # of a kind of task: its labels, and rows without a mistake
    "single-label": (["anger", "joy"], [{"text": "a", "label": "joy"}]),
    "multi-label": (["x", "y", "z"], [{"text": "a", "label": ["x"]}, {"text": "b", "label": []}]),
    "regression": (None, [{"text": "a", "label": 0.25}]),
    "token-classification": (TAGS, [{"tokens": ["a", "cat"], "tags": ["O", "B-gene"]}]),
    "token-classification of spans": (
        TAGS,
        [{"text": "flu now", "spans": [{"start": 0, "end": 2, "type": "disease", "text": "fl"}]}],
    ),
    "extractive-qa": (None, [{**ASKED, "answers": [{"text": "cat", "start": 2}]}]),
    "character-spans": (None, [{**ASKED, "answers": [{"start": 2, "end": 5}]}]),
    "masked-lm": (None, []),
}


def written(folder, case, good):
    """The path of a case's data, and the place that its message must name."""
    folder.mkdir()
    if "parquet" in case:
        columns = {
            name: values or pa.array([], pa.string()) for name, values in case["parquet"].items()
        }
        pa.parquet.write_table(pa.table(columns), folder / "a.parquet")
        return folder / "a.parquet", "a.parquet"
    if "file" in case:
        name, start, *rest = case["file"]
        times = case.get("times", 1)
        text = start + rest[0] * times if rest else start * times
        content = text.encode(case.get("encoding", "latin-1"))
        packed = name.endswith(".gz") and "plain" not in case
        (folder / name).write_bytes(gzip.compress(content, 1) if packed else content)
        return folder / name, name
    for name, content in case.get("files", {}).items():
        (folder / name).write_text(content)
    if "files" in case:
        return folder, ""
    more = [
        case[key] if key == "line" else json.dumps(case[key])
        for key in ("row", "line")
        if key in case
    ]
    if "digits" in case:
        more = ['{"text": "b", "label": 1' + "0" * case["digits"] + "}"]
    (folder / "train.jsonl").write_text(jsonl(good) + "".join(line + "\n" for line in more))
    return folder, f"train.jsonl:{len(good) + 1}" if more else ""


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_refused_with_its_place(name, tmp_path):
    case = CASES[name]
    kind = case.get("kind", "single-label")
    labels, good = GOOD[kind]
    path, place = written(tmp_path / "data", case, good)
    data, split = {"path": str(path), **case.get("data", {})}, case.get("split", "train")
    if "other" in case:
        (tmp_path / "other").mkdir()
        rows = [
            {"text": text, "label": label}
            for text, label in zip("def", (True, False, "maybe"), strict=True)
        ]
        (tmp_path / "other" / "dev.jsonl").write_text(jsonl(rows))
        other = {"path": str(tmp_path / "other"), "split": "dev", **case["other"]}
        data["splits"], split = {"transfer": other}, "transfer"
    given = {"data": data, "labels": case.get("labels", labels)}
    task = TASKS[kind.split()[0]].model_validate(
        {key: value for key, value in given.items() if value is not None}
    )
    with pytest.raises(UserError) as refusal:
        open_source(task, tmp_path / "cache").read(split)
    message = str(refusal.value)
    assert [part for part in [place, *case["says"]] if part not in message] == [], message
    assert case.get("never", "\n") not in message and "\n" not in message and len(message) < 700
    if {"data", "split", "other"} & case.keys():
        return  # what is refused was converted before
    left = [path for path in (tmp_path / "cache").glob("*") if path.suffix != ".lock"]
    assert left == [], "half-written"
