"""Metrics: numbers of predictions, for any weights of the examples."""

from ds_distill.evaluation.metric import CountMetric, MeanMetric, Metric, ratio
from ds_distill.evaluation.predictions import ClassPredictions, LabelPredictions, TokenScores

__all__ = [
    "ClassPredictions",
    "CountMetric",
    "LabelPredictions",
    "MeanMetric",
    "Metric",
    "TokenScores",
    "ratio",
]
