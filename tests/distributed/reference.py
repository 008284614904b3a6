"""Small models and batches for the distributed tests, and a plain PyTorch loop as the oracle.

The loop has the losses of a bundle, which tests/unit compare with their equations, and nothing of
an engine: batches are added up, weights are updated and rest by its own rules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from engines import plain_adamw
from families import RELATIVE, V3
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

from ds_distill.data.masking import Masking, mask_view
from ds_distill.engine.engine import OptimizerSettings
from ds_distill.losses import Term, TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.labels import LabelMap
from ds_distill.recipe.terms import TermSettings, losses_of
from ds_distill.routing import ExpertiseTable, Fitted, Router
from ds_distill.routing.gate import Gate
from ds_distill.types import Batch
from ds_distill.views import PaddedView

CLASSES, VOCABULARY, LAYERS = 4, 300, 2
GROWN = 70
"""Tokens that the student of `grown` has more than its teacher."""
STEPS = 4
OPTIMIZER = OptimizerSettings(
    1e-3, weight_decay=1.0, total_steps=6, warmup_steps=2, beta2=0.9, epsilon=1e-3
)
"""The rate rises from 0 to 1e-3 over the first two steps and is 0.75e-3 in the fourth. The decay is
a hundred times the usual, so that four steps without it end at other weights."""
MAX_GRAD_NORM = {
    "classification": 4.9,
    "other families": 5.5,
    "masked-lm": 0.9,
    "switch": 2.0,
    "many labels": 12.5,
    "partial": 5.4,
    "layers": 7.7,
    "attention": 40.0,
    "tokens": 4.8,
    "grown": 0.9,
}
"""By a scenario's task, or its batches. Between the norms of its steps: Adam does not see a factor
that all of them share."""


@dataclass(frozen=True)
class Scenario:
    """One training on ranks. resident: the student stays whole. packed: teachers read without
    padding. ahead: of how many steps they read the texts at once."""

    config: str = "zero3_fp32"
    task: str = "classification"
    batches: str = "even"
    policy: str = "average"
    resident: bool = True
    packed: bool = False
    ahead: int = 1


def at_stages(name: str, *stages: int, **about: Any) -> dict[str, Scenario]:
    return {name.format(stage): Scenario(f"zero{stage}_fp32", **about) for stage in stages}


MASKED_LM: dict[str, Any] = {"task": "masked-lm"}
SCENARIOS = {
    **at_stages("zero{}_fp32", 0, 1, 2, 3),
    "ahead_zero3": Scenario(ahead=STEPS),
    "ahead_masked_lm": Scenario(**MASKED_LM, resident=False, ahead=2),
    "ahead_packed": Scenario("zero1_fp32", packed=True, ahead=2),
    "sharded_student": Scenario(resident=False),
    "expertise": Scenario(batches="opposed", policy="expertise"),
    **at_stages("uneven_zero{}", 2, 3, batches="uneven"),
    **at_stages("switch_zero{}", 0, 1, 2, 3, batches="switch"),
    "switch_sharded_student": Scenario(batches="switch", resident=False),
    **at_stages("many_labels_zero{}", 0, 1, 2, 3, batches="many labels"),
    # The second teacher knows two of the four classes, one of them by two outputs.
    **at_stages("partial_zero{}", 0, 3, batches="partial", policy="partial"),
    # Embeddings and inner layers, a projection for each pair; the Jensen-Shannon divergence.
    "layers_zero3": Scenario(batches="layers"),
    # The teacher's head is tied to its embeddings, sharded at stage 3; the KL goes through
    # linear_kl.
    **at_stages("masked_lm_zero{}", 1, 3, **MASKED_LM),
    "masked_lm_sharded_student": Scenario(**MASKED_LM, resident=False),
    # Losses on attention alone, and of every token beside others; a rank without rows.
    **at_stages("attention_zero{}", 0, 1, 2, 3, **MASKED_LM, batches="attention"),
    "attention_sharded_student": Scenario(**MASKED_LM, batches="attention", resident=False),
    # More words than the teacher knows, in the tied embeddings of the student.
    **at_stages("grown_zero{}", 0, 1, 2, 3, **MASKED_LM, batches="grown"),
    "grown_sharded_student": Scenario(**MASKED_LM, batches="grown", resident=False),
    **at_stages("tokens_zero{}", 1, 3, **MASKED_LM, batches="tokens"),
    "packed tokens": Scenario(**MASKED_LM, batches="tokens", packed=True),
    # The first teacher is a DeBERTa-v3, the second a RoBERTa.
    "packed other families": Scenario(task="other families", packed=True),
    "packed uneven": Scenario(batches="uneven", packed=True),
    "packed masked-lm": Scenario(**MASKED_LM, packed=True),
}
"""In fp32: compared with a plain loop."""

LOW = {
    f"zero{stage}_{half}": Scenario(f"zero{stage}_{half}")
    for half, stages in {"bf16": (0, 1, 2, 3), "fp16": (1, 2, 3)}.items()
    for stage in stages
}


def max_grad_norm(task: str, kind: str) -> float:
    return MAX_GRAD_NORM.get(kind, MAX_GRAD_NORM[task])


MICRO_BATCHES = 4
"""Per optimizer step over all ranks: 2 ranks accumulate 2 each, 1 rank accumulates 4."""

WIDTHS = {"student": 32, "first": 64, "second": 48}
SEEDS = {"student": 0, "first": 1, "second": 2}
PEAKED = 8.0
"""Random weights are scaled up so that teachers are sure of something."""


def teacher_names(task: str) -> list[str]:
    return ["first"] if task == "masked-lm" else ["first", "second"]


def auto_class(task: str) -> Any:
    return AutoModelForMaskedLM if task == "masked-lm" else AutoModelForSequenceClassification


DEBERTA_V3 = {**RELATIVE, **V3, "type_vocab_size": 0, "pooler_hidden_size": WIDTHS["first"]}


def _make(task: str, name: str, more: int = 0) -> Any:
    torch.manual_seed(SEEDS[name])
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY + more,
        "hidden_size": WIDTHS[name],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 2 * WIDTHS[name],
        "max_position_embeddings": 40,
        "num_labels": CLASSES,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    family, own = "bert", {}
    if task == "other families" and name != "student":
        family, own = {"first": ("deberta-v2", DEBERTA_V3), "second": ("roberta", {})}[name]
    config = AutoConfig.for_model(family, **{**sizes, **own})
    return auto_class(task).from_config(config)


def make_student(task: str, kind: str = "even") -> Any:
    student = _make(task, "student", GROWN if kind == "grown" else 0).train()
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.ndim == 1:
                # New biases are 0, which nothing decays.
                parameter.add_(torch.randn(len(parameter)), alpha=0.1)
    return student


def make_teacher(task: str, name: str) -> Any:
    teacher = _make(task, name).eval()
    with torch.no_grad():
        # Predictions depend on the words then; a masked-LM's tied head grows with them.
        teacher.get_input_embeddings().weight.mul_(PEAKED)
        if task != "masked-lm":
            getattr(teacher.classifier, "out_proj", teacher.classifier).weight.mul_(PEAKED)
    return teacher


SWITCH: dict[str, dict[str, Any]] = {
    "cross_entropy": {"until": 0.5},
    "kl": {"temperature": 2.0, "weight": 0.5, "from": 0.75},
    "hidden_mse": {"from": 0.25, "until": 0.75},
}
"""Four steps: labels alone, without teachers; labels and states; states alone, so that the head and
the pooler are not used; logits alone, so that the projections are not."""


EVERY_TOKEN: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {
        "attention_kl": {"layers": "every", "weight": 1000.0},
        "relation_kl": {"heads": 4, "layers": {2: 1}, "weight": 200.0},
        "attention_mse": {"layers": {1: 2, 2: 2}, "weight": 2000.0},
    },
    "grown": {
        "cross_entropy": {},
        "kl": {"temperature": 2.0, "weight": 0.5, "rows": "tokens"},
        "logit_mse": {"weight": 0.1},
    },
    "tokens": {
        "cross_entropy": {},
        "kl": {"temperature": 2.0, "weight": 0.5},
        "hidden_mse": {"rows": "tokens", "layers": {0: 0, 2: 2}},
        "attention_kl": {"weight": 1000.0},
        "relation_kl": {"of": ["keys", "values"], "weight": 100.0},
    },
}
"""Masked-LM with losses of every token, by batches: on attention alone, so that the head is not
used; beside others; and of a student whose vocabulary has grown, over what its teacher knows. Their
weights are such that all matter."""


def make_terms(task: str, kind: str, width: int, teacher_widths: dict[str, int]) -> dict[str, Term]:
    torch.manual_seed(11)  # projections
    depths = dict.fromkeys(teacher_widths, LAYERS)
    return build_terms(task_losses(task, kind), TermInputs(width, teacher_widths, LAYERS, depths))


def task_losses(task: str, kind: str) -> dict[str, TermSettings]:
    kl = {"temperature": 2.0, "weight": 0.5}
    if kind == "many labels":
        kl["weight"] = 500.0  # else next to nothing beside the others
    if kind == "switch":
        return losses_of(SWITCH)
    if kind in EVERY_TOKEN:
        return losses_of(EVERY_TOKEN[kind])
    if task == "masked-lm":
        return losses_of({"kl": kl, "cross_entropy": {}})
    if kind == "layers":
        kl |= {"divergence": "js", "weight": 100.0}
        return losses_of({"kl": kl, "hidden_mse": {"layers": {0: 1, 2: 1}}})
    rest = {"cross_entropy": {}, "logit_mse": {"weight": 0.1}, "hidden_mse": {}}
    return losses_of({"kl": kl, **rest})


PARTIAL = {"second": {1: [0], 3: [2, 3]}}
"""Where teachers are partial: `second` knows class 1, by one of its outputs, and 3, by two."""


def known_experts() -> Fitted:
    """`first` knows classes 0 and 1 best, `second` 2 and 3; `first` is better overall. The policy
    reads nothing else that is fitted."""
    experts = ExpertiseTable(
        ("first", "second"),
        tuple(map(str, range(CLASSES))),
        np.array([[9, 9, 3, 2], [2, 2, 9, 9]]),
        np.array([10] * CLASSES),
    )
    nothing = Gate(torch.zeros(0, CLASSES), torch.zeros(CLASSES), reads_states=False)
    keys = torch.zeros(0, 2, dtype=torch.int64)
    return Fitted(experts, dict.fromkeys(experts.teachers, 1.0), nothing, keys)


# --------------------------------------------------------------------------- batches


def step_batches(task: str, kind: str, step: int) -> list[Batch]:
    """The MICRO_BATCHES batches of one optimizer step, in the order of (micro-step, rank)."""
    batches = _step_batches(task, kind, step)
    return [replace(batch, progress=step / STEPS) for batch in batches]


def _step_batches(task: str, kind: str, step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 * step + len(kind))
    if task == "masked-lm":
        more = GROWN if kind == "grown" else 0
        batches = [_masked_lm_batch(generator, more) for _ in range(MICRO_BATCHES)]
        if kind in EVERY_TOKEN:
            batches = [_with_tokens(batch) for batch in batches]
            # Of two ranks, the second has no row at all in the second step.
            for batch in batches[1::2] if step == 1 else ():
                batch.row_sets.update({name: rows[:0] for name, rows in batch.row_sets.items()})
        return batches
    if kind == "uneven":
        return [_batch(generator, size) for size in (1, 37, 1, 37)]
    if kind == "opposed":
        pool = _batch(generator, 400)
        follows_first = followed_teacher(pool) == 0
        sides = [follows_first.nonzero()[:, 0], (~follows_first).nonzero()[:, 0]]
        return [_pick(pool, sides[number % 2][8 * number : 8 * number + 8]) for number in range(4)]
    if kind == "many labels":
        # Of two ranks, the second has no labelled row in the second step.
        batches = [
            replace(batch, labels=torch.randint(0, 2, (8, CLASSES), generator=generator))
            for batch in (_batch(generator, 8) for _ in range(MICRO_BATCHES))
        ]
        for batch in batches[1::2] if step == 1 else ():
            batch.labels[:] = -100
            batch.row_sets["labelled"] = torch.zeros(0, dtype=torch.int64)
        return batches
    if kind == "switch":
        # Of two ranks, the second has no labelled row, and in the third step no row at all.
        batches = [_batch(generator, 8) for _ in range(MICRO_BATCHES)]
        for batch in batches[1::2]:
            batch.row_sets["labelled"] = torch.zeros(0, dtype=torch.int64)
            if step == 2:
                batch.row_sets["all"] = torch.zeros(0, dtype=torch.int64)
        return batches
    # The third has unlabelled rows, the last is a filler with one of its rows not counted.
    batches = [_batch(generator, 8) for _ in range(MICRO_BATCHES)]
    batches[2].labels[:3] = -100
    batches[2].row_sets["labelled"] = torch.arange(3, 8)
    batches[3].row_sets.update({"all": torch.arange(1, 8), "labelled": torch.arange(1, 8)})
    return batches


def _batch(generator: torch.Generator, size: int, more: int = 0) -> Batch:
    length = int(torch.randint(6, 20, (1,), generator=generator))
    lengths = torch.randint(3, length + 1, (size,), generator=generator)
    mask = (torch.arange(length)[None, :] < lengths[:, None]).long()
    ids = torch.randint(10, VOCABULARY + more, (size, length), generator=generator) * mask
    view = PaddedView(ids, mask, torch.zeros_like(ids))
    return Batch(
        keys=torch.randint(0, 2**60, (size, 2), generator=generator),
        views=dict.fromkeys(("student", "first", "second"), view),
        labels=torch.randint(0, CLASSES, (size,), generator=generator),
        row_sets={name: torch.arange(size) for name in ("all", "labelled")},
    )


def _masked_lm_batch(generator: torch.Generator, more: int) -> Batch:
    """more: tokens that no teacher knows."""
    plain = _batch(generator, 8, more)
    masking = Masking(0.3, mask_id=4, special_ids=(0, 1, 2, 3, 4), known=VOCABULARY, seed=0)
    view, labels = mask_view(plain.views["student"], plain.keys, masking, epoch=0)
    assert view.positions is not None
    assert (view.input_ids < VOCABULARY).all()
    return Batch(
        keys=plain.keys[view.positions // view.input_ids.shape[1]],
        views=dict.fromkeys(("student", "first"), view),
        labels=labels,
        row_sets={
            "all": (labels < VOCABULARY).nonzero()[:, 0],
            "labelled": torch.arange(len(labels)),
        },
    )


def _with_tokens(batch: Batch) -> Batch:
    """With a row for each token."""
    view = batch.views["student"]
    assert isinstance(view, PaddedView)
    tokens = view.attention_mask.flatten().nonzero()[:, 0]
    masked = torch.isin(tokens, view.positions).nonzero()[:, 0]
    labels = torch.full((len(tokens),), -100)
    labels[masked] = batch.labels
    known = labels < VOCABULARY
    sets = {"all": masked[known[masked]], "labelled": masked, "tokens": known.nonzero()[:, 0]}
    every = replace(view, positions=tokens)
    views = dict.fromkeys(batch.views, every)
    keys = torch.zeros(len(tokens), 2, dtype=torch.int64)
    return replace(batch, keys=keys, views=views, labels=labels, row_sets=sets)


def _pick(batch: Batch, rows: torch.Tensor) -> Batch:
    view = batch.views["student"]
    part = PaddedView(
        view.input_ids[rows],
        view.attention_mask[rows],
        None if view.token_type_ids is None else view.token_type_ids[rows],
    )
    return Batch(
        keys=batch.keys[rows],
        views=dict.fromkeys(batch.views, part),
        labels=batch.labels[rows],
        row_sets={name: torch.arange(len(rows)) for name in batch.row_sets},
    )


def followed_teacher(batch: Batch) -> torch.Tensor:
    """The thesis's rule, row by row: 0 or 1, int64 [n]."""
    expert_of = [0, 0, 1, 1]
    predictions = []
    for name in ("first", "second"):
        teacher = make_teacher("classification", name)
        with torch.no_grad():
            predictions.append(teacher(**batch.views[name].model_inputs()).logits.argmax(dim=-1))
    followed = []
    for row in range(len(batch.labels)):
        experts = [t for t in (0, 1) if expert_of[int(predictions[t][row])] == t]
        followed.append(experts[0] if len(experts) == 1 else 0)
    return torch.tensor(followed)


