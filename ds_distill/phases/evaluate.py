"""Every model on a held-out split."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds_distill.evaluation.metrics import (
    classification_report,
    masked_lm_report,
    paired_interval,
)
from ds_distill.phases.ask_teachers import ask_models, score_models
from ds_distill.phases.run import ModelPlace, Run
from ds_distill.recipe.phases import Distil, Evaluate, FineTune
from ds_distill.recipe.schema import MaskedLM, Recipe


def models_to_evaluate(recipe: Recipe, number: int) -> dict[str, str]:
    """Model name -> role (`teacher`, `student` or `control`) of what phase `number` finds.

    A control is a student trained without teachers.
    """
    roles = dict.fromkeys(recipe.teachers, "teacher")
    for phase in recipe.phases[:number]:
        if isinstance(phase, FineTune):
            for output in phase.outputs:
                roles.setdefault(output, "control")
        elif isinstance(phase, Distil):
            roles.update(dict.fromkeys(phase.outputs, "student"))
    return roles


def evaluate(phase: Evaluate, number: int, name: str, run: Run) -> dict[str, Any]:
    """All models on a split, and each student against each other model on the same examples.

    Of classifiers: accuracy, macro F1, per class and confusion. Of masked-LMs: accuracy, loss and
    perplexity on the same hidden tokens.
    """
    roles = models_to_evaluate(run.recipe, number)
    places: list[ModelPlace] = [run.place(model, number) for model in roles]
    if isinstance(run.recipe.task, MaskedLM):
        scores = score_models(run, places, phase.split, phase.batch_size)
        reports = {model: masked_lm_report(scores[model]) for model in roles}
        right = {model: scores[model].right for model in roles}
        asked = scores[places[0].name].tokens
    else:
        examples, said = ask_models(run, places, phase.split, phase.batch_size)
        logits = {model: signals.logits.numpy() for model, signals in said.items()}
        reports = {
            model: classification_report(logits[model], examples.labels, run.labels)
            for model in roles
        }
        known = examples.labels >= 0
        right = {m: logits[m][known].argmax(axis=1) == examples.labels[known] for m in roles}
        asked = np.ones(known.sum(), dtype=np.int64)
    for model, role in roles.items():
        numbers = {key: value for key, value in reports[model].items() if key in _LOGGED}
        run.log.event("evaluation", phase=name, model=model, split=phase.split, **numbers)
        run.log.say(f"  {model:<16} {role:<8} accuracy {numbers['accuracy']:.3f}")
    return {
        "split": phase.split,
        "models": {model: {"role": role, **reports[model]} for model, role in roles.items()},
        "comparisons": _comparisons(roles, right, asked),
    }


_LOGGED = ("accuracy", "macro_f1", "loss", "perplexity")


def _comparisons(
    roles: dict[str, str], right: dict[str, np.ndarray], asked: np.ndarray
) -> list[dict[str, Any]]:
    """Difference in accuracy of each student to each teacher and control, with its 95% interval.

    right: right answers per example, [N], by model; asked: answers asked for, [N].
    """
    return [
        {
            "student": student,
            "other": other,
            "difference": float((right[student].sum() - right[other].sum()) / asked.sum()),
            "interval": list(paired_interval(right[student], right[other], asked)),
        }
        for student, role in roles.items()
        if role == "student"
        for other, other_role in roles.items()
        if other_role != "student"
    ]
