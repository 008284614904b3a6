"""Memory and operations of a training step's passes, as functions of the micro-batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ds_distill.losses.logits import is_large
from ds_distill.models.packed import has_flashdeberta
from ds_distill.models.packing import takes_packed
from ds_distill.planning.models import Pass, PlannedModel, cost
from ds_distill.planning.trace import Cost
from ds_distill.recipe import Recipe
from ds_kernels._projections import fits, held_by_cross_entropy, held_by_kl

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
    def of(one: Pass, measure: Callable[[Pass], int]) -> Growth:
        """measure: gives the peak of a pass of other examples."""

        def at(examples: int) -> int:
            return measure(replace(one, examples=examples))

        first = max(one.examples, _SMALLEST)
        few, many = at(first), at(2 * first)
        return Growth(at(one.examples), 2 * few - many, (many - few) / first)

    @staticmethod
    def even(size: int, examples: int) -> Growth:
        """Of what each example has the same of; size: of all these."""
        return Growth(size, 0, size / examples)

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
    """Whether a term goes through linear_kl, which never holds them all."""
    recomputes: bool
    """Whether the dense term is cross-entropy alone, of which large logits are made some at a time,
    and again in the backward pass."""
    dense_share: float | None
    """Of all tokens, those whose logits a dense term makes."""
    chunked_share: float | None
    of_teachers: bool
    """Whether a term, or what mixes teachers, makes a live teacher's logits."""

    def of_dense(self, one: Pass) -> Pass:
        """A student's pass that makes what the dense terms read."""
        return replace(one, logits=self.dense, row_share=self.dense_share)

    def peak(self, student: PlannedModel, one: Pass) -> int:
        """Of logits and their derivatives, beside the activations of a student's pass."""
        dense, chunks = self.of_dense(one), replace(one, row_share=self.chunked_share)
        chunked = held_by_kl(*self._sizes(chunks)) if self.chunked else 0
        if not self.dense:
            return chunked
        if self.recomputes and is_large(dense.rows, self.vocabulary, one.device):
            # One after the other, with one gradient of the weight.
            return max(held_by_cross_entropy(*self._sizes(dense)), chunked)
        body = cost(student, replace(dense, logits=False)).peak
        return max(cost(student, dense).peak - body, 0) + chunked

    def _sizes(self, one: Pass) -> tuple[int, int, int, int, str]:
        return one.rows, self.vocabulary, self.widths[0], one.dtype.itemsize, one.device

    def chunked_cost(self, one: Pass) -> Cost:
        """Products of the chunked term: both models forward, the student's backward, and both once
        more where the derivatives are too large to be stored."""
        calls: Counter[tuple[int, int]] = Counter()
        if not self.chunked:
            return Cost(calls)
        rows, size = replace(one, row_share=self.chunked_share).rows, one.dtype.itemsize
        forward = 1 if fits(rows, self.vocabulary, size, one.device) else 2
        logits = 4 * rows * self.vocabulary
        for width in self.widths:
            weight = size * self.vocabulary * width
            calls[2 * rows * width * self.vocabulary, logits + weight] += forward
        calls[2 * rows * self.widths[0] * self.vocabulary, logits] += 2
        calls[0, 6 * logits] += 1  # softmax of both and the derivative
        return Cost(calls)


def student_memory(student: PlannedModel, one: Pass, head: Head | None) -> tuple[Growth, Growth]:
    """(activations, logits of a vocabulary and their derivatives) of a trained model's pass."""
    body = Growth.of(replace(one, logits=head is None), lambda other: cost(student, other).peak)
    if head is None:
        return body, Growth()
    return body, Growth.of(one, lambda other: head.peak(student, other))


def teacher_memory(teacher: PlannedModel, one: Pass, together: int = 1) -> Growth:
    """Of a live teacher's pass. together: micro-batches in one pass; of several the logits over a
    vocabulary are not made in it."""
    lean = one.on_gpu and one.dtype.itemsize == 2 and has_flashdeberta(teacher.config)
    held = replace(one, flashdeberta=lean)
    peak = Growth.of(held, lambda other: cost(teacher, other).peak)
    if together == 1:
        return peak
    several = replace(held, examples=together * one.examples, logits=False)
    return replace(peak, here=max(peak.here, cost(teacher, several).peak))


def run_packed(recipe: Recipe, teachers: Iterable[PlannedModel], one: Pass) -> bool:
    """Whether all of some teachers run such passes without padding; see `Run.packed`."""
    by_default = recipe.padding is None and one.on_gpu and one.dtype.itemsize == 2
    return (by_default or recipe.padding == "never") and all(
        has_flashdeberta(config) if config.model_type == "deberta-v2" else takes_packed(config)
        for config in (teacher.config for teacher in teachers)
    )
