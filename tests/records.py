"""The record of an evaluate phase, as a run writes it."""

from __future__ import annotations

from typing import Any

FIGURES: dict[str, Any] = {
    "examples": 4,
    "accuracy": 0.5,
    "macro_f1": 0.5,
    "ece": 0.1,
    "per_class": {"cat": 0.5, "dog": None},
    "confusion": [[1, 1], [1, 1]],
    "reliability": [{"confidence": 0.7, "accuracy": 0.5, "count": 4}],
}
LEVEL = {"difference": 0.0, "interval": [0.0, 0.0]}
EVALUATION: dict[str, Any] = {
    "phase": "evaluate",
    "kind": "evaluate",
    "task": "task",
    "seconds": 1,
    "split": "test",
    "over": "classes",
    "metric": "accuracy",
    "metric_settings": {},
    "examples_mark": "x",
    "models": {"s": {"role": "student", "parameters": 3, **FIGURES, "to_baseline": LEVEL}},
    "baseline": {"answer": "cat", "rule": "most frequent", "split": "train", **FIGURES},
    "comparisons": [
        {"student": "s", "other": "s", **LEVEL, "retention": 1.0, "median_class_difference": 0.0}
    ],
    "warnings": [],
}
