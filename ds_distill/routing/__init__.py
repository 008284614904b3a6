"""Which teacher each row follows."""

from ds_distill.routing.expertise import ExpertiseTable
from ds_distill.routing.policies import POLICIES, Policy, Question, Routed
from ds_distill.routing.router import Router

__all__ = ["POLICIES", "ExpertiseTable", "Policy", "Question", "Routed", "Router"]
