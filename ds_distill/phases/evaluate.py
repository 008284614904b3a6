"""Every model of a task on a held-out split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ds_distill.data.batches import Units
from ds_distill.errors import UserError, located
from ds_distill.evaluation.prediction_files import SavedPredictions, examples_mark
from ds_distill.evaluation.scores import comparisons, difference
from ds_distill.keys import numbered_keys
from ds_distill.models.configuration import check_head, load_config
from ds_distill.models.labels import label_map
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.lineage import steps
from ds_distill.recipe.phases import START, Evaluate
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.tags import OUTSIDE
from ds_distill.recipe.tasks import TASKS
from ds_distill.records import Evaluation
from ds_distill.reporting.results import answer_of, limits_of
from ds_distill.run.any_checkpoint import CHECKPOINT
from ds_distill.run.doubts import known_labels, warn_of_few_groups, warn_of_teachers
from ds_distill.run.inference import predictions_of
from ds_distill.run.run import Run
from ds_distill.tasks import TaskKind


def models_to_evaluate(recipe: Recipe, number: int) -> dict[str, str]:
    """Model name -> role (`teacher`, `student`, `control` or `checkpoint`) of what phase `number`
    finds with a head of its task: last trained on it, or a teacher that no phase before has
    trained. Of tasks of words those trained on another one too, which may have some of its tags.

    A control is a student trained without teachers. What a phase follows is a teacher. Where a
    recipe does nothing but evaluate, its teachers teach nobody: each is a checkpoint.
    """
    *earlier, step = steps(recipe)[: number + 1]
    alone = all(phase.makes == "evaluation" for phase in recipe.phases)
    roles = dict.fromkeys(recipe.teachers, CHECKPOINT if alone else "teacher")
    for one in earlier:
        for output in one.phase.outputs if one.phase.makes != "start" else ():
            if one.left()[output].distilled:
                roles[output] = "student"
            roles.setdefault(output, "control")
    for model in recipe.followed & roles.keys():
        roles[model] = "teacher"
    heads = {model: step.model(model).head or step.task_name for model in roles}
    return {
        model: role
        for model, role in roles.items()
        if recipe.takes_head(step.task_name, heads[model])
    }


def with_head(run: Run, reference: ModelReference) -> bool:
    """Whether a teacher as it was given has a head of the task. With one task `check` has refused
    one that has none. A model that was trained on other entity types has one where it knows a type
    of the task."""
    if reference.head not in (None, run.task_name):
        known = range(len(run.labels)) if reference.label_map is None else reference.label_map.known
        return any(run.labels[number] != OUTSIDE for number in known)
    if reference.trained or len(run.recipe.tasks_by_name) == 1:
        return True
    config = load_config(reference.model, reference.revision)
    try:
        check_head(reference.model, config, TASKS[run.task.type])
        if run.labels and run.recipe.teachers[reference.name].labels is None:
            label_map(reference.model, config, run.task, run.labels)
        run.given_labels(reference.name)
    except UserError:
        return False
    return True


def evaluate(phase: Evaluate, number: int, name: str, run: Run) -> Evaluation | None:
    """All models on a split, and on the same examples each of them against the baseline and each
    student against each other model. A teacher whose file lacks some of the examples is judged on
    the others, and the students against it there. The main process judges them: its record, on
    other ranks None.

    Models compute in fp32, the dtype that finished ones are written in: what is loaded from the
    run's folder by `from_pretrained` predicts what is counted here.
    """
    examples, kind = run.data.examples(phase.split), run.kind
    counted = kind.counted(examples)
    references, roles = _with_roles(phase, number, run)
    known = {one.name: run.knows(one, examples) for one in references}
    partial = {model: there for model, there in known.items() if not there.all()}
    references = [m for m in references if m.name not in partial or known[m.name][counted].any()]
    roles = {one.name: roles[one.name] for one in references}
    predictions, sizes = predictions_of(run, references, phase.split, phase.batch_size)
    of_baseline, baseline = kind.baseline(run.data, phase.split, examples, references)
    if not run.world.is_main:
        return None
    groups = numbered_keys(group_keys := examples.group_keys.numpy()[counted])
    every = _Judged(kind, examples, {**predictions, BASELINE: of_baseline}, groups)
    with located(f"phase {name}, split {phase.split}"):
        judged = _each_where_it_knows(run, every, partial, roles)
    warnings = []
    for one in references:
        if (role := roles[one.name]) in ("teacher", CHECKPOINT) and one.name in judged:
            of = judged[one.name].predictions, judged[one.name].examples
            warnings += warn_of_teachers(run, name, phase.split, [one], *of, role)
    warnings += warn_of_few_groups(run, name, phase.split, group_keys)
    whole = judged.pop(BASELINE)
    knows = {one.name: known_labels(run, one) for one in references}
    models = {
        model: {
            "role": roles[model],
            "parameters": sizes[model],
            **own.figures(model),
            **knows[model],
            **({} if own is whole else {"not_given": len(whole) - len(own)}),
        }
        for model, own in judged.items()
    }
    of_all = {model: whole.scored[model] for model, own in judged.items() if own is whole}
    SavedPredictions(run.labels, groups, of_all).write(run.folder.predictions(number, name))
    baseline |= whole.reports[BASELINE]
    _log(run, name, phase.split, models, baseline)
    return Evaluation(
        split=phase.split,
        over=TASKS[run.task.type].over,
        metric=kind.metric.name,
        metric_settings=run.task.metric.model_dump(exclude={"name"}, exclude_defaults=True),
        examples_mark=_mark(run, examples, counted, references),
        models=models,
        baseline=baseline,
        comparisons=_comparisons(judged, roles),
        warnings=warnings,
    )


def _comparisons(judged: Mapping[str, _Judged], roles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each on the examples on which the other was judged."""
    of_each = ((own, own.comparisons(roles)) for own in dict.fromkeys(judged.values()))
    return [row for own, rows in of_each for row in rows if judged[row["other"]] is own]


