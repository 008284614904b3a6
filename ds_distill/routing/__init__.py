"""Which teacher each row follows. Begin with `router`, which a training asks, and `policies`;
`comparison` tells before it which policy is best, and `fitting` what they learn from a split.
"""

from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.fitting import Fitted, fit
from ds_distill.routing.policies import Policy, PolicyInputs, Target
from ds_distill.routing.router import Router

__all__ = [
    "ExpertiseTable",
    "Fitted",
    "Policy",
    "PolicyInputs",
    "Router",
    "Target",
    "fit",
]
