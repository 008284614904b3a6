"""The verdict: a run's result in a few sentences."""

from __future__ import annotations

from typing import Any

from ds_distill.recipe.metrics.metric import no_width
from ds_distill.reporting.intervals import interval_as
from ds_distill.reporting.results import (
    answer_of,
    evaluations_of_student,
    last_evaluations,
    limits_of,
    task_metric_of,
)

_LEVEL, _TOO_SMALL = "level with", "not told apart from"
_OUTCOMES = ("better than", _LEVEL, "worse than", _TOO_SMALL, "not comparable with")


def verdict(results: dict[str, Any]) -> str:
    """The shipped student's score in the task's metric, beside the baseline, teachers, controls and
    other students.

    Better and worse mean that the 95% interval of the difference excludes zero.
    """
    student = results["student"]
    if student is None:
        return "No student was trained."
    as_it_is = evaluations_of_student(results)
    of_student = [one for one in last_evaluations(results) if one in as_it_is]
    if not of_student:
        return (
            f"The student is `{student}`. No evaluate phase comes after it, so its quality was "
            "not measured."
        )
    sentences = []
    for evaluation in of_student:
        where = f"On {evaluation['task']}: " if len(of_student) > 1 else ""
        sentences.append(where + " ".join(_Verdict(evaluation, student).sentences()))
    return " ".join(sentences)


