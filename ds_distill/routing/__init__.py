"""Which teacher each row follows. Begin with `router`, which a training asks, and `policies`;
`comparison` tells before it which policy is best, and `fitting` what they learn from a split.
"""

from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.fitting import Fitted, fit
from ds_distill.routing.policies import Asked, Policy
from ds_distill.routing.router import Router
from ds_distill.seen import Target

__all__ = [
    "Asked",
    "ExpertiseTable",
    "Fitted",
    "Policy",
    "Router",
    "Target",
    "fit",
]
