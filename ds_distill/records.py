"""What phases return, results.json holds and the report reads: JSON objects with these keys.

A key that a class marks NotRequired is there where it says something. Figures of metrics stand
under the metrics' names.
"""
# Not with annotations of the future: typing would take a NotRequired in a string for a required key

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ds_distill.errors import UserError
from ds_distill.files import read_json
from ds_distill.recipe.metrics.metric import Over
from ds_distill.recipe.phases import PHASES


class Record(TypedDict):
    """Of each phase, beside what its kind returns."""

    phase: str
    kind: str
    task: str
    seconds: float
    peak_bytes: NotRequired[int | None]
    """The most that rank 0 held."""


class TrainedModel(TypedDict):
    output: str
    together: NotRequired[list[str]]
    """All that were trained in one engine, where they are several."""
    split: str
    examples: int
    windows: NotRequired[int]
    pairs: NotRequired[bool]
    steps: int
    choosing: dict[str, Any] | None
    """The examples that chose the epoch, and the score on them."""
    measures: NotRequired[dict[str, float]]
    skipped: NotRequired[int]
    """Steps that changed no weight."""
    peak_bytes: NotRequired[int]
    """Of a GPU."""
    planned_bytes: NotRequired[int]


class Trained(TypedDict):
    """Of fine-tuning and distilling."""

    trained: list[TrainedModel]


class CacheRecord(TypedDict):
    splits: list[str]
    folder: NotRequired[str]
    examples: int
    added: int
    """Of the examples, those that this run has written."""
    not_given: NotRequired[dict[str, int]]
    """By teacher from a file: of how many it says nothing."""
    fidelity: NotRequired[dict[str, Any]]


class ExpertiseRecord(TypedDict):
    split: str
    examples: int
    teachers: list[str]
    """Those that the phases after it have."""
    left_out: dict[str, str]
    comparison: dict[str, Any]
    """See `ds_distill.routing.comparison.Comparison.to_json`."""
    texts: NotRequired[list[str]]
    warnings: NotRequired[list[str]]


class Expansion(TypedDict):
    """Of a vocabulary."""

    output: str
    split: str
    known: int
    added: int
    not_used: int
    share_of_tokens: float
    tokens_before: float
    """A text."""
    tokens_after: float
    most_frequent: dict[str, int]


class Evaluation(TypedDict):
    split: str
    over: Over
    metric: str
    metric_settings: dict[str, Any]
    examples_mark: str
    """The same for evaluations that judged the same examples, in the same order."""
    models: dict[str, dict[str, Any]]
    """Of each `role`, `parameters`, `examples`, its scores and `to_baseline`."""
    baseline: dict[str, Any]
    comparisons: list[dict[str, Any]]
    """Of each student with each other model: `student`, `other`, `difference`, `interval`."""
    warnings: NotRequired[list[str]]


class EvaluationRecord(Record, Evaluation):
    """As results.json holds it, and the report reads it."""


class ExpertisePhaseRecord(Record, ExpertiseRecord):
    """Likewise."""


class Results(TypedDict):
    """results.json."""

    student: NotRequired[str | None]
    task: NotRequired[str]
    seconds: float
    phases: list[dict[str, Any]]


_OF_KIND: dict[str | None, Any] = {
    "evaluation": Evaluation,
    "expertise": ExpertiseRecord,
    "start": Expansion,
}
"""By what a kind of phase makes."""


def read_results(file: Path) -> dict[str, Any]:
    """results.json of a finished run. Raises UserError where it is unreadable, or an earlier
    version's."""
    fix = "Copy the run again, or evaluate its student anew."
    found: dict[str, Any] = read_object(file, fix)
    lacks = sorted(Results.__required_keys__ - {*found})
    for record in found.get("phases", ()):
        lacks += _lacking(record)
    _refuse_lacking(file, lacks, fix)
    return found


def read_record(file: Path) -> dict[str, Any]:
    """A phase's record. Raises as `read_results`."""
    fix = "Remove that file, and the phase runs again."
    found: dict[str, Any] = read_object(file, fix)
    _refuse_lacking(file, _lacking(found), fix)
    return found


def read_object(file: Path, fix: str) -> Any:
    """What a run wrote as JSON. Raises UserError where it is unreadable; fix: what to do then."""
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable as JSON: {error}. {fix}") from error


def _lacking(record: dict[str, Any]) -> list[str]:
    kind = PHASES.get(record.get("kind", ""))
    if kind is None:
        return [f"phase of the kind {record.get('kind')!r}"]
    own = _OF_KIND.get(kind.makes, Record)
    return sorted((Record.__required_keys__ | own.__required_keys__) - {*record})


def _refuse_lacking(file: Path, lacks: list[str], fix: str) -> None:
    if lacks:
        raise UserError(
            f"{file}: has no {', '.join(dict.fromkeys(lacks))}, so it is not as this version of "
            f"ds_distill writes it. {fix}"
        )