class _Verdict:
    """On one student in one evaluation."""

    def __init__(self, evaluation: dict[str, Any], student: str) -> None:
        self._entry = task_metric_of(evaluation)
        self._evaluation = evaluation
        self._models = evaluation["models"]
        self._student = student
        rows = (row for row in evaluation["comparisons"] if row["student"] == student)
        self._rows = {row["other"]: row for row in rows}

    def sentences(self) -> list[str]:
        own = self._models[self._student]
        above = self._above_baseline(own)
        clauses = [] if above else [self._to_baseline(own)]
        for role, noun, addition in (
            ("teacher", "teacher", ""),
            ("control", "student", " without teachers"),
            ("start", "untrained start", ""),
        ):
            # Two models at the baseline are not compared.
            others = {
                name: self._models[name]
                for name in self._rows
                if self._models[name]["role"] == role
                and (above or self._above_baseline(self._models[name]))
            }
            clauses += self._clauses(others, noun, addition)
        counted = f"{own['examples']:,} {'questions' if 'windows' in own else 'examples'}"
        if "tokens" in own:
            counted = f"{own['tokens']:,} masked tokens"
        if self._entry.name == "word_loss":
            counted = f"{own['hidden_words']:,} hidden words"
        score = f"{self._entry.title} {self._score(own)} on {counted}"
        outcome = f", {_listed(clauses)}" if clauses else ""
        first = f"Student `{self._student}`: {score} of {self._evaluation['split']}{outcome}."
        return [
            first,
            *self._of_other_students(),
            *self._of_a_small_test(above),
            *self._of_models_at_baseline(above),
            *self._of_no_baseline(),
        ]

    def _score(self, model: dict[str, Any]) -> str:
        return self._entry.shown_as(model[self._entry.name]) + limits_of(model)

    def _above_baseline(self, model: dict[str, Any]) -> bool:
        """Where the baseline has no score: whether the model has one."""
        if self._evaluation["baseline"][self._entry.name] is None:
            return model[self._entry.name] is not None
        return self._entry.better(model["to_baseline"]["interval"])

    def _constant(self) -> str:
        baseline = self._evaluation["baseline"]
        return f"always predicting {answer_of(self._evaluation)} ({self._score(baseline)})"

    def _to_baseline(self, model: dict[str, Any]) -> str:
        row = model["to_baseline"]
        if _unknown(row):
            return f"{_TOO_SMALL} {self._constant()}: {', '.join(self._parts(row))}"
        worse = self._entry.worse(row["interval"])
        return f"{'worse' if worse else 'no better'} than {self._constant()}"

    def _of_other_students(self) -> list[str]:
        """One sentence that compares the shipped student with the others."""
        others = {
            name: row for name, row in self._rows.items() if self._models[name]["role"] == "student"
        }
        clauses = []
        for outcome in _OUTCOMES:
            group = [name for name, row in others.items() if self._outcome(row) == outcome]
            if not group:
                continue
            named = _listed([f"`{name}` ({self._score(self._models[name])})" for name in group])
            clause = f"it is {outcome} {named}"
            if outcome == _LEVEL:
                clause = f"its difference to {named} is within chance"
            if outcome in (_LEVEL, _TOO_SMALL):
                clause += f": {_listed([self._difference(others[name]) for name in group])}"
            clauses.append(clause)
        return [f"Among the students, {'; '.join(clauses)}."] if clauses else []

    def _of_models_at_baseline(self, above: bool) -> list[str]:
        """A sentence on the other models that are no better than the baseline, and one on those of
        which that is not known.

        above: whether the student is better than it.
        """
        found: dict[bool, list[str]] = {False: [], True: []}
        for name, model in self._models.items():
            if name != self._student and not self._above_baseline(model):
                unknown = _unknown(model["to_baseline"])
                found[unknown].append(f"`{name}` ({self._score(model)})")
        sentences = []
        for unknown, names in found.items():
            listed, verb = _listed(names), "is" if len(names) == 1 else "are"
            if unknown and names:
                sentences.append(
                    f"Whether {listed} {verb} better than {self._constant()} is not known."
                )
            elif names and above:
                sentences.append(f"{listed} {verb} no better than {self._constant()}.")
            elif names:
                sentences.append(f"Nor {verb} {listed} better than that.")
        return sentences

    def _of_no_baseline(self) -> list[str]:
        """One sentence where the baseline has no score to compare with."""
        baseline = self._evaluation["baseline"]
        if baseline[self._entry.name] is not None:
            return []
        return [
            f"Always predicting {answer_of(self._evaluation)}, {baseline['rule']} of "
            f"{baseline['split']}, has no {self._entry.title}: no model is compared with that."
        ]

    def _clauses(self, others: dict[str, dict[str, Any]], noun: str, addition: str) -> list[str]:
        """One clause per outcome: `both` or `all` where all others share it, else their names."""
        clauses = []
        for outcome in _OUTCOMES:
            group = {
                name: other
                for name, other in others.items()
                if self._outcome(self._rows[name]) == outcome
            }
            if not group:
                continue
            nouns = (noun if len(group) == 1 else f"{noun}s") + addition
            if len(group) == len(others):
                amount = {1: "the", 2: "both"}.get(len(group), f"all {len(group)}")
                numbers = ", ".join(f"{name} {self._number(name)}" for name in group)
                clauses.append(f"{outcome} {amount} {nouns} ({numbers})")
            else:
                named = [f"{name} ({self._number(name)})" for name in group]
                clauses.append(f"{outcome} the {nouns} {_listed(named)}")
        return clauses

    def _outcome(self, row: dict[str, Any]) -> str:
        interval = row["interval"]
        if interval is None:
            return "not comparable with"
        if self._entry.better(interval):
            return "better than"
        if self._entry.worse(interval):
            return "worse than"
        return _TOO_SMALL if no_width(interval) or self._too_wide(row) else _LEVEL

    def _too_wide(self, row: dict[str, Any]) -> bool:
        own = self._models[self._student][self._entry.name]
        return self._entry.too_wide(row["interval"], own)

    def _number(self, other: str) -> str:
        """The score of another model; where it is not known to be better or worse, with the
        difference to it."""
        row, score = self._rows[other], self._score(self._models[other])
        if self._outcome(row) not in (_LEVEL, _TOO_SMALL) or row["interval"] is None:
            return score
        return f"{score}: {', '.join(self._parts(row))}"

    def _of_a_small_test(self, above: bool) -> list[str]:
        """One sentence where the test is too small to tell models apart that are compared.

        above: whether the student is better than the baseline.
        """
        compared = (
            row
            for name, row in self._rows.items()
            if above or self._above_baseline(self._models[name])
        )
        if not any(map(self._too_wide, compared)):
            return []
        return [
            "The test is too small to tell where an interval reaches more than "
            f"{self._entry.wide_as()} either way."
        ]

    def _difference(self, row: dict[str, Any]) -> str:
        shown, interval = self._parts(row)
        return f"{shown} ({interval})"

    def _parts(self, row: dict[str, Any]) -> tuple[str, str]:
        """A difference, and its interval."""
        form = self._entry.difference_as
        unit = " points" if self._entry.is_share() else ""
        kind = "interval" if no_width(row["interval"]) else "95% interval"
        return form(row["difference"]) + unit, f"{kind} {interval_as(form, row['interval'])}"


def _unknown(row: dict[str, Any]) -> bool:
    """Whether two models differ, and no resample tells by how much in others."""
    return bool(row["difference"]) and no_width(row["interval"])


def _listed(parts: list[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
