"""Evaluation of any classifier, outside of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.evaluation.scores import build_metrics, model_report


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, batches: Iterable[Mapping[str, torch.Tensor]]
) -> dict[str, Any]:
    """How well a classifier predicts labelled examples.

    model: of transformers, with a head for sequence classification. It runs in eval mode, on its
        own device and in its own dtype, and is in the mode in which it was afterwards.
    batches: what the model takes, as a DataLoader with transformers' DataCollatorWithPadding gives
        it: input_ids and so on, [B, S], and `labels`, int [B], negative where unknown (left out).

    Returns `examples`, `accuracy`, `macro_f1`, `ece` (expected calibration error), `per_class`
    (accuracy by the label's name in the model's configuration; None without examples), `confusion`
    (counts, true classes by predicted; of more than 100 classes see `confusion_counts`) and
    `reliability` (per bin of confidence: mean confidence, accuracy, count).

    Raises ValueError when a batch has no labels, or none of the examples has.
    """
    scores, truth = [], []
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            inputs = {name: values.to(model.device) for name, values in batch.items()}
            labels = inputs.pop("labels", None)
            if labels is None or labels.ndim != 1:
                shape = "none" if labels is None else f"those of a batch are {list(labels.shape)}"
                raise ValueError(f"each batch needs `labels`, one for each example: {shape}")
            scores.append(model(**inputs).logits.float().cpu())
            truth.append(labels.cpu())
    finally:
        model.train(was_training)
    if not any((labels >= 0).any() for labels in truth):
        raise ValueError("none of the examples has a label: there is nothing to compare with")
    names = [str(model.config.id2label[number]) for number in range(model.config.num_labels)]
    predictions = ClassPredictions.labelled(torch.cat(scores).numpy(), torch.cat(truth).numpy())
    return model_report(predictions, build_metrics("classes", names), names)
