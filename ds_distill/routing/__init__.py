"""Which teacher each row follows."""

from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.fitted import Fitted, fit
from ds_distill.routing.policies import POLICIES, Policy, PolicyInputs, Target
from ds_distill.routing.router import Router

__all__ = [
    "POLICIES",
    "ExpertiseTable",
    "Fitted",
    "Policy",
    "PolicyInputs",
    "Router",
    "Target",
    "fit",
]