# ------------------------------------------------------------------------ plain PyTorch


@dataclass(frozen=True)
class Trained:
    """What a training leaves."""

    losses: list[dict[str, float]]
    """Per step: the loss and each term."""
    gradients: dict[str, torch.Tensor]
    """Of the first step, before clipping."""
    norms: list[float]
    """Of each step's gradients, before clipping."""
    weights: dict[str, torch.Tensor]


def make_bundle(task: str, kind: str, policy: str, teachers: dict[str, Any]) -> Bundle:
    """Of a student, these teachers and the scenario's terms."""
    student = make_student(task, kind)
    widths = {name: teacher.config.hidden_size for name, teacher in teachers.items()}
    terms = make_terms(task, kind, WIDTHS["student"], widths)
    if policy == "partial":
        maps = {
            name: LabelMap(tuple(map(tuple, known.values())), tuple(known))
            for name, known in PARTIAL.items()
        }
        router = Router({"policy": "average", "mix": "losses"}, temperature=2.0)
        return Bundle(student, teachers, terms, router, label_maps=maps)
    fitted = known_experts() if policy == "expertise" else None
    router = Router(policy, temperature=2.0, fitted=fitted) if len(teachers) > 1 else None
    return Bundle(student, teachers, terms, router)


@cache
def plain_loop(task: str, kind: str, policy: str) -> Trained:
    """No engine and no DeepSpeed: PyTorch's AdamW on the losses of a bundle, of all ranks' batches,
    one after the other. What no term of a step reads has no gradient there, and rests."""
    teachers = {name: make_teacher(task, name) for name in teacher_names(task)}
    bundle = make_bundle(task, kind, policy, teachers).train()
    student = bundle.student
    assert student is not None
    parameters = [p for module in bundle.trained for p in module.parameters()]
    own, total, warmup = OPTIMIZER, OPTIMIZER.total_steps, OPTIMIZER.warmup_steps
    optimizer = plain_adamw(parameters, own.weight_decay, betas=(0.9, own.beta2), eps=own.epsilon)
    losses, gradients, norms = [], {}, []
    for step in range(STEPS):
        rise, fall = step / warmup, (total - step) / (total - warmup)
        for group in optimizer.param_groups:
            group["lr"] = own.learning_rate * min(rise, fall)
        batches = step_batches(task, kind, step)
        sums: Counter[str] = Counter()
        optimizer.zero_grad()
        for batch in batches:
            rows = {
                name: sum(len(one.row_sets[name]) for one in batches) for name in batch.row_sets
            }
            counts = {name: torch.tensor(float(count)) for name, count in rows.items()}
            parts = bundle(replace(batch, counts=counts))
            parts["loss"].backward()
            sums.update({name: part.item() for name, part in parts.items()})
        losses.append(dict(sums))
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None
        if step == 0:
            gradients = {
                name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None
            }
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm(task, kind)).item())
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in student.state_dict().items()}
    return Trained(losses, gradients, norms, weights)
