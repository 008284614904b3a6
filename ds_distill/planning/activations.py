"""Memory and operations of a training step's passes, as functions of the micro-batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from transformers import PreTrainedConfig

from ds_distill.losses.logits import is_large
from ds_distill.models.packed import takes_flashdeberta
from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.planning.trace import Cost
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
class Head:
    """How a masked-LM's loss reads the student's head, and a live teacher's."""

    vocabulary: int
    widths: tuple[int, ...]
    """Of the features that are projected: the student's, then the teacher's."""
    dense: bool
    """Whether a term makes the student's logits [rows, V]."""
    chunked: bool
    """Whether a term goes through linear_kl or linear_mse, which never hold them all."""
    recomputes: bool
    """Whether the dense term is cross-entropy alone, of which large logits are made some at a time,
    and again in the backward pass."""
    dense_share: float
    """Of all tokens, those whose logits a dense term makes."""
    chunked_share: float
    of_teachers: bool
    """Whether a term, or what mixes teachers, makes a live teacher's logits."""

    def bytes(self, rows: int, itemsize: int, device: str) -> int:
        """What the chunked term holds at its peak."""
        if not self.chunked:
            return 0
        logits = min(rows * 8 * self.vocabulary, LOGIT_BYTES[device])
        derivatives = rows * self.vocabulary * itemsize
        if derivatives > KEEP_BYTES[device]:
            derivatives = logits // 8 * itemsize
        return logits + derivatives + 4 * self.vocabulary * self.widths[0]

    def recomputed_bytes(self, rows: int, itemsize: int, device: str) -> int:
        """What cross-entropy without all logits holds at its peak: float32 logits of a chunk and a
        sum of the weight's gradient, and of 16 bits what is made of both."""
        numbers = min(rows * self.vocabulary, LOGIT_BYTES[device] // 8)
        numbers += self.vocabulary * self.widths[0]
        return (4 + itemsize if itemsize < 4 else itemsize) * numbers

    def cost(self, rows: int, itemsize: int, device: str) -> Cost:
        """Products of the chunked term: both models forward, the student's backward, and both once
        more where the derivatives are too large to be stored."""
        if not self.chunked:
            return Cost()
        product = {width: 2 * rows * width * self.vocabulary for width in self.widths}
        again = rows * self.vocabulary * itemsize > KEEP_BYTES[device]
        calls: Counter[tuple[int, int]] = Counter()
        logits = 4 * rows * self.vocabulary
        for width in self.widths:
            calls[product[width], logits + itemsize * self.vocabulary * width] += 2 if again else 1
        calls[product[self.widths[0]], logits] += 2
        calls[0, 6 * logits] += 1  # softmax of both and the derivative
        return Cost(calls)


@dataclass(frozen=True)
class Shape:
    """What all passes of a phase have alike."""

    length: int
    row_share: float | None
    """See `TaskSettings.row_share`."""
    dtype: torch.dtype
    on_gpu: bool

    def of(self, examples: int, *, trains: bool, fused: bool) -> Pass:
        rows = None
        if self.row_share is not None:
            rows = max(1, round(self.row_share * examples * self.length))
        mask_bytes = 1 if self.on_gpu else None
        return Pass(examples, self.length, rows, self.dtype, trains, fused, mask_bytes)


@dataclass(frozen=True)
class Work:
    """The passes of a step: what they hold and what they do."""

    student: Growth
    """Activations of the trained model, or of all that are trained together."""
    head: Growth
    """Logits and derivatives of a masked-LM's loss."""
    teachers: Growth
    """Activations of the live teacher that has most, alone."""
    student_passes: Sequence[Pass]
    head_cost: Cost
    """Of what is beside the student's pass: the chunked term of a masked-LM."""
    teacher_passes: Mapping[str, Pass]
    """Over one or more micro-batches."""

    @property
    def activations(self) -> int:
        """Teachers have run, and dropped what they held, before the student begins."""
        return max(self.student.here, self.teachers.here)

    def largest(self, budget: int) -> int:
        """Most examples of a micro-batch within so many bytes."""
        if self.teachers.here > budget:
            return 0  # of a pass over a step's micro-batches, whatever their number is
        return min((self.student + self.head).largest(budget), self.teachers.largest(budget))


def student_work(
    student: PlannedModel,
    shape: Shape,
    examples: int,
    head: Head | None,
    *,
    checkpointing: bool = False,
    freeze: bool = False,
    dropout: float | None = None,
) -> tuple[Growth, Growth, Pass, Cost]:
    """(activations, head, pass, cost of the head beside it) of a trained model's forward and
    backward pass."""

    def of(examples: int, logits: bool) -> Pass:
        # On a CPU a model that is trained has the plain attention, see Run.model.
        plain = shape.of(examples, trains=True, fused=shape.on_gpu)
        return replace(
            plain, logits=logits, checkpointing=checkpointing, freeze=freeze, dropout=dropout
        )

    if head is None:
        peak = Growth.of(lambda count: cost(student, of(count, True)).peak, examples)
        return peak, Growth(), of(examples, True), Cost()
    size, device = shape.dtype.itemsize, "cuda" if shape.on_gpu else "cpu"

    def rows_of(count: int, share: float) -> int:
        return max(1, round(share * count * shape.length))

    def at_head(count: int) -> int:
        rows = rows_of(count, head.dense_share)
        chunked = head.bytes(rows_of(count, head.chunked_share), size, device)
        if not head.dense:
            return chunked
        if head.recomputes and is_large(rows, head.vocabulary, device):
            # One after the other, with one gradient of the weight.
            return max(head.recomputed_bytes(rows, size, device), chunked)
        one = replace(of(count, False), rows=rows)
        more = cost(student, replace(one, logits=True)).peak - cost(student, one).peak
        return max(more, 0) + chunked

    body = Growth.of(lambda count: cost(student, of(count, False)).peak, examples)
    whole = replace(of(examples, head.dense), rows=rows_of(examples, head.dense_share))
    beside = head.cost(rows_of(examples, head.chunked_share), size, device)
    return body, Growth.of(at_head, examples), whole, beside


def teacher_work(
    teachers: Mapping[str, PlannedModel],
    shape: Shape,
    examples: int,
    head: Head | None,
    together: int = 1,
) -> tuple[Growth, dict[str, Pass]]:
    """(activations of the one that has most, pass of each) of live teachers.

    together: micro-batches in one pass; of several the logits over a vocabulary are not made in it.

    A pass of DeBERTa on a GPU is that of its own attention: of flashdeberta's few kernels steps
    were planned at half of what an H200 took. Only what is held is flashdeberta's.
    """
    logits = head is None or head.of_teachers
    peaks, passes = [], {}
    for name, teacher in teachers.items():

        def of(count: int, logits: bool = logits) -> Pass:
            return replace(shape.of(count, trains=False, fused=True), logits=logits)

        def held(count: int, logits: bool = logits, teacher: PlannedModel = teacher) -> int:
            lean = shape.on_gpu and shape.dtype.itemsize == 2 and has_flashdeberta(teacher.config)
            return cost(teacher, replace(of(count, logits), flashdeberta=lean)).peak

        peak = Growth.of(held, examples)
        if together > 1:
            whole = held(together * examples, head is None)
            peak = replace(peak, here=max(peak.here, whole))
        peaks.append(peak)
        passes[name] = of(together * examples)
    most = max(peaks, key=lambda growth: growth.here, default=Growth())
    return most, passes


def has_flashdeberta(config: PreTrainedConfig) -> bool:
    """Whether flashdeberta is a teacher's attention on a GPU; on another machine it is taken to be
    installed."""
    is_there = find_spec("flashdeberta") is not None or not torch.cuda.is_available()
    return is_there and takes_flashdeberta(config)
