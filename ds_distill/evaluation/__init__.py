"""What models predict of a split, what metrics say of it, and how sure that is."""

from ds_distill.evaluation.predictions import ClassPredictions, LabelPredictions, TokenScores
from ds_distill.recipe.metrics.metric import CountMetric, MeanMetric, Metric, ratio

__all__ = [
    "ClassPredictions",
    "CountMetric",
    "LabelPredictions",
    "MeanMetric",
    "Metric",
    "TokenScores",
    "ratio",
]
