"""What a run has written is read again as it is, or refused in a sentence."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from records import EVALUATION, LEVEL

from ds_distill.errors import UserError
from ds_distill.files import write_json
from ds_distill.reporting.report import render_report
from ds_distill.run.events import read_events
from ds_distill.run.records import (
    Plan,
    read_as,
    read_environment,
    read_record,
    read_results,
    read_teacher_scores,
)

RESULTS = {"student": "s", "task": "task", "seconds": 2.5, "phases": [EVALUATION], "more": [1]}


def changed(place: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(RESULTS)
    *way, last = place.split(".")
    inner: Any = found
    for key in way:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    return found


def test_what_a_run_writes_is_read_as_it_is(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", RESULTS)
    assert read_results(tmp_path / "results.json") == RESULTS
    write_json(tmp_path / "phase.json", EVALUATION)
    assert read_record(tmp_path / "phase.json") == EVALUATION
    assert read_environment(tmp_path / "environment.json") == {}


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("phases", {}, "results.json: phases: "),
        ("seconds", "long", "seconds: "),
        ("student", 3, "student: "),
        ("environment", {"packages": 2.5}, "environment.ranks: "),
        ("phases.0.kind", "dream", "phases.0: .*no kind of phase"),
        ("phases.0.kind", [], "phases.0: kind: "),
        ("phases.0.over", "dreams", "over: "),
        ("phases.0.metric", "accuracies", "no metric 'accuracies'"),
        ("phases.0.metric_settings", {"leave_out": 3}, "metric_settings|leave_out"),
        ("phases.0.models", {}, "models: "),
        ("phases.0.models.s.accuracy", "good", "accuracy of s is no number"),
        ("phases.0.models.s.parameters", -1, "parameters: "),
        ("phases.0.models.s.per_class", {"a": "b"}, "per_class.a: "),
        ("phases.0.models.s.to_baseline", {"difference": 1}, "to_baseline.interval: "),
        ("phases.0.models.s.to_baseline", {**LEVEL, "interval": [1]}, "interval: "),
        ("phases.0.baseline", None, "baseline: "),
        ("phases.0.comparisons", [3], "comparisons.0: "),
        ("phases.0.trained", [{"output": 3}], "trained.0.output: "),
    ],
)
def test_what_is_not_as_a_run_writes_it_is_named(
    place: str, value: Any, named: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "results.json", changed(place, value))
    with pytest.raises(UserError, match=rf"(?s){named}.* Copy the run again"):
        read_results(tmp_path / "results.json")


def test_a_report_of_results_without_a_heading() -> None:
    """Of an edited file: it lacks a name, a description, and where it ran."""
    page = render_report({**RESULTS, "verdict": "", "uses": []})
    assert "<h1></h1>" in page and "rank(s)" not in page


@pytest.mark.parametrize("content", ["", "[]", "3", "[" * 5000, "{", "\xff", '{"phases": NaN}'])
def test_what_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content.encode("latin1"))
    for read in (read_results, read_record, read_environment, lambda one: read_as(one, Plan)):
        with pytest.raises(UserError, match=r"x\.json: "):
            read(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="not a regular file"):
        read_results(file)


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    good = {"event": "train", "number": 0, "phase": "s", "time": 1.5, "loss": float("nan")}
    timed = {**good, "step": 3, "timing": {"steps": 2, "seconds": {"forward": 0.5}}}
    odd = [
        "[]",
        "3",
        "{",
        "[" * 5000,
        "",
        json.dumps({**good, "step": "x"}),
        json.dumps({**timed, "timing": {"steps": 0, "seconds": {}}}),
        json.dumps({"event": "a"}),
    ]
    lines = [json.dumps(good), *odd, json.dumps(timed)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n\xff")
    found = [event for _, event in read_events(tmp_path / "metrics.jsonl")]
    assert [event.get("step") for event in found] == [None, 3]


def test_scores_of_teachers_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "teachers.json"
    assert read_teacher_scores(file) == []
    one = {
        "task": "t",
        "teacher": "a",
        "model": ["a", None],
        "phase": "p",
        "split": "validation",
        "examples": 3,
        "over": "classes",
        "metric": "accuracy",
        "score": None,
    }
    write_json(file, [one])
    assert read_teacher_scores(file) == [one]
    for odd in ({}, [3], [{**one, "metric": "x"}], [{**one, "model": "a"}]):
        write_json(file, odd)
        with pytest.raises(UserError, match=r"teachers\.json: .* Remove that file"):
            read_teacher_scores(file)
