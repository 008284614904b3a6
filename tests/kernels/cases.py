"""Each op beside its plain eager form, which in float64 is the oracle."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ds_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() and not INTERPRETED else ["cpu"]
MODULES = {
    name: importlib.import_module(f"ds_kernels.{name}")
    for name in (
        "_shared",
        "masked_kl",
        "masked_cosine",
        "linear_kl",
        "topk_kl",
        "attention_kl",
        "relation_kl",
        "_rows",
        "_rows_reference",
        "_topk",
        "_topk_reference",
        "_scores",
        "_scores_reference",
        "_projections",
        "_tiles",
        "_divergences",
    )
}
V = 37  # three interpreter tiles, the last one ragged
SHARED = 29  # of these, columns that vocabularies of unlike sizes have in common
K = 5
LAYERS = 3
HEADS = 2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

Tensors = list[Tensor]


@dataclass(frozen=True)
class Case:
    """`make(lead)` gives float64 (student, teacher) tensors; `rows` the loss of every row."""

    name: str
    make: Callable[[tuple[int, ...]], tuple[Tensors, Tensors]]
    op: Callable[..., Tensor]
    rows: Callable[[Tensors, Tensors, float], Tensor]
    tempered: bool = True
    scores: bool = False  # mask [B, S], losses [B, heads, S]
    equal: bool = True  # student and teacher tensors have the same shapes

    def __repr__(self) -> str:
        return self.name

    def inputs(
        self, lead: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """Rounded student and teacher tensors, then the unrounded float64 ones."""
        torch.manual_seed(seed)
        student, teacher = ([x.to(device) for x in xs] for xs in self.make(lead))
        rounded = ([_round(x, dtype) for x in xs] for xs in (student, teacher))
        low_student, low_teacher = rounded
        for x in (*low_student, *student):
            x.requires_grad_()
        return low_student, low_teacher, student, teacher

    def loss_shape(self, lead: tuple[int, ...]) -> tuple[int, ...]:
        if self.scores:
            return (lead[0], HEADS, lead[1])
        return (LAYERS, *lead) if self.name == "cosine_layers" else lead

    def counted(self, mask: Tensor) -> Tensor:
        return mask[:, None, :] if self.scores else mask

    def wanted(
        self,
        student: Tensors,
        teacher: Tensors,
        mask: Tensor,
        temperature: float = 1.0,
        weight: float = 1.0,
        tolerance: float = 0.0,
    ) -> Tensor:
        """Row losses in the dtype of the inputs, 0 where not counted."""
        if self.scores:
            rows = self.rows(student, teacher, mask)
        else:
            rows = self.rows(student, teacher, temperature)
        return torch.where(self.counted(mask), (weight * rows - tolerance).clamp(min=0), 0.0)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype) if x.is_floating_point() else x


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL from log-probabilities; columns with p = 0 count nothing."""
    return torch.where(p > -float("inf"), p.exp() * (p - q), 0.0).sum(-1)


def _logs(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)


def kl_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    q, p = _logs(student[0], teacher[0], temperature)
    return _kl(p, q) * temperature**2


def _reverse_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    q, p = _logs(student[0], teacher[0], temperature)
    return _kl(q, p) * temperature**2


def _js_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    q, p = _logs(student[0], teacher[0], temperature)
    m = torch.logaddexp(p, q) - math.log(2)
    return (_kl(p, m) + _kl(q, m)) / 2 * temperature**2


def _tv_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    q, p = _logs(student[0], teacher[0], temperature)
    return (p.exp() - q.exp()).abs().sum(-1) / 2 * temperature**2


def _cosine_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    return 1 - F.cosine_similarity(student[0], teacher[0], dim=-1)


def _layer_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    return 1 - F.cosine_similarity(torch.stack(student), torch.stack(teacher), dim=-1)


def _project(student: Tensors, teacher: Tensors) -> tuple[Tensors, Tensors]:
    return [F.linear(*student)], [F.linear(*teacher)]


def _linear_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    return kl_rows(*_project(student, teacher), temperature)


def _shared_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    (s,), (t,) = _project(student, teacher)
    return kl_rows([s[..., :SHARED]], [t[..., :SHARED]], temperature)


def _mse_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    (s,), (t,) = _project(student, teacher)
    return (s - t).square().sum(-1)


def topk_rows(student: Tensors, teacher: Tensors, temperature: float) -> Tensor:
    log_probs, ids, tail = teacher
    width = student[0].shape[-1]
    p = torch.cat((log_probs.masked_fill(ids < 0, -float("inf")), tail[..., None]), -1)
    q = (student[0] / temperature).log_softmax(-1)
    chosen = torch.zeros(*q.shape[:-1], width + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter(-1, torch.where(ids < 0, width, ids), True)[..., :-1]
    rest = q.masked_fill(chosen, -float("inf")).logsumexp(-1, keepdim=True)
    kept = q.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -float("inf"))
    return _kl(p.log_softmax(-1), torch.cat((kept, rest), -1)) * temperature**2


def _score_rows(student: Tensors, teacher: Tensors, mask: Tensor) -> Tensor:
    logs = []
    for query, key in (student, teacher):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        logs.append(scores.masked_fill(~mask[:, None, None, :], -float("inf")).log_softmax(-1))
    q, p = logs
    return _kl(p, torch.where(mask[:, None, None, :], q, 0.0))


