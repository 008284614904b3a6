"""Every model on a held-out split."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from ds_distill.data.plan import plan_once
from ds_distill.evaluation.baseline import Unigram, majority_class
from ds_distill.evaluation.metrics import (
    TokenScores,
    classification_report,
    masked_lm_report,
    paired_interval,
)
from ds_distill.parts.metrics import JUDGED, metrics_of
from ds_distill.parts.phases import PHASES, Evaluate
from ds_distill.recipe.schema import Recipe
from ds_distill.routing.comparison import numbered
from ds_distill.run.context import ModelReference, Run
from ds_distill.run.inference import predict_split, score_models
from ds_distill.run.label_warnings import warn_of_teachers


def models_to_evaluate(recipe: Recipe, number: int) -> dict[str, str]:
    """Model name -> role (`teacher`, `student` or `control`) of what phase `number` finds.

    A control is a student trained without teachers.
    """
    roles = dict.fromkeys(recipe.teachers, "teacher")
    for phase in recipe.phases[:number]:
        if PHASES[phase.kind].makes == "student":
            roles.update(dict.fromkeys(phase.outputs, "student"))
        for output in phase.outputs:
            roles.setdefault(output, "control")
    return roles


def evaluate(phase: Evaluate, number: int, name: str, run: Run) -> dict[str, Any]:
    """All models on a split, and on the same examples each of them against the baseline and each
    student against each other model.

    Models compute in fp32, the dtype that finished ones are written in: what is loaded from the
    run's folder by `from_pretrained` predicts what is counted here.

    Of classifiers: all metrics over classes, accuracy per class and confusion. Of masked-LMs: all
    metrics over the same masked tokens.
    """
    roles = models_to_evaluate(run.recipe, number)
    references: list[ModelReference] = [run.reference(model, number) for model in roles]
    examples = run.examples(phase.split)
    warnings: list[str] = []
    if not run.recipe.task.has_classes:
        scores = score_models(run, references, phase.split, phase.batch_size)
        scores[BASELINE], baseline = _unigram_baseline(phase.split, references, run)
        reports = {model: masked_lm_report(score) for model, score in scores.items()}
        right = {model: score.right for model, score in scores.items()}
        tokens = scores[BASELINE].tokens
        groups = examples.group_keys
    else:
        _, outputs = predict_split(run, references, phase.split, phase.batch_size, fp32=True)
        logits = {model: signals.logits.numpy() for model, signals in outputs.items()}
        logits[BASELINE], baseline = _majority_baseline(examples.labels, run)
        reports = {
            model: classification_report(scores, examples.labels, run.labels)
            for model, scores in logits.items()
        }
        known = examples.labels >= 0
        teachers = [reference for reference in references if roles[reference.name] == "teacher"]
        warnings = warn_of_teachers(run, name, phase.split, teachers, outputs, examples.labels)
        truth = examples.labels[known]
        right = {model: scores[known].argmax(axis=1) == truth for model, scores in logits.items()}
        tokens = np.ones(known.sum(), dtype=np.int64)
        groups = examples.group_keys[torch.from_numpy(known)]
    difference = partial(_difference, right, tokens, numbered(groups))
    _log(run, name, phase.split, roles, reports, baseline)
    return {
        "split": phase.split,
        "models": {
            model: {"role": role, **reports[model], "to_baseline": difference(model, BASELINE)}
            for model, role in roles.items()
        },
        "baseline": {**baseline, **reports[BASELINE]},
        "comparisons": [
            {"student": student, "other": other, **difference(student, other)}
            for student, role in roles.items()
            if role == "student"
            for other in roles
            if other != student
        ],
        "warnings": warnings,
    }


def _log(
    run: Run,
    phase: str,
    split: str,
    roles: dict[str, str],
    reports: dict[str, dict[str, Any]],
    baseline: dict[str, Any],
) -> None:
    """An event and a line for each model, and a line for the baseline."""
    for model, role in roles.items():
        numbers = {metric: reports[model][metric] for metric in metrics_of(run.recipe.task)}
        run.log.event("evaluation", phase=phase, model=model, split=split, **numbers)
        run.log.info(f"  {model:<16} {role:<8} {JUDGED} {numbers[JUDGED]:.3f}")
    run.log.info(
        f"  always {baseline['answer']!r} (most frequent in {baseline['split']}): {JUDGED} "
        f"{reports[BASELINE][JUDGED]:.3f}"
    )


BASELINE = ""
"""Beside the models' names, of which none is empty."""


def _majority_baseline(labels: np.ndarray, run: Run) -> tuple[np.ndarray, dict[str, Any]]:
    """The commonest class of the training labels as logits for each example, [N, C], and what it
    is. Where train has no labels, the commonest of the evaluated ones: no constant answer is right
    more often.

    labels: those of the N examples.
    """
    split, shown = "the evaluated split", labels
    if run.has_split("train"):
        training = run.examples("train").labels
        if (training >= 0).any():
            split, shown = "train", training
    answer = majority_class(shown)
    logits = np.zeros((len(labels), len(run.labels)), dtype=np.float32)
    logits[:, answer] = 1.0
    return logits, {"answer": run.labels[answer], "split": split}


def _unigram_baseline(
    split: str, references: list[ModelReference], run: Run
) -> tuple[TokenScores, dict[str, Any]]:
    """The training text's frequencies of tokens as a model, on the tokens that are masked for
    the others, and its answer."""
    training = next(
        (one for phase in run.recipe.phases if phase.outputs for one in phase.learns_from), split
    )
    tokenizer = run.tokenizer(references[0])
    counts = run.tables(training, references[:1])[references[0].name].counts(len(tokenizer))
    unigram = Unigram.of(counts, tuple(tokenizer.all_special_ids))
    examples = run.examples(split)
    collate = run.collator(examples, run.tables(split, references[:1]))
    tokens, owners = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for batch in plan_once(collate.lengths, 256):
        masked = collate(batch)
        counted = masked.row_sets["all"].numpy()
        tokens.append(masked.labels.numpy()[counted])
        owners.append(batch[masked.views[references[0].name].example_indices.numpy()[counted]])
    scores = unigram.score(np.concatenate(tokens), np.concatenate(owners), len(examples))
    answer = tokenizer.convert_ids_to_tokens(unigram.token)
    return scores, {"answer": answer, "split": training}


def _difference(
    right: dict[str, np.ndarray],
    tokens: np.ndarray,
    groups: np.ndarray,
    first: str,
    second: str,
) -> dict[str, Any]:
    """Difference in accuracy of two models, with its 95% interval.

    right: right predictions per example, [N], by model; tokens: all predictions per example, [N];
    groups: what the examples were taken from, [N], or the same texts.
    """
    return {
        "difference": float((right[first].sum() - right[second].sum()) / tokens.sum()),
        "interval": list(paired_interval(right[first], right[second], tokens, groups=groups)),
    }
