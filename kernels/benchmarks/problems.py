"""The benchmark's problems: an op and its rivals on the same tensors."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from modelled import least_bytes
from torch import Tensor

import ds_kernels
from ds_kernels._shared import INTERPRETED

SHARE = 0.15  # counted rows
TILE = 64  # positions of a tile of scores in 16 bits


@dataclass
class Problem:
    """`paths` maps a rival to a loss over `leaves` and `fixed`, made in float32 and rounded to
    `dtype` here; the oracle takes the unrounded ones."""

    op: str
    shape: dict[str, int]
    dtype: torch.dtype
    leaves: list[Tensor]
    fixed: list[Tensor]
    paths: dict[str, Callable[[list[Tensor], list[Tensor]], Tensor]]
    floor_bytes: int
    sizes: dict[str, int] = field(default_factory=dict)  # for a model of its time: what is visited
    exact: tuple[list[Tensor], list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.exact = self.leaves, self.fixed
        self.leaves = [x.detach().to(self.dtype).requires_grad_() for x in self.leaves]
        self.fixed = [x.to(self.dtype) if x.is_floating_point() else x for x in self.fixed]
        # Over all rows, compiled code lost to itself over the counted ones in every measurement.
        best = "eager_compact" if "eager_compact" in self.paths else "eager"
        rival = best.replace("eager", "compile")
        self.paths[rival] = torch.compile(self.paths[best], dynamic=False)


def _indices(rows: int, device: torch.device) -> Tensor:
    counted = torch.rand(rows, generator=torch.Generator().manual_seed(0)) < SHARE
    return counted.nonzero().squeeze(1).to(device)


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    acc = torch.promote_types(student.dtype, torch.float32)
    s, t = student.to(acc).log_softmax(-1), teacher.to(acc).log_softmax(-1)
    return F.kl_div(s, t, reduction="none", log_target=True).sum(-1)


def _mean(rows: Tensor, indices: Tensor) -> Tensor:
    mask = torch.zeros(rows.shape[0], device=rows.device, dtype=rows.dtype)
    return (rows * mask.index_fill(0, indices, 1.0)).sum() / indices.shape[0]


def _both(fused: Any, rows: Any, indices: Tensor, gather: Any) -> dict[str, Any]:
    return {
        "ds_kernels": fused,
        "eager": lambda leaves, fixed: _mean(rows(leaves, fixed), indices),
        "eager_compact": lambda leaves, fixed: rows(*gather(leaves, fixed)).mean(),
    }


def masked_kl(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Problem:
    student = torch.randn(rows, width, device=device) * 2
    teacher = torch.randn(rows, width, device=device) * 2
    chosen, size = _indices(rows, device), dtype.itemsize
    counted = chosen.shape[0]
    paths = _both(
        lambda leaves, fixed: ds_kernels.masked_kl(leaves[0], fixed[0], chosen),
        lambda leaves, fixed: _kl(leaves[0], fixed[0]),
        chosen,
        lambda leaves, fixed: ([leaves[0][chosen]], [fixed[0][chosen]]),
    )
    triton = device.type == "cuda" or INTERPRETED
    if triton and (kl_div := _liger("transformers.kl_div.LigerKLDIVLoss")) is not None:
        liger = kl_div(reduction="batchmean")
        paths["liger_compact"] = lambda leaves, fixed: liger(
            leaves[0][chosen].float().log_softmax(-1), fixed[0][chosen].float().softmax(-1)
        )
    floor = least_bytes(counted, rows - counted, width, size)
    return Problem(
        "masked_kl", {"N": rows, "V": width}, dtype, [student], [teacher], paths, floor,
        {"counted": counted},
    )  # fmt: skip


def class_kl(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Problem:
    student = torch.randn(rows, width, device=device)
    teacher = torch.randn(rows, width, device=device)
    paths = {
        "ds_kernels": lambda leaves, fixed: ds_kernels.masked_kl(leaves[0], fixed[0]),
        "eager": lambda leaves, fixed: _kl(leaves[0], fixed[0]).mean(),
    }
    return Problem(
        "masked_kl", {"N": rows, "V": width}, dtype, [student], [teacher], paths,
        5 * dtype.itemsize * rows * width,
    )  # fmt: skip


def masked_cosine(
    rows: int, width: int, layers: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    students, teachers = (
        [torch.randn(rows, width, device=device) for _ in range(layers)] for _ in range(2)
    )
    chosen = _indices(rows, device)

    def rows_of(leaves: list[Tensor], fixed: list[Tensor]) -> Tensor:
        pairs = zip(leaves, fixed, strict=True)
        acc = torch.promote_types(leaves[0].dtype, torch.float32)
        return sum(1 - F.cosine_similarity(s.to(acc), t.to(acc), dim=-1) for s, t in pairs)

    paths = _both(
        lambda leaves, fixed: ds_kernels.masked_cosine(leaves, fixed, chosen),
        rows_of,
        chosen,
        lambda leaves, fixed: ([x[chosen] for x in leaves], [x[chosen] for x in fixed]),
    )
    size, counted = dtype.itemsize, chosen.shape[0]
    floor = layers * size * width * (3 * counted + rows - counted)
    return Problem(
        "masked_cosine", {"N": rows, "D": width, "layers": layers}, dtype, students, teachers,
        paths, floor,
    )  # fmt: skip


def linear_kl(
    rows: int, width: int, wide: int, narrow: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    student, teacher = (torch.randn(rows, size, device=device) for size in (narrow, wide))
    own, head = (torch.randn(width, size, device=device) * 0.05 for size in (narrow, wide))
    chosen = _indices(rows, device)

    def rows_of(leaves: list[Tensor], fixed: list[Tensor]) -> Tensor:
        return _kl(F.linear(*leaves), F.linear(*fixed))

    paths = _both(
        lambda leaves, fixed: ds_kernels.linear_kl(*leaves, *fixed, chosen),
        rows_of,
        chosen,
        lambda leaves, fixed: ([leaves[0][chosen], leaves[1]], [fixed[0][chosen], fixed[1]]),
    )
    gpu = device.type == "cuda"
    triton = gpu or INTERPRETED
    if triton and (jsd := _liger("transformers.fused_linear_jsd.LigerFusedLinearJSD")) is not None:
        fused = jsd(jsd_beta=0.0)  # KL(teacher || student)
        paths["liger_compact"] = lambda leaves, fixed: fused(
            leaves[0][chosen], leaves[1], fixed[0][chosen], fixed[1], None
        )
    name = "transformers.fused_linear_kl_div.LigerFusedLinearKLDivLoss"  # since 0.8.5
    if triton and (kl_div := _liger(name)) is not None:
        # The student alone is fused: the teacher comes as its probabilities.
        of_one = kl_div(reduction="batchmean", temperature=1.0)
        paths["liger_kl_compact"] = lambda leaves, fixed: of_one(
            leaves[0][chosen], leaves[1], F.linear(fixed[0][chosen], fixed[1]).float().softmax(-1)
        )
    if (chunked := _liger("chunked_loss.LigerFusedLinearJSDLoss")) is not None:
        loss = chunked(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=gpu)
        labels = torch.zeros(rows, dtype=torch.int64, device=device)
        ignored = labels.index_fill(0, chosen, 1) == 0
        paths["liger_chunked"] = lambda leaves, fixed: loss(
            *leaves, *fixed, labels.masked_fill(ignored, -100)
        )
        paths["liger_chunked_compact"] = lambda leaves, fixed: loss(
            leaves[0][chosen], leaves[1], fixed[0][chosen], fixed[1], labels[chosen]
        )
    size, counted = dtype.itemsize, chosen.shape[0]
    # Weights read once forward and once backward, their gradient written; hidden states in and out.
    floor = size * (width * (wide + 3 * narrow) + counted * (wide + 2 * narrow) + rows * narrow)
    return Problem(
        "linear_kl", {"N": rows, "V": width, "Dt": wide, "Ds": narrow}, dtype, [student, own],
        [teacher, head], paths, floor,
    )  # fmt: skip


def topk_kl(
    rows: int, width: int, entries: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    student = torch.randn(rows, width, device=device) * 2
    log_probs, ids = (torch.randn(rows, width, device=device) * 2).log_softmax(-1).topk(entries, -1)
    tail = torch.log(-torch.expm1(log_probs.logsumexp(-1)))
    chosen = _indices(rows, device)

    def rows_of(leaves: list[Tensor], fixed: list[Tensor]) -> Tensor:
        (x,), (p, columns, rest) = leaves, fixed
        acc = torch.promote_types(x.dtype, torch.float32)
        x = x.to(acc)
        both = torch.cat((p, rest[:, None]), -1).to(acc).log_softmax(-1)
        lse = x.logsumexp(-1, keepdim=True)
        outside = x.scatter(1, columns, -float("inf")).logsumexp(-1, keepdim=True)
        q = torch.cat((x.gather(1, columns), outside), -1) - lse
        return (both.exp() * (both - q)).sum(-1)

    paths = _both(
        lambda leaves, fixed: ds_kernels.topk_kl(leaves[0], *fixed, chosen),
        rows_of,
        chosen,
        lambda leaves, fixed: ([leaves[0][chosen]], [x[chosen] for x in fixed]),
    )
    size, counted = dtype.itemsize, chosen.shape[0]
    floor = counted * (3 * size * width + 16 * entries) + size * (rows - counted) * width
    return Problem(
        "topk_kl", {"N": rows, "V": width, "K": entries}, dtype, [student],
        [log_probs, ids, tail], paths, floor, {"counted": counted},
    )  # fmt: skip


def scores(
    op: str, batch: int, heads: int, length: int, width: int, dtype: torch.dtype,
    device: torch.device,
) -> Problem:  # fmt: skip
    """Real tokens are between half of the length and all of it."""
    lengths = torch.linspace(length // 2, length, batch, device=device).long()
    mask = torch.arange(length, device=device) < lengths[:, None]
    shape = (batch, length, heads * width)
    count = 2 if op == "attention_kl" else 1
    leaves, fixed = ([torch.randn(shape, device=device) for _ in range(count)] for _ in range(2))

    def split(x: Tensor) -> Tensor:
        return x.unflatten(2, (heads, -1)).transpose(1, 2)

    def fused(leaves: list[Tensor], fixed: list[Tensor]) -> Tensor:
        if op == "attention_kl":
            return ds_kernels.attention_kl(*map(split, (*leaves, *fixed)), mask)
        return ds_kernels.relation_kl(leaves[0], fixed[0], mask, heads=heads)

    def eager(leaves: list[Tensor], fixed: list[Tensor]) -> Tensor:
        logs = []
        for tensors in (leaves, fixed):
            query, key = split(tensors[0]), split(tensors[-1])
            acc = torch.promote_types(query.dtype, torch.float32)
            z = (query @ key.mT).to(acc) / math.sqrt(width)
            logs.append(z.masked_fill(~mask[:, None, None, :], -1e9).log_softmax(-1))
        rows = (logs[1].exp() * (logs[1] - logs[0])).sum(-1)
        return (rows * mask[:, None, :]).sum() / (heads * mask.sum())

    floor = 5 * count * dtype.itemsize * batch * length * heads * width
    sizes = {"B": batch, "A": heads, "S": length, "D": width}
    # Tiles of 64 positions up to the last real one are visited, by each query of them.
    tiles = -(-lengths // TILE) * TILE
    visited = {"scores": heads * int((tiles * tiles).sum())}
    paths = {"ds_kernels": fused, "eager": eager}
    return Problem(op, sizes, dtype, leaves, fixed, paths, floor, visited)


def _liger(name: str) -> Any:
    """A class of liger-kernel, or None where it is not installed."""
    module, _, cls = name.rpartition(".")
    try:
        return getattr(importlib.import_module(f"liger_kernel.{module}"), cls)
    except ImportError:
        return None


def problems(
    device: torch.device, toy: bool = False
) -> Iterator[tuple[str, torch.dtype, Callable[[], Problem]]]:
    """(op, dtype, maker): one problem's tensors are alive at a time, and only of those wanted.

    toy: every op and path on few rows, for a try of the benchmark itself.
    """
    gpu = device.type == "cuda"
    float32, bfloat16 = torch.float32, torch.bfloat16
    for rows, width in ((32, 6), (8, 1000)):
        yield "masked_kl", float32, partial(class_kl, rows, width, float32, device)
    vocabularies = (30522, 50265, 128100) if gpu else (30522,)
    if toy:
        vocabularies = (640,)
    # The usual dtype of a device first: a run that is cut off has measured that.
    for dtype in (bfloat16, float32, torch.float16) if gpu else (float32, bfloat16):
        given = {"dtype": dtype, "device": device}
        for width in vocabularies:
            rows = 64 if toy else 8192 if gpu else 512
            yield "masked_kl", dtype, partial(masked_kl, rows, width, **given)
            yield "topk_kl", dtype, partial(topk_kl, rows, width, 64, **given)
        if gpu or dtype == float32:
            for width in vocabularies:
                rows = 64 if toy else 8192 if gpu else 1024
                yield "linear_kl", dtype, partial(linear_kl, rows, width, 1024, 768, **given)
        for layers in (1, 6):
            rows = 64 if toy else 65536 if gpu else 4096
            yield "masked_cosine", dtype, partial(masked_cosine, rows, 768, layers, **given)
        if gpu or dtype == float32:
            for op in ("attention_kl", "relation_kl"):
                for length in (32,) if toy else (128, 512):
                    batch = 2 if toy else (65536 if gpu else 1024) // length
                    yield op, dtype, partial(scores, op, batch, 12, length, 64, **given)
