"""Every model on a held-out split."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds_distill.evaluation.metrics import classification_report, paired_interval
from ds_distill.phases.ask_teachers import ask_models
from ds_distill.phases.run import ModelPlace, Run
from ds_distill.recipe.phases import Distil, Evaluate, FineTune
from ds_distill.recipe.schema import Recipe


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
    """Accuracy, macro F1, per class and confusion of all models, and each student against each
    other model on the same examples."""
    roles = models_to_evaluate(run.recipe, number)
    places: list[ModelPlace] = [run.place(model, number) for model in roles]
    examples, said = ask_models(run, places, phase.split, phase.batch_size)
    logits = {name: signals.logits.numpy() for name, signals in said.items()}
    models = {}
    for model, role in roles.items():
        report = classification_report(logits[model], examples.labels, run.labels)
        models[model] = {"role": role, **report}
        run.log.event(
            "evaluation",
            phase=name,
            model=model,
            split=phase.split,
            accuracy=report["accuracy"],
            macro_f1=report["macro_f1"],
        )
        run.log.say(f"  {model:<16} {role:<8} accuracy {report['accuracy']:.3f}")
    known = examples.labels >= 0
    right = {m: logits[m][known].argmax(axis=1) == examples.labels[known] for m in roles}
    return {"split": phase.split, "models": models, "comparisons": _comparisons(roles, right)}


def _comparisons(roles: dict[str, str], right: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Difference in accuracy of each student to each teacher and control, with its 95%
    interval. right: bool [N] by model."""
    return [
        {
            "student": student,
            "other": other,
            "difference": float(right[student].mean() - right[other].mean()),
            "interval": list(paired_interval(right[student], right[other])),
        }
        for student, role in roles.items()
        if role == "student"
        for other, other_role in roles.items()
        if other_role != "student"
    ]