def _with_roles(
    phase: Evaluate, number: int, run: Run
) -> tuple[list[ModelReference], dict[str, str]]:
    """The models that have a head of the task, the student before training last; and what each is,
    by name."""
    roles = models_to_evaluate(run.recipe, number)
    given = [run.reference(model, number) for model in roles]
    references = [one for one in given if with_head(run, one)]
    if phase.start:
        references.append(replace(run.reference("student", 0), name=START, new_head=True))
        roles[START] = START
    return references, roles


@dataclass(frozen=True, eq=False)
class _Judged:
    """Models that were asked of the same examples."""

    kind: TaskKind[Any, Any]
    examples: Units
    predictions: dict[str, Any]
    """By model, as the task's kind makes them; of the constant answer as BASELINE."""
    groups: np.ndarray
    """int64 [n], as of `paired_interval`: of the examples that count."""

    def __len__(self) -> int:
        """How many of the examples count."""
        return len(self.groups)

    @cached_property
    def scored(self) -> dict[str, Any]:
        return {m: self.kind.scored(made, self.examples) for m, made in self.predictions.items()}

    @cached_property
    def reports(self) -> dict[str, dict[str, Any]]:
        """Raises UserError where a metric is not defined for these examples."""
        return {model: self.kind.report(scored) for model, scored in self.scored.items()}

    def figures(self, model: str) -> dict[str, Any]:
        """Its scores, and the difference to the baseline's."""
        own, baseline = self.scored[model], self.scored[BASELINE]
        apart = difference(own, baseline, self.kind.metric, self.groups)
        return {**self.reports[model], "to_baseline": apart}

    def comparisons(self, roles: Mapping[str, str]) -> list[dict[str, Any]]:
        """roles: of all models, also of those that are not here."""
        here = {model: role for model, role in roles.items() if model in self.scored}
        return comparisons(self.scored, here, self.reports, self.kind.metric, self.groups)

    def at(self, known: np.ndarray, models: Iterable[str]) -> _Judged:
        """Some of the models on some of the N examples, bool [N]."""
        examples, rows = self.examples.where(known)
        predictions = {model: self.predictions[model][rows] for model in models}
        groups = self.groups[known[self.kind.counted(self.examples)]]
        return _Judged(self.kind, examples, predictions, groups)


def _each_where_it_knows(
    run: Run, every: _Judged, partial: Mapping[str, np.ndarray], roles: Mapping[str, str]
) -> dict[str, _Judged]:
    """By model, in their order, and BASELINE.

    partial: of teachers that do not know all N examples, which they know, bool [N]. One that knows
        too few for a metric is left out.
    """
    known = {m: made for m, made in every.predictions.items() if m not in partial}
    whole = replace(every, predictions=known)
    beside = [m for m in known if roles.get(m) in ("student", START, None)]
    found = {}
    for model in [*roles, BASELINE]:
        found[model] = whole
        if model in partial:
            found[model] = every.at(partial[model], [model, *beside])
        try:
            _ = found[model].reports
        except UserError as error:
            if model not in partial:
                raise
            run.log.info(f"  {model} is not judged on what it knows: {error}")
            del found[model]
    return found


def _mark(run: Run, examples: Units, counted: np.ndarray, references: list[ModelReference]) -> str:
    """See `examples_mark`. Where models predict tokens, their vocabulary says which."""
    about: list[Any] = [run.task.type, run.labels, run.kind.fingerprint(None)]
    if TASKS[run.task.type].needs.same_tokens:
        about += [run.data.tokenizer_fingerprint(references[0]), run.task.max_length]
    if (words := run.kind.scored_words(examples)) is not None:
        about.append(words)
    judged = examples.at(np.flatnonzero(counted))
    return examples_mark(judged.keys.numpy(), run.kind.labels_of(judged), about)


def _log(
    run: Run, phase: str, split: str, models: dict[str, dict[str, Any]], baseline: dict[str, Any]
) -> None:
    """An event and a line for each model, and a line for the baseline."""
    metric = run.kind.metric

    def score_of(report: dict[str, Any]) -> str:
        return f"{metric.title} {metric.shown_as(report[metric.name])}"

    for model, of_model in models.items():
        numbers = {one: of_model[one] for one in run.kind.metrics if one in of_model}
        run.log.event("evaluation", phase=phase, model=model, split=split, **numbers)
        score = score_of(of_model) + limits_of(of_model)
        run.log.info(f"  {model:<16} {of_model['role']:<8} {score}")
    answer = answer_of({"over": TASKS[run.task.type].over, "baseline": baseline})
    rule, score = f"{baseline['rule']} of {baseline['split']}", score_of(baseline)
    run.log.info(f"  always {answer} ({rule}): {score}")


BASELINE = ""
"""Beside the models' names, of which none is empty."""
