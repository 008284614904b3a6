"""What a run has written as JSON, as it is read again: by --resume, report, profile and sweep.

Only what these index is required and judged; the rest is as it is. Files may be of an earlier
version, or of strangers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_distill.errors import UserError
from ds_distill.files import read_json
from ds_distill.recipe.entry import Over
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.phases import PHASES
from ds_distill.reporting.results import metrics_of

Number = Annotated[float, AllowInfNan(False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Difference(_Part):
    """Of two models' scores."""

    difference: Number | None
    interval: Pair | None


class Bin(_Part):
    confidence: Number
    accuracy: Number
    count: Count


class Figures(_Part):
    """A model's scores on a split; of metrics by their names."""

    examples: Count
    per_class: dict[str, Number | None] = {}
    class_counts: dict[str, Annotated[list[Count], Field(min_length=3, max_length=3)]] = {}
    reliability: list[Bin] = []


class Known(_Part):
    """The labels that a partial teacher knows, and how many the task has."""

    labels: list[str] = []
    of: Count = 0


class ModelFigures(Figures):
    role: str
    parameters: Count
    to_baseline: Difference
    not_given: Count = 0
    """Examples of which a teacher's file says nothing: it was judged on the others."""
    knows: Known = Known()


class Baseline(Figures):
    answer: Any
    rule: str
    split: str


class Comparison(Difference):
    """Of a student with another model; with a teacher, `retention` and what follows it."""

    student: str
    other: str
    retention: Number | None = None
    gap_closed: Number | None = None
    median_class_difference: Number | None = None


class Choosing(_Part):
    split: str
    examples: Count
    score: Number | None


class Trained(_Part):
    """A model that a phase has trained."""

    output: str
    split: str
    examples: Count
    steps: Count
    choosing: Choosing | None


class Record(_Part):
    """Of a phase."""

    phase: str
    kind: str
    task: str
    seconds: Number
    peak_bytes: Count | None = None
    trained: list[Trained] = []
    warnings: list[str] = []

    @model_validator(mode="after")
    def _known(self) -> Record:
        if self.kind not in PHASES:
            raise ValueError(f"no kind of phase is called {self.kind!r}")
        return self


def _is_taught(row: Comparison) -> bool:
    return "retention" in row.model_fields_set


class Evaluation(Record):
    split: str
    over: Over
    metric: str
    metric_settings: dict[str, Any]
    models: Annotated[dict[str, ModelFigures], Field(min_length=1)]
    baseline: Baseline
    comparisons: list[Comparison] = []

    @model_validator(mode="after")
    def _metrics(self) -> Evaluation:
        if self.metric not in METRICS[self.over]:
            raise ValueError(f"there is no metric {self.metric!r} over {self.over}")
        try:
            METRICS[self.over][self.metric].Settings(**self.metric_settings)
        except (ValueError, TypeError) as error:
            raise ValueError(f"metric_settings {self.metric_settings} are none of it") from error
        for row in self.comparisons:
            if not {row.student, row.other} <= self.models.keys():
                raise ValueError(f"a comparison of {row.student!r} and {row.other!r}")
            of_classes = any(figures.per_class for figures in self.models.values())
            has_median = "median_class_difference" in row.model_fields_set
            if _is_taught(row) and of_classes and not has_median:
                raise ValueError("a comparison without median_class_difference")
        if len({"gap_closed" in r.model_fields_set for r in self.comparisons if _is_taught(r)}) > 1:
            raise ValueError("gap_closed of some comparisons alone")
        scores = {name: figures.model_extra or {} for name, figures in self.models.items()}
        of_all = metrics_of({"over": self.over, "metric": self.metric, "models": scores})
        scores["baseline"] = self.baseline.model_extra or {}
        for name, given in scores.items():
            for metric in {self.metric, *of_all}:
                value = given.get(metric, "")
                if value is not None and type(value) not in (int, float):
                    raise ValueError(f"{metric} of {name} is no number")
        return self


class Score(Difference):
    score: Number | None
    per_class: dict[str, Number | None]
    followed: dict[str, dict[str, Number]] = {}


class Answer(_Part):
    label: str
    probability: Number


class Disagreement(_Part):
    label: str
    teachers: dict[str, Answer]
    target: Answer
    followed: dict[str, Number]

    @model_validator(mode="after")
    def _of_teachers(self) -> Disagreement:
        if self.teachers.keys() != self.followed.keys():
            raise ValueError("followed teachers that are others")
        return self


class Policies(_Part):
    metric: str
    over: Over
    examples: Count
    policies: dict[str, Score]
    teachers: Annotated[dict[str, Score], Field(min_length=1)]
    choice: str
    disagreements: list[Disagreement] = []
    disagreements_of: str = ""

    @model_validator(mode="after")
    def _of_the_same_classes(self) -> Policies:
        if len({frozenset(score.per_class) for score in self.teachers.values()}) > 1:
            raise ValueError("teachers of other classes")
        return self


