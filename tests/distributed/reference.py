"""Small models and batches for the distributed tests, and a plain PyTorch loop as the oracle.

The loop uses no part of ds_distill but the batches: losses are written out again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    RobertaConfig,
)

from ds_distill.data.masking import Masking, mask_view
from ds_distill.losses import Term, TermInputs, build_terms
from ds_distill.recipe.terms import TermSettings, losses_of
from ds_distill.types import Batch
from ds_distill.views import PaddedView

CLASSES, VOCABULARY, LAYERS = 4, 300, 2
GROWN = 70
"""Tokens that the student of `grown` has more than its teacher."""
LEARNING_RATE, STEPS, WARMUP_STEPS, TOTAL_STEPS = 1e-3, 4, 2, 6
"""The rate rises from 0 to 1e-3 over the first two steps and is 0.75e-3 in the fourth."""
WEIGHT_DECAY = 1.0
BETA2, EPSILON = 0.9, 1e-3
"""A hundred times the usual, so that four steps without it end at other weights."""
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
    config: Any = BertConfig(**sizes)
    if task == "other families" and name == "first":
        config = DebertaV2Config(
            **sizes,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            type_vocab_size=0,
            pooler_hidden_size=WIDTHS[name],
        )
    elif task == "other families" and name == "second":
        config = RobertaConfig(**sizes)
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

PAIRS = {"layers": [(0, 1), (2, 1)]}
"""(student's, teacher's) that the hidden loss compares, by batches; of others the last ones."""


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
        return losses_of({"kl": kl, "hidden_mse": {"layers": dict(PAIRS["layers"])}})
    rest = {"cross_entropy": {}, "logit_mse": {"weight": 0.1}, "hidden_mse": {}}
    return losses_of({"kl": kl, **rest})


PARTIAL = {"second": {1: [0], 3: [2, 3]}}
"""Where teachers are partial: `second` knows class 1, by one of its outputs, and 3, by two."""


def table() -> dict[str, Any]:
    """`first` knows classes 0 and 1 best, `second` 2 and 3; `first` is better overall."""
    return {
        "teachers": ["first", "second"],
        "labels": [str(label) for label in range(CLASSES)],
        "correct": [[9, 9, 3, 2], [2, 2, 9, 9]],
        "total": [10, 10, 10, 10],
    }


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


@cache
def plain_loop(task: str, kind: str, policy: str) -> Trained:
    """All micro-batches of a step at once, no DeepSpeed."""
    student = make_student(task, kind)
    teachers = {name: make_teacher(task, name) for name in teacher_names(task)}
    widths = {name: WIDTHS[name] for name in teachers}
    terms = make_terms(task, kind, WIDTHS["student"], widths)
    projections = terms["hidden_mse"].projections if "hidden_mse" in terms else None
    parameters = [*student.parameters(), *(projections.parameters() if projections else [])]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=(0.9, BETA2),
        eps=EPSILON,
    )
    losses, gradients, norms = [], {}, []
    for step in range(STEPS):
        rise, fall = step / WARMUP_STEPS, (TOTAL_STEPS - step) / (TOTAL_STEPS - WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(rise, fall)
        batches = step_batches(task, kind, step)
        if kind == "grown":
            parts = _losses_of_grown(student, teachers["first"], batches)
        elif kind in EVERY_TOKEN:
            terms_of, teacher = EVERY_TOKEN[kind], teachers["first"]
            parts = _losses_of_tokens(terms_of, student, teacher, projections, batches)
        else:
            parts = _losses(task, kind, policy, student, teachers, projections, batches)
        if kind == "switch":
            now = {name: (one.get("from", 0), one.get("until", 1)) for name, one in SWITCH.items()}
            active = {n for n, (start, until) in now.items() if start <= step / STEPS < until}
            parts = {name: part for name, part in parts.items() if name in active}
        loss = torch.stack(list(parts.values())).sum()
        losses.append({name: part.item() for name, part in {"loss": loss, **parts}.items()})
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {
                name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None
            }
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm(task, kind)).item())
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in student.state_dict().items()}
    return Trained(losses, gradients, norms, weights)


def _losses(
    task: str,
    kind: str,
    policy: str,
    student: Any,
    teachers: dict[str, Any],
    projections: Any,
    batches: list[Batch],
) -> dict[str, torch.Tensor]:
    sums: dict[str, Any] = {}
    rows = labelled = 0
    for batch in batches:
        view = batch.views["student"]
        outputs = {
            name: model(**view.model_inputs(), output_hidden_states=True)
            for name, model in {"student": student, **teachers}.items()
        }
        logits = {name: output.logits for name, output in outputs.items()}
        if task == "masked-lm":
            logits = {name: scores.flatten(0, 1)[view.positions] for name, scores in logits.items()}
        targets = {name: logits[name].detach() for name in teachers}
        if policy == "partial":
            target = None
        elif policy == "expertise":
            choice = followed_teacher(batch)[:, None]
            target = torch.where(choice == 0, targets["first"], targets["second"])
        else:
            target = sum(targets.values()) / len(targets)
        counted, known = batch.row_sets["all"], batch.row_sets["labelled"]
        rows, labelled = rows + len(counted), labelled + len(known)
        scores, labels = logits["student"][known], batch.labels[known]
        if target is None:
            apart, distance = _against_partial(logits["student"], targets)
            kl = 0.5 * 4.0 * apart[counted].sum()
            ce = F.cross_entropy(scores, labels, reduction="sum")
        elif labels.ndim > 1:  # each label is a problem of its own: two classes, logits 0 and z
            distance = (target - logits["student"]).square().mean(-1)
            p, q = torch.sigmoid(target / 2), torch.sigmoid(logits["student"] / 2)
            apart = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            kl = 500.0 * 4.0 * apart.mean(-1)[counted].sum()
            losses = F.binary_cross_entropy_with_logits(scores, labels.float(), reduction="none")
            ce = losses.mean(-1).sum()
        else:
            distance = (target - logits["student"]).square().mean(-1)
            p, q = F.log_softmax(target / 2, -1), F.log_softmax(logits["student"] / 2, -1)
            if kind == "layers":  # Jensen-Shannon
                m = ((p.exp() + q.exp()) / 2).log()
                apart = 200.0 * (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1) / 2
            else:
                apart = (p.exp() * (p - q)).sum(-1)
            kl = 0.5 * 4.0 * apart[counted].sum()
            ce = F.cross_entropy(scores, labels, reduction="sum")
        parts = {"cross_entropy": ce, "kl": kl}
        if task != "masked-lm":
            maps = iter(projections.values())  # a teacher's pairs, then the next one's
            parts["hidden_mse"] = sum(
                (
                    next(maps)(outputs["student"].hidden_states[own][:, 0])
                    - outputs[name].hidden_states[other][:, 0].detach()
                )
                .square()
                .mean(-1)[counted]
                .sum()
                for name in teachers
                for own, other in PAIRS.get(kind, [(-1, -1)])
            )
            if kind == "layers":
                del parts["cross_entropy"]
            else:
                parts["logit_mse"] = 0.1 * distance[counted].sum()
        sums = {name: sums.get(name, 0.0) + part for name, part in parts.items()}
    return {
        name: total / (labelled if name == "cross_entropy" else rows)
        for name, total in sums.items()
    }


def _losses_of_grown(student: Any, teacher: Any, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """All tokens are labels; the teacher's terms are over those that it knows, and their rows."""
    sums: dict[str, Any] = {"cross_entropy": 0.0, "kl": 0.0, "logit_mse": 0.0}
    counts = dict.fromkeys(sums, 0)
    for batch in batches:
        view, sets = batch.views["student"], batch.row_sets
        own, other = (
            model(**view.model_inputs()).logits.flatten(0, 1)[view.positions]
            for model in (student, teacher)
        )
        other, same = other.detach(), own[:, :VOCABULARY]
        p, q = F.log_softmax(other / 2, -1), F.log_softmax(same / 2, -1)
        rows = {"cross_entropy": sets["labelled"], "kl": sets["tokens"], "logit_mse": sets["all"]}
        labels = batch.labels[sets["labelled"]]
        parts = {
            "cross_entropy": F.cross_entropy(own[sets["labelled"]], labels, reduction="sum"),
            "kl": 0.5 * 4.0 * (p.exp() * (p - q)).sum(-1)[rows["kl"]].sum(),
            "logit_mse": 0.1 * (other - same).square().mean(-1)[rows["logit_mse"]].sum(),
        }
        sums = {name: sums[name] + part for name, part in parts.items()}
        counts = {name: counts[name] + len(rows[name]) for name in sums}
    return {name: total / counts[name] for name, total in sums.items()}


