"""Every model of a task on a held-out split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ds_distill.data.batches import Examples
from ds_distill.errors import UserError, located
from ds_distill.evaluation.prediction_files import SavedPredictions, examples_mark
from ds_distill.evaluation.scores import comparisons, difference
from ds_distill.models.configuration import check_head, load_config
from ds_distill.models.labels import label_map
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.lineage import steps
from ds_distill.recipe.phases import PHASES, Evaluate
from ds_distill.recipe.phases.evaluate import START
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.tags import OUTSIDE
from ds_distill.recipe.tasks import TASKS, metric_of
from ds_distill.reporting.verdict import answer_of
from ds_distill.routing.comparison import numbered
from ds_distill.run.any_checkpoint import CHECKPOINT
from ds_distill.run.inference import predictions_of
from ds_distill.run.label_warnings import warn_of_few_groups, warn_of_teachers
from ds_distill.run.run import Run


def models_to_evaluate(recipe: Recipe, number: int) -> dict[str, str]:
    """Model name -> role (`teacher`, `student`, `control` or `checkpoint`) of what phase `number`
    finds with a head of its task: last trained on it, or a teacher that no phase before has
    trained. Of tasks of words those trained on another one too, which may have some of its tags.

    A control is a student trained without teachers. What a phase follows is a teacher. Where a
    recipe does nothing but evaluate, its teachers teach nobody: each is a checkpoint.
    """
    tasks, step = recipe.tasks_by_name, steps(recipe)[number]
    alone = all(PHASES[phase.kind].makes == "evaluation" for phase in recipe.phases)
    roles = dict.fromkeys(recipe.teachers, CHECKPOINT if alone else "teacher")
    for phase in recipe.phases[:number]:
        if PHASES[phase.kind].makes == "student":
            roles.update(dict.fromkeys(phase.outputs, "student"))
        for output in phase.outputs if PHASES[phase.kind].makes != "start" else ():
            roles.setdefault(output, "control")
    for model in recipe.followed & roles.keys():
        roles[model] = "teacher"
    heads = {model: step.model(model).head or step.task_name for model in roles}
    of_words = tasks[step.task_name].of_words
    return {
        model: role
        for model, role in roles.items()
        if heads[model] == step.task_name or (of_words and tasks[heads[model]].of_words)
    }


def _with_head(run: Run, reference: ModelReference) -> bool:
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
        if run.task.has_classes and reference.label_map is None:
            label_map(reference.model, config, run.labels)
    except UserError:
        return False
    return True


def evaluate(phase: Evaluate, number: int, name: str, run: Run) -> dict[str, Any]:
    """All models on a split, and on the same examples each of them against the baseline and each
    student against each other model. The main process judges them: its record, on other ranks
    nothing.

    Models compute in fp32, the dtype that finished ones are written in: what is loaded from the
    run's folder by `from_pretrained` predicts what is counted here.
    """
    roles = models_to_evaluate(run.recipe, number)
    references = [run.reference(model, number) for model in roles]
    examples, kind = run.data.examples(phase.split), run.kind
    references = [
        each for each in references if run.knows(each, examples) and _with_head(run, each)
    ]
    if phase.start:
        references.append(replace(run.reference("student", 0), name=START, new_head=True))
        roles[START] = START
    roles = {reference.name: roles[reference.name] for reference in references}
    predictions, sizes = predictions_of(run, references, phase.split, phase.batch_size)
    of_baseline, baseline = kind.baseline(run.data, phase.split, examples, references)
    if not run.world.is_main:
        return {}
    warnings = []
    for role in ("teacher", CHECKPOINT):
        given = [each for each in references if roles[each.name] == role]
        warnings += warn_of_teachers(run, name, phase.split, given, predictions, examples, role)
    predictions[BASELINE] = of_baseline
    scored = {model: kind.scored(of_model, examples) for model, of_model in predictions.items()}
    with located(f"phase {name}, split {phase.split}"):
        reports = {model: kind.report(of_model) for model, of_model in scored.items()}
    counted = kind.counted(examples)
    group_keys = examples.group_keys[torch.from_numpy(counted)]
    groups = numbered(group_keys)
    warnings += warn_of_few_groups(run, name, phase.split, group_keys.numpy())
    of_models = {model: scored[model] for model in roles}
    saved = SavedPredictions(run.labels, groups, of_models)
    saved.write(run.folder.predictions(number, name))
    metric = metric_of(run.task)
    baseline = {**baseline, **reports[BASELINE]}
    _log(run, name, phase.split, roles, reports, baseline)
    return {
        "split": phase.split,
        "over": TASKS[run.task.type].over,
        "metric": metric.name,
        "metric_settings": run.task.metric.model_dump(exclude={"name"}, exclude_defaults=True),
        "examples_mark": _mark(run, examples, counted, references),
        "models": {
            model: {
                "role": role,
                "parameters": sizes[model],
                **reports[model],
                "to_baseline": difference(scored[model], scored[BASELINE], kind.judge, groups),
            }
            for model, role in roles.items()
        },
        "baseline": baseline,
        "comparisons": comparisons(scored, roles, reports, kind.judge, metric, groups),
        "warnings": warnings,
    }


def _mark(
    run: Run, examples: Examples, counted: np.ndarray, references: list[ModelReference]
) -> str:
    """See `examples_mark`. Where models predict tokens, their vocabulary says what is asked."""
    about: list[Any] = [run.task.type, run.labels, run.kind.fingerprint(None)]
    if TASKS[run.task.type].needs.same_tokens:
        about += [run.data.tokenizer_fingerprint(references[0]), run.task.max_length]
    if (asked := run.kind.asked(examples)) is not None:
        about += [asked]
    judged = examples.at(np.flatnonzero(counted))
    return examples_mark(judged.keys.numpy(), judged.labels, about)


def _log(
    run: Run,
    phase: str,
    split: str,
    roles: dict[str, str],
    reports: dict[str, dict[str, Any]],
    baseline: dict[str, Any],
) -> None:
    """An event and a line for each model, and a line for the baseline."""
    metric = metric_of(run.task)

    def score_of(report: dict[str, Any]) -> str:
        return f"{metric.title} {metric.shown_as(report[metric.name])}"

    for model, role in roles.items():
        numbers = {one: reports[model][one] for one in run.kind.metrics if one in reports[model]}
        if "own_tokens" in reports[model]:
            numbers |= {f"own_{one}": value for one, value in reports[model]["own_tokens"].items()}
        run.log.event("evaluation", phase=phase, model=model, split=split, **numbers)
        own = reports[model].get("own_tokens")
        added = f"; on all its tokens {score_of(own)}" if own and metric.name in own else ""
        run.log.info(f"  {model:<16} {role:<8} {score_of(reports[model])}{added}")
    answer = answer_of({"over": TASKS[run.task.type].over, "baseline": baseline})
    rule, score = f"{baseline['rule']} of {baseline['split']}", score_of(reports[BASELINE])
    run.log.info(f"  always {answer} ({rule}): {score}")


BASELINE = ""
"""Beside the models' names, of which none is empty."""
