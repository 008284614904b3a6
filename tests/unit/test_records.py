"""What a run has written is read again as it is, or refused in a sentence."""

import json

import pytest
from records import EVALUATION

from ds_distill.errors import UserError
from ds_distill.files import write_json
from ds_distill.records import read_record, read_results
from ds_distill.run.events import read_events
from ds_distill.run.folder import RunFolder

RESULTS = {"student": "s", "task": "task", "seconds": 2.5, "phases": [EVALUATION], "more": [1]}


def test_what_a_run_writes_is_read_as_it_is(tmp_path):
    write_json(tmp_path / "results.json", RESULTS)
    assert read_results(tmp_path / "results.json") == RESULTS
    write_json(tmp_path / "phase.json", EVALUATION)
    assert read_record(tmp_path / "phase.json") == EVALUATION
    folder = RunFolder(tmp_path)
    assert (folder.read_environment(), folder.read_teacher_scores()) == ({}, [])
    write_json(folder.teacher_scores, [{"teacher": "a"}])
    assert folder.read_teacher_scores() == [{"teacher": "a"}]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"phases": None}, "results.json: has no phases"),
        ({"phases": [{**EVALUATION, "kind": "dream"}]}, "has no phase of the kind 'dream'"),
        (
            {"phases": [{k: v for k, v in EVALUATION.items() if k not in ("models", "task")}]},
            "has no models, task",
        ),
        (
            {"phases": [{k: v for k, v in EVALUATION.items() if k not in ("models", "over")}]},
            "has no models, over",
        ),
    ],
)
def test_what_an_earlier_version_wrote_is_named(changed, named, tmp_path):
    whole = {key: value for key, value in {**RESULTS, **changed}.items() if value is not None}
    write_json(tmp_path / "results.json", whole)
    with pytest.raises(UserError, match=f"{named}.* Copy the run again"):
        read_results(tmp_path / "results.json")


@pytest.mark.parametrize("content", ["", "{", "\xff"])
def test_what_is_no_json_is_refused(content, tmp_path):
    file = tmp_path / "phase.json"
    file.write_bytes(content.encode("latin1"))
    with pytest.raises(UserError, match=r"phase\.json: not readable as JSON.*the phase runs again"):
        read_record(file)


def test_an_event_that_a_kill_cut_off_is_left_out(tmp_path):
    good = {"event": "train", "number": 0, "phase": "s", "time": 1.5, "loss": float("nan")}
    line = json.dumps({**good, "text": "a\u2028b"}, ensure_ascii=False)
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(good)}\n{line}\n{line[:-9]}")
    found = [event.get("text") for _, event in read_events(tmp_path / "metrics.jsonl")]
    assert found == [None, "a\u2028b"]