def _losses_of_tokens(
    terms: dict[str, dict[str, Any]],
    student: Any,
    teacher: Any,
    projections: Any,
    batches: list[Batch],
) -> dict[str, torch.Tensor]:
    """Text by text, token by token: maps are made of what each layer's own projections give."""
    sums: dict[str, Any] = dict.fromkeys(terms, 0.0)
    tokens = masked = 0
    for batch in batches:
        view = batch.views["student"]
        assert isinstance(view, PaddedView)
        outputs = {
            name: model(**view.model_inputs(), output_hidden_states=True)
            for name, model in {"s": student, "t": teacher}.items()
        }
        known = batch.row_sets["all"]
        where = view.positions[known] if view.positions is not None else known
        q, p = (out.logits.flatten(0, 1)[where] / 2 for out in outputs.values())
        p, q = F.log_softmax(p.detach(), -1), F.log_softmax(q, -1)
        parts: dict[str, Any] = {
            "kl": 0.5 * 4.0 * (p.exp() * (p - q)).sum(),
            "cross_entropy": F.cross_entropy(
                outputs["s"].logits.flatten(0, 1)[where], batch.labels[known], reduction="sum"
            ),
        }
        masked += len(known)
        some = len(batch.row_sets["tokens"]) > 0
        for number, length in enumerate(view.attention_mask.sum(1).tolist() if some else ()):
            tokens += length
            states = {
                name: [state[number, :length] for state in output.hidden_states]
                for name, output in outputs.items()
            }
            if "hidden_mse" in terms:
                for own, other in ((0, 0), (2, 2)):
                    mapped = projections[f"first={own}-{other}"](states["s"][own])
                    distance = (mapped - states["t"][other].detach()).square().mean(-1).sum()
                    parts["hidden_mse"] = parts.get("hidden_mse", 0.0) + distance
            for name, settings in terms.items():
                if name in ("attention_kl", "attention_mse", "relation_kl"):
                    parts[name] = parts.get(name, 0.0) + _of_attention(
                        name, settings, (student, states["s"]), (teacher, states["t"])
                    )
        sums = {name: sums[name] + parts.get(name, 0.0) for name in sums}
    return {
        name: torch.as_tensor(total / (masked if name in ("kl", "cross_entropy") else tokens))
        for name, total in sums.items()
    }


