"""Parts for ds_distill: a loss term, a routing policy, a metric and a phase."""

from example_parts.settings import Confident, ReverseKL, Soup, WorstClass

__all__ = ["Confident", "ReverseKL", "Soup", "WorstClass"]
