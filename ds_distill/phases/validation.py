"""What a training's student is worth at the end of an epoch."""

from __future__ import annotations

from ds_distill.engine.engine import Engine
from ds_distill.evaluation.metrics import accuracy, masked_lm_report
from ds_distill.phases.asking import ask_all, score_tokens
from ds_distill.phases.run import ModelPlace, Run
from ds_distill.phases.training import Validation
from ds_distill.recipe.schema import MaskedLM

BATCH = 64
"""Examples per rank and forward pass."""


def validation_of(run: Run, place: ModelPlace) -> Validation | None:
    """The validation split as the model being trained sees it, where the data have one."""
    if not run.has_split("validation"):
        return None
    examples = run.examples("validation")
    tables = {"student": run.tables("validation", [place])[place.name]}
    collate = run.collator(examples, tables)

    def classification(engine: Engine) -> dict[str, float]:
        said = ask_all(engine, collate, ["student"], BATCH, run.world)["student"]
        return {"accuracy": accuracy(said.logits.numpy(), examples.labels)}

    def masked_lm(engine: Engine) -> dict[str, float]:
        scores = score_tokens(engine, collate, ["student"], BATCH, run.world)["student"]
        report = masked_lm_report(scores)
        return {name: report[name] for name in ("accuracy", "loss", "perplexity")}

    return masked_lm if isinstance(run.recipe.task, MaskedLM) else classification