def _relation_rows(student: Tensors, teacher: Tensors, mask: Tensor) -> Tensor:
    split = [x[0].unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (student, teacher)]
    return _score_rows([split[0]] * 2, [split[1]] * 2, mask)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _logits(lead: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    return [_randn(*lead, V) * 2], [_randn(*lead, V) * 2]


def _heads(lead: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    return (
        [_randn(*lead, 8), _randn(V, 8), _randn(V)],
        [_randn(*lead, 12), _randn(V, 12), _randn(V)],
    )


def _nested_heads(lead: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    student, teacher = _heads(lead)
    return student, [teacher[0], *(x[: SHARED + 2] for x in teacher[1:])]


def make_topk(lead: tuple[int, ...], width: int = V, entries: int = K) -> tuple[Tensors, Tensors]:
    log_probs, ids = (_randn(*lead, width) * 2).log_softmax(-1).topk(entries, -1)
    tail = torch.log(-torch.expm1(log_probs.logsumexp(-1)))
    ids[..., -1] = -1  # padding
    return [_randn(*lead, width) * 2], [log_probs, ids, tail]


def _scores(lead: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    batch, length = lead
    student = [_randn(batch, HEADS, length, 6), _randn(batch, HEADS, length, 6)]
    return student, [_randn(batch, HEADS, length, 8), _randn(batch, HEADS, length, 8)]


def _relations(lead: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    return [_randn(*lead, HEADS * 6)], [_randn(*lead, HEADS * 8)]


def _layers(lead: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    student, teacher = ([_randn(*lead, V) for _ in range(LAYERS)] for _ in range(2))
    return student, teacher


def _of(divergence: str) -> Callable[..., Tensor]:
    return partial(ds_kernels.masked_kl, divergence=divergence)


def _single(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda student, teacher, mask=None, **options: op(
        student[0], teacher[0], mask, **options
    )


def _linear(op: Callable[..., Tensor], entries: int | None = None) -> Callable[..., Tensor]:
    def call(student: Tensors, teacher: Tensors, mask: Any = None, **options: Any) -> Tensor:
        (h, w, b), (ht, wt, bt) = student, teacher
        options = {"student_bias": b, "teacher_bias": bt, "entries": entries, **options}
        return op(h, w, ht, wt, mask, **options)

    return call


def _attention(student: Tensors, teacher: Tensors, mask: Any = None, **options: Any) -> Tensor:
    return ds_kernels.attention_kl(*student, *teacher, mask, **options)


def _topk(student: Tensors, teacher: Tensors, mask: Any = None, **options: Any) -> Tensor:
    return ds_kernels.topk_kl(student[0], *teacher, mask, **options)


def _relation(student: Tensors, teacher: Tensors, mask: Any = None, **options: Any) -> Tensor:
    return ds_kernels.relation_kl(student[0], teacher[0], mask, heads=HEADS, **options)


_MSE = partial(ds_kernels.linear_kl, divergence="mse")
KL = Case("kl", _logits, _single(ds_kernels.masked_kl), kl_rows)
TOPK = Case("topk", make_topk, _topk, topk_rows, equal=False)
LINEAR = Case("linear_kl", _heads, _linear(ds_kernels.linear_kl), _linear_rows, equal=False)
COSINE = Case("cosine", _logits, _single(ds_kernels.masked_cosine), _cosine_rows, tempered=False)
LAYER_COSINE = Case(
    "cosine_layers",
    _layers,
    lambda s, t, mask=None, **options: ds_kernels.masked_cosine(s, t, mask, **options),
    _layer_rows,
    tempered=False,
)
NESTED = Case(
    "linear_kl_entries",
    _nested_heads,
    _linear(ds_kernels.linear_kl, SHARED),
    _shared_rows,
    equal=False,
)
ATTENTION = Case(
    "attention", _scores, _attention, _score_rows, tempered=False, scores=True, equal=False
)
RELATION = Case(
    "relation", _relations, _relation, _relation_rows, tempered=False, scores=True, equal=False
)
CASES = [
    KL,
    Case("reverse_kl", _logits, _single(_of("reverse_kl")), _reverse_rows),
    Case("js", _logits, _single(_of("js")), _js_rows),
    Case("tv", _logits, _single(_of("tv")), _tv_rows),
    COSINE,
    LAYER_COSINE,
    LINEAR,
    Case("linear_mse", _heads, _linear(_MSE), _mse_rows, tempered=False, equal=False),
    NESTED,
    TOPK,
    ATTENTION,
    RELATION,
]
ROW_CASES = [case for case in CASES if not case.scores]


def lead_of(case: Case) -> tuple[int, ...]:
    return (2, V) if case.scores else (2, 3)


def mask_of(case: Case, device: torch.device) -> Tensor:
    mask = torch.ones(lead_of(case), dtype=torch.bool, device=device)
    mask[0, 1] = False
    mask[1, -1] = False
    if case.scores:
        mask[1, 20:] = False
    return mask


def error(value: Tensor, oracle: Tensor) -> float:
    return (value.double() - oracle.double()).abs().max().item() if value.numel() else 0.0
