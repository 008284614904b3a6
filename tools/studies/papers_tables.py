"""What tools/studies/papers.py runs: tables of variants of the recipes' small forms."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ds_distill.recipe import load_recipe


@dataclass(frozen=True)
class Variant:
    """One run per seed."""

    overrides: tuple[str, ...] = ()
    """Of the recipe's small form."""
    more: tuple[dict[str, Any], ...] = ()
    """Phases before the last one, `evaluate`, or before all others with `first`. Settings of
    `like`, a phase's name, are taken over where they name none of their own."""
    teacher: str = ""
    """A recipe beside this file, which is run once: the one model that it trains is the teacher."""


@dataclass(frozen=True)
class Table:
    recipe: str
    variants: dict[str, Variant]
    overrides: tuple[str, ...] = ()
    """Of all variants."""


BOUNDARIES = {"activation_boundary": {"weight": 0.001, "until": 0.9}}
ON_LABELS = {"cross_entropy": {"from": 0.9}}
PENALTY = {"confidence_penalty": {"weight": 0.3, "from": 0.9}}
KL = {"kl": {"temperature": 1.0, "until": 0.9}}
START = "phases.evaluate.start=true"
"""Evaluate the student before any training as well."""

PREDICTIONS = {"like": "distil", "save_as": "predictions", "losses": {**KL, **ON_LABELS, **PENALTY}}
"""KL of the predictions in place of the boundaries."""
NO_PENALTY = {"like": "distil", "save_as": "no-penalty", "losses": {**BOUNDARIES, **ON_LABELS}}
LABELS_ONLY = {"like": "control", "models": "fine-tuned", "save_as": "labels-only", "epochs": 5}
"""From the start of `distil`, as many steps, on labels alone."""

NOT_CALIBRATED = {
    "like": "teach",
    "save_as": "not-calibrated",
    "losses": {"cross_entropy": {}},
    "first": True,
}
"""The teacher without the penalty, from the same weights: before `teach` has changed them."""

WEIGHTS = {"class_weights": {"DDI-false": 0.25}}
"""Of DDI: most pairs do not interact, and a teacher of few examples says so of nearly all."""
DDI_MORE = (
    {**NOT_CALIBRATED, "losses": {"cross_entropy": WEIGHTS}},
    {
        "like": "distil",
        "save_as": "no-penalty",
        "losses": {**BOUNDARIES, "cross_entropy": {"from": 0.9, **WEIGHTS}},
    },
    LABELS_ONLY,
)

HOC_LOSSES = {
    "activation_boundary": {"weight": 0.001, "until": 0.6},
    "cross_entropy": {"from": 0.6},
}
"""The paper's: no penalty on confidence, neither here nor of the teacher."""
HOC = [
    "activating invasion and metastasis",
    "avoiding immune destruction",
    "cellular energetics",
    "enabling replicative immortality",
    "evading growth suppressors",
    "genomic instability and mutation",
    "inducing angiogenesis",
    "resisting cell death",
    "sustaining proliferative signaling",
    "tumor promoting inflammation",
]
DDI = ["DDI-false", "DDI-advise", "DDI-effect", "DDI-int", "DDI-mechanism"]

DOKTRA = {
    "calibrated": Variant(more=(PREDICTIONS, NO_PENALTY, LABELS_ONLY)),
    "not-calibrated": Variant(("phases.teach.losses={cross_entropy: {}}",), (PREDICTIONS,)),
}
RECIPE = {"recipe": Variant()}
"""As its small form has it."""
TWO_TEACHERS = {**RECIPE, "of-the-domain": Variant(teacher="domain-teacher.yaml")}
YES_NO = {"no": "no", "yes": "yes", "maybe": None}
QUESTIONS = {
    "path": "data:pubmedqa",
    "columns": {"text": "text_a", "text_b": "text_b"},
    "splits": {
        **{
            split: {"path": "data:pubmedqa", "split": file, "labels": YES_NO}
            for split, file in (("train", "train"), ("validation", "val"), ("test", "test"))
        },
        "transfer": {
            "path": "data:boolq",
            "split": "own_train",
            "labels": {"false": "no", "true": "yes"},
        },
    },
    "limit": {"transfer": 1600},
}
TABLES = {
    "doktra-gad": Table("doktra", DOKTRA, (START,)),
    "doktra-ddi": Table(
        "doktra",
        {"calibrated": Variant(more=DDI_MORE)},
        (
            START,
            "task.data.path=data:re_ddi",
            f"task.labels={json.dumps(DDI)}",
            "task.metric={name: micro_f1, leave_out: [DDI-false]}",
            "task.data.limit={train: 2400, validation: 600, test: 1600}",
            "task.max_length=128",
            "phases.teach.epochs=4",
            "phases.teach.losses.confidence_penalty.weight=0.3",
            "phases.distil.losses.confidence_penalty.weight=0.7",
            *(
                f"phases.{name}.losses.cross_entropy.class_weights={{DDI-false: 0.25}}"
                for name in ("teach", "control", "distil")
            ),
        ),
    ),
    "doktra-hoc": Table(
        "doktra",
        {"boundaries": Variant(more=(LABELS_ONLY,))},
        (
            START,
            "task.type=multi-label",
            "task.data.path=data:hoc",
            "task.data.columns={label: labels}",
            "task.data.splits={train: train_sentences, validation: val_sentences, "
            "test: test_sentences}",
            "task.data.limit={train: 3200}",
            f"task.labels={json.dumps(HOC)}",
            "task.metric={name: micro_f1}",
            "phases.teach.losses={cross_entropy: {}}",
            "phases.teach.epochs=10",
            f"phases.distil.losses={json.dumps(HOC_LOSSES)}",
        ),
    ),
    "doktra-tapt": Table("doktra-tapt", {"recipe": Variant(more=(LABELS_ONLY,))}, (START,)),
    "transfer-general": Table("transfer-general", TWO_TEACHERS),
    "transfer-random": Table("transfer-random", RECIPE),
    "transfer-domain": Table("transfer-domain", TWO_TEACHERS),
    "transfer-pubmedqa": Table(
        "transfer-general",
        RECIPE,
        (
            f"task.data={json.dumps(QUESTIONS)}",
            'task.labels=["no", "yes"]',
            "task.max_length=128",
            "task.metric={name: auc, positive: 'yes'}",
            "phases.teach.epochs=8",
        ),
    ),
}


def overrides_of(table: Table, variant: Variant) -> list[str]:
    """The overrides that make a run of the recipe's small form, but for seed and data folder."""
    overrides = [*table.overrides, *variant.overrides]
    if not variant.more:
        return overrides
    recipe = load_recipe(table.recipe, overrides, small=True)
    phases = [phase.model_dump(mode="json") for phase in recipe.phases]
    by_name = dict(zip(recipe.phase_names(), phases, strict=True))
    listed = [{phase.pop("kind"): phase} for phase in phases]
    kinds = dict(zip(by_name, (kind for one in listed for kind in one), strict=True))
    for settings in variant.more:
        own = {key: value for key, value in settings.items() if key not in ("like", "first")}
        made = {**by_name[settings["like"]], "name": own["save_as"], **own}
        listed.insert(0 if "first" in settings else -1, {kinds[settings["like"]]: made})
    return [*overrides, f"phases={json.dumps(listed)}"]