class Expertise(Record):
    split: str
    left_out: dict[str, str]
    comparison: Policies
    texts: list[str] = []


class Expansion(Record):
    """Of a vocabulary."""

    output: str
    split: str
    known: Count
    added: Count
    not_used: Count
    share_of_tokens: Number
    tokens_before: Number
    tokens_after: Number
    most_frequent: dict[str, Count]


class Packages(_Part):
    torch: str
    deepspeed: str
    transformers: str


class Machine(_Part):
    ranks: Count
    gpus: list[str]
    processor: str
    cores: Count | None
    packages: Packages


class Results(_Part):
    """results.json."""

    run: str | None = None
    description: str | None = None
    environment: Machine | None = None
    student: str | None = None
    task: str | None = None
    seconds: Number
    phases: list[dict[str, Any]]


class Noted(_Part):
    """What a cache phase notes until it has its record."""

    first_block: Count
    blocks: Count
    added: Count


class TeacherScore(_Part):
    """An element of teachers.json."""

    task: str
    teacher: str
    model: list[str | None]
    phase: str
    split: str
    examples: Count
    over: Over
    metric: str
    score: Number | None
    knows: Known = Known()


class Chosen(_Part):
    """routing.json."""

    choice: str


class Asked(_Part):
    """sweep.json."""

    runs: dict[str, dict[str, Any]]
    """Each run's recipe, by the run's name."""


class Start(_Part):
    """The environment of a start."""

    ranks: Annotated[int, Field(ge=1)]
    date: str


class Environment(_Part):
    """environment.json."""

    phases: dict[str, list[Start]] = {}
    changes: list[dict[str, Any]] = []


_BY_WHAT_IT_MAKES: dict[str | None, type[Record]] = {
    "evaluation": Evaluation,
    "expertise": Expertise,
    "start": Expansion,
}


def read_results(file: Path) -> dict[str, Any]:
    """results.json of a finished run. Raises UserError where it is not as a run writes it."""
    found = read_as(file, Results, "Copy the run again, or evaluate its student anew.")
    for number, record in enumerate(found["phases"]):
        _check_record(record, f"{file}: phases.{number}", "Copy the run again.")
    return found


def read_record(file: Path) -> dict[str, Any]:
    """A phase's record. Raises UserError where it is not as a run writes it."""
    fix = "Remove that file, and the phase runs again."
    found = read_as(file, Record, fix)
    _check_record(found, str(file), fix)
    return found


def read_trained(file: Path) -> dict[str, Any]:
    """The record beside a trained model. Raises UserError where it is not as a run writes it."""
    return read_as(file, Trained, "Remove that folder, and the model is trained again.")


def read_environment(file: Path) -> dict[str, Any]:
    """environment.json; of a folder without one what a new run has. Raises UserError where it is
    not as a run writes it."""
    if not file.is_file():
        return {}
    return read_as(file, Environment)


def read_as(
    file: Path, kind: type[BaseModel], fix: str = "Remove that file: it is written again."
) -> dict[str, Any]:
    """A file of one object. Raises UserError where it is not as a run writes it; fix: what to do
    then."""
    found = _read(file, dict, fix)
    _validate(kind, found, str(file), fix)
    return dict(found)


def read_teacher_scores(file: Path) -> list[dict[str, Any]]:
    """teachers.json; none without that file. Raises UserError where it is not as a run writes
    it."""
    if not file.is_file():
        return []
    fix = "Remove that file: teachers are scored again."
    found = _read(file, list, fix)
    for number, one in enumerate(found):
        _validate(TeacherScore, one, f"{file}: {number}", fix)
        if one["metric"] not in METRICS[one["over"]]:
            raise UserError(f"{file}: {number}: there is no metric {one['metric']!r}. {fix}")
    return list(found)


def _read(file: Path, kind: type, fix: str) -> Any:
    try:
        found = read_json(file)
    except (OSError, ValueError, RecursionError) as error:
        why = "too deep" if isinstance(error, RecursionError) else error
        raise UserError(f"{file}: not readable as JSON: {why}. {fix}") from error
    if not isinstance(found, kind):
        what = "object" if kind is dict else "list"
        raise UserError(f"{file}: holds no {what}. {fix}")
    return found


def _check_record(record: dict[str, Any], where: str, fix: str) -> None:
    _validate(Record, record, where, fix)
    kind = _BY_WHAT_IT_MAKES.get(PHASES[record["kind"]].makes)
    if kind is not None:
        _validate(kind, record, where, fix)


def _validate(kind: type[BaseModel], found: dict[str, Any], where: str, fix: str) -> None:
    try:
        kind.model_validate(found)
    except (ValidationError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            raise UserError(f"{where}: too deep. {fix}") from error
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        why = first["msg"].removeprefix("Value error, ")
        raise UserError(
            f"{where}: {f'{location}: ' if location else ''}{why}. It is not as this version of "
            f"ds_distill writes it. {fix}"
        ) from error
