"""Distil large encoder teachers into small students, in one DeepSpeed engine.

The names of `__all__` are for programs of your own; docs/library.md shows how. Each is imported
when it is first used: `import ds_distill` alone imports neither torch nor deepspeed, and only
`run_recipe` imports deepspeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_distill.cache.reader import CacheReader
    from ds_distill.check.check import check_all as check_recipe
    from ds_distill.errors import UserError
    from ds_distill.evaluation.scores import evaluate
    from ds_distill.keys import content_keys
    from ds_distill.losses import (
        KL,
        ActivationBoundary,
        ConfidencePenalty,
        Cosine,
        CrossEntropy,
        HiddenMSE,
        LogitMSE,
        Seen,
        Term,
        TermInputs,
    )
    from ds_distill.models.bundle import Bundle
    from ds_distill.models.encoder import read_signals
    from ds_distill.one_call import FinishedRun, distil, run_recipe
    from ds_distill.predictors.prediction import predict
    from ds_distill.recipe import Recipe, load_recipe
    from ds_distill.routing import Router, Target
    from ds_distill.types import Batch, Signals
    from ds_distill.views import PackedView, PaddedView

__version__ = "0.1.0"

__all__ = [
    "KL",
    "ActivationBoundary",
    "Batch",
    "Bundle",
    "CacheReader",
    "ConfidencePenalty",
    "Cosine",
    "CrossEntropy",
    "FinishedRun",
    "HiddenMSE",
    "LogitMSE",
    "PackedView",
    "PaddedView",
    "Recipe",
    "Router",
    "Seen",
    "Signals",
    "Target",
    "Term",
    "TermInputs",
    "UserError",
    "__version__",
    "check_recipe",
    "content_keys",
    "distil",
    "evaluate",
    "load_recipe",
    "predict",
    "read_signals",
    "run_recipe",
]

_MODULES = {
    "KL": "losses",
    "ActivationBoundary": "losses",
    "Batch": "types",
    "Bundle": "models.bundle",
    "CacheReader": "cache.reader",
    "ConfidencePenalty": "losses",
    "Cosine": "losses",
    "CrossEntropy": "losses",
    "FinishedRun": "one_call",
    "HiddenMSE": "losses",
    "LogitMSE": "losses",
    "PackedView": "views",
    "PaddedView": "views",
    "Recipe": "recipe",
    "Router": "routing",
    "Seen": "losses",
    "Signals": "types",
    "Target": "routing",
    "Term": "losses",
    "TermInputs": "losses",
    "UserError": "errors",
    "check_recipe": "check.check:check_all",
    "content_keys": "keys",
    "distil": "one_call",
    "evaluate": "evaluation.scores",
    "load_recipe": "recipe",
    "predict": "predictors.prediction",
    "read_signals": "models.encoder",
    "run_recipe": "one_call",
}
"""Name -> the module of this package that has it, and its name there where that differs."""


def _imported(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # type checkers would take any name for one that is there
    __getattr__ = _imported


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
