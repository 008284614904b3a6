"""Memory and operations of a training step's passes, as functions of the micro-batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig

from ds_distill.losses.logits import is_large
from ds_distill.models.packed import takes_flashdeberta
from ds_distill.models.packing import takes_packed
from ds_distill.planning.gpus import Device
from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.planning.trace import Cost
from ds_distill.recipe import Recipe
from ds_kernels._projections import KEEP_BYTES, LOGIT_BYTES

_SMALLEST = 64
"""Examples from which on a peak grows evenly. Below, the gradient of the embeddings or the head can
be larger than all activations."""


@dataclass(frozen=True)
class Growth:
    """Bytes of a peak, and how it grows with the micro-batch."""

    here: int = 0
    """At the planned micro-batch."""
    fixed: float = 0.0
    per_example: float = 0.0

    @staticmethod
    def of(measure: Callable[[int], int], examples: int) -> Growth:
        """measure: gives the peak of so many examples."""
        first = max(examples, _SMALLEST)
        one, two = measure(first), measure(2 * first)
        return Growth(measure(examples), 2 * one - two, (two - one) / first)

    def largest(self, budget: int) -> int:
        """Most examples within so many bytes."""
        if self.fixed > budget:
            return 0
        if self.per_example <= 0:
            return 2**31
        return math.floor((budget - self.fixed) / self.per_example)

    def __add__(self, other: Growth) -> Growth:
        fixed, each = self.fixed + other.fixed, self.per_example + other.per_example
        return Growth(self.here + other.here, fixed, each)


@dataclass(frozen=True)
class Shape:
    """What all passes of a phase have alike."""

    length: int
    row_share: float | None
    """See `TaskSettings.row_share`."""
    dtype: torch.dtype
    on_gpu: bool

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def kind(self) -> str:
        """Of the device, as torch calls it."""
        return "cuda" if self.on_gpu else "cpu"

    def rows(self, examples: int, share: float) -> int:
        return max(1, round(share * examples * self.length))

    def of(self, examples: int, *, trains: bool, **options: Any) -> Pass:
        """options: those of a `Pass`. On a CPU a model that is trained has the plain attention, see
        Run.model."""
        rows = None if self.row_share is None else self.rows(examples, self.row_share)
        fused, mask_bytes = self.on_gpu or not trains, 1 if self.on_gpu else None
        one = Pass(examples, self.length, rows, self.dtype, trains, fused, mask_bytes)
        return replace(one, **options)


@dataclass(frozen=True)
class Head:
    """How a masked-LM's loss reads the student's head, and a live teacher's."""

    vocabulary: int
    widths: tuple[int, ...]
    """Of the features that are projected: the student's, then the teacher's."""
    dense: bool
    """Whether a term makes the student's logits [rows, V]."""
    chunked: bool
    """Whether a term goes through linear_kl, which never holds them all."""
    recomputes: bool
    """Whether the dense term is cross-entropy alone, of which large logits are made some at a time,
    and again in the backward pass."""
    dense_share: float
    """Of all tokens, those whose logits a dense term makes."""
    chunked_share: float
    of_teachers: bool
    """Whether a term, or what mixes teachers, makes a live teacher's logits."""

    def chunked_bytes(self, shape: Shape, examples: int) -> int:
        """What the chunked term holds at its peak."""
        if not self.chunked:
            return 0
        rows = shape.rows(examples, self.chunked_share)
        logits = min(rows * 8 * self.vocabulary, LOGIT_BYTES[shape.kind])
        derivatives = rows * self.vocabulary * shape.size
        if derivatives > KEEP_BYTES[shape.kind]:
            derivatives = logits // 8 * shape.size
        return logits + derivatives + 4 * self.vocabulary * self.widths[0]

    def recomputed_bytes(self, shape: Shape, rows: int) -> int:
        """What cross-entropy without all logits holds at its peak: float32 logits of a chunk and a
        sum of the weight's gradient, and of 16 bits what is made of both."""
        numbers = min(rows * self.vocabulary, LOGIT_BYTES[shape.kind] // 8)
        numbers += self.vocabulary * self.widths[0]
        return (4 + shape.size if shape.size < 4 else shape.size) * numbers

    def chunked_cost(self, shape: Shape, examples: int) -> Cost:
        """Products of the chunked term: both models forward, the student's backward, and both once
        more where the derivatives are too large to be stored."""
        if not self.chunked:
            return Cost()
        rows = shape.rows(examples, self.chunked_share)
        again = rows * self.vocabulary * shape.size > KEEP_BYTES[shape.kind]
        calls: Counter[tuple[int, int]] = Counter()
        logits = 4 * rows * self.vocabulary
        for width in self.widths:
            weight = shape.size * self.vocabulary * width
            calls[2 * rows * width * self.vocabulary, logits + weight] += 2 if again else 1
        calls[2 * rows * self.widths[0] * self.vocabulary, logits] += 2
        calls[0, 6 * logits] += 1  # softmax of both and the derivative
        return Cost(calls)


def student_pass(shape: Shape, examples: int, head: Head | None, **options: Any) -> Pass:
    """A trained model's forward and backward pass; options: those of a `Pass`."""
    if head is None:
        return shape.of(examples, trains=True, **options)
    rows = shape.rows(examples, head.dense_share)
    return shape.of(examples, trains=True, logits=head.dense, rows=rows, **options)


def student_memory(
    student: PlannedModel, shape: Shape, examples: int, head: Head | None, **options: Any
) -> tuple[Growth, Growth]:
    """(activations, logits of a vocabulary and their derivatives) of such a pass."""
    if head is None:
        peak = lambda count: cost(student, student_pass(shape, count, None, **options)).peak  # noqa: E731
        return Growth.of(peak, examples), Growth()

    def body(count: int, **more: Any) -> int:
        return cost(
            student, shape.of(count, trains=True, **{"logits": False, **more, **options})
        ).peak

    def at_head(count: int) -> int:
        rows = shape.rows(count, head.dense_share)
        chunked = head.chunked_bytes(shape, count)
        if not head.dense:
            return chunked
        if head.recomputes and is_large(rows, head.vocabulary, shape.kind):
            # One after the other, with one gradient of the weight.
            return max(head.recomputed_bytes(shape, rows), chunked)
        return max(body(count, rows=rows, logits=True) - body(count, rows=rows), 0) + chunked

    return Growth.of(body, examples), Growth.of(at_head, examples)


def teacher_pass(shape: Shape, examples: int, head: Head | None) -> Pass:
    """A live teacher's. Of DeBERTa on a GPU that of its own attention: of flashdeberta's few
    kernels steps were planned at half of what an H200 took. Only what is held is flashdeberta's."""
    return shape.of(examples, trains=False, logits=head is None or head.of_teachers)


def teacher_memory(
    teacher: PlannedModel, shape: Shape, examples: int, head: Head | None, together: int = 1
) -> Growth:
    """together: micro-batches in one pass; of several the logits over a vocabulary are not made in
    it."""
    lean = shape.on_gpu and shape.size == 2 and has_flashdeberta(teacher.config)

    def held(count: int, **options: Any) -> int:
        one = replace(teacher_pass(shape, count, head), flashdeberta=lean, **options)
        return cost(teacher, one).peak

    peak = Growth.of(held, examples)
    if together == 1:
        return peak
    return replace(peak, here=max(peak.here, held(together * examples, logits=head is None)))


def has_flashdeberta(config: PreTrainedConfig) -> bool:
    """Whether flashdeberta is a teacher's attention on a GPU; on another machine it is taken to be
    installed."""
    is_there = find_spec("flashdeberta") is not None or not torch.cuda.is_available()
    return is_there and takes_flashdeberta(config)


def run_packed(
    recipe: Recipe, device: Device, teachers: Mapping[str, PlannedModel], *, half: bool
) -> bool:
    """Whether all of some teachers run without padding; see `Run.packed`."""
    by_default = recipe.padding is None and device.is_gpu and half
    if not (by_default or recipe.padding == "never"):
        return False
    configs = [teacher.config for teacher in teachers.values()]
    return all(
        has_flashdeberta(one) if one.model_type == "deberta-v2" else takes_packed(one)
        for one in configs
    )
