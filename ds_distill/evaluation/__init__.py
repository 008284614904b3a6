"""What models predict of a split, what metrics say of it, and how sure that is.

Begin with `predictions`, what metrics read, and `scores`; `bootstrap` has the intervals. Metrics
are in `ds_distill.recipe.metrics`.
"""

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