def _of_attention(name: str, settings: dict[str, Any], student: Any, teacher: Any) -> torch.Tensor:
    """A term's loss of one text, summed over its tokens. student, teacher: the model, and the
    states [length, H] before and after each layer."""
    layers = settings.get("layers", {2: 2})
    total = torch.zeros(())
    for own, other in ({1: 1, 2: 2} if layers == "every" else layers).items():
        each = []
        for (model, states), layer in ((student, own), (teacher, other)):
            attention = model.bert.encoder.layer[layer - 1].attention.self
            projections = {"queries": attention.query, "keys": attention.key}
            projections["values"] = attention.value
            heads = settings.get("heads", 2) if name == "relation_kl" else 2
            found = {
                what: of(states[layer - 1]).unflatten(-1, (heads, -1)).transpose(0, 1)
                for what, of in projections.items()
            }
            if name == "relation_kl":
                scores = [found[what] @ found[what].mT for what in settings.get("of", found)]
            else:
                scores = [found["queries"] @ found["keys"].mT]
            width = found["keys"].shape[-1]
            each.append(torch.stack(scores) / width**0.5)
        mine, wanted = each[0], each[1].detach()
        if name == "attention_mse":
            total = total + (mine - wanted).square().mean(dim=(1, 3)).sum()
        else:
            p, q = wanted.log_softmax(-1), mine.log_softmax(-1)
            total = total + (p.exp() * (p - q)).sum(-1).mean(1).sum()
    return settings.get("weight", 1.0) * total


def _against_partial(
    student: torch.Tensor, targets: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the KL at temperature 2 and the squared distance, the mean over teachers, each
    over the classes that it knows: [n] both."""
    kl = distance = torch.zeros(len(student))
    for name, scores in targets.items():
        known = PARTIAL.get(name, {label: [label] for label in range(CLASSES)})
        mine = student[:, list(known)]
        sums = [scores[:, outputs].exp().sum(-1).log() for outputs in known.values()]
        wanted = torch.stack(sums, -1)
        p, q = F.log_softmax(wanted / 2, -1), F.log_softmax(mine / 2, -1)
        kl = kl + (p.exp() * (p - q)).sum(-1) / len(targets)
        distance = distance + (wanted - mine).square().mean(-1) / len(targets)
    return kl, distance
