"""Seconds of a model's passes on this machine's CPU, by running a few of its layers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median

import torch

from ds_distill.planning.models import Pass, PlannedModel, prepared, run_pass, view_of

_LAYERS = 2, 5
"""The layers are alike: a deeper model is extrapolated from two depths."""

_EXAMPLES = 32
"""Of a larger micro-batch as many are run: each takes as long."""

_OPERATIONS = 1e11
"""Of a pass that is run, at most, unless one example has more: fewer examples of a large model."""

_OTHER = 32_000_000
"""Elements, more than any cache holds."""

_WEIGHTS = 20_000_000
"""Elements of the optimizer that is run."""

_REPEATS, _SECONDS = 5, 1.0
"""At least so many passes, and for so long; the median counts."""

_LONG = 3.0
"""Seconds after which two passes are enough."""

_TOO_LONG = 20.0
"""Seconds of all passes that would be run, above which none is."""

_log = logging.getLogger(__name__)


def measured_seconds(model: PlannedModel, of: Pass, flops: float) -> float | None:
    """Of a pass of all its layers, with random weights, on all threads of this process; None where
    to measure it would take too long.

    flops: about what this CPU computes in a second.
    """
    total = model.config.num_hidden_layers
    fewer, more = _LAYERS
    per_example = 2 * model.layer_numel() * min(total, more) * of.length * (3 if of.trains else 1)
    part = min(of.examples, _EXAMPLES, max(1, int(_OPERATIONS / per_example)))
    if 3 * part * per_example > flops * _TOO_LONG:
        return None
    rows = None if of.rows is None else max(1, of.rows * part // of.examples)
    few, times = replace(of, examples=part, rows=rows), of.examples / part
    if total <= more:
        return _seconds(model, (total,), few)[0] * times
    short, longer = _seconds(model, _LAYERS, few)
    each = max(longer - short, 0.0) / (more - fewer)  # a machine that is busy may say less
    return (short + each * (total - fewer)) * times


@lru_cache(maxsize=256)
def _seconds(model: PlannedModel, depths: tuple[int, ...], of: Pass) -> list[float]:
    """Of a pass of so many layers each; they take turns."""
    kind = "a training step's pass" if of.trains else "a pass"
    again = ", activations computed again" if of.checkpointing else ""
    shape = f"{of.examples} x {of.length} tokens{again}"
    _log.info("Measuring %s of %s on this CPU (%s) ...", kind, model.name, shape)
    view, other = view_of(of, "cpu"), torch.zeros(_OTHER)
    built = [prepared(model, layers, of, "cpu") for layers in depths]
    for one in built:
        run_pass(one, view, of)
    seconds: list[list[float]] = [[] for _ in depths]
    began = time.perf_counter()
    while not _enough(len(seconds[0]), time.perf_counter() - began):
        for one, taken in zip(built, seconds, strict=True):
            one.zero_grad()
            other.add_(1)  # what a training does in between leaves nothing in the caches
            started = time.perf_counter()
            run_pass(one, view, of)
            taken.append(time.perf_counter() - started)
    return [median(taken) for taken in seconds]


def _enough(passes: int, seconds: float) -> bool:
    return (passes >= _REPEATS and seconds >= _SECONDS) or (passes >= 2 and seconds >= _LONG)


def measured_optimizer_seconds(numels: Sequence[int], dtype: torch.dtype) -> float:
    """Of AdamW on weights of so many elements each: the largest of them are run, _WEIGHTS elements
    or more, and the others take as long.

    dtype: of weights and gradients.
    """
    total, largest = 0, []
    for numel in sorted(numels, reverse=True):
        if total < _WEIGHTS:
            largest.append(numel)
            total += numel
    return _optimizer_seconds(tuple(largest), dtype) * sum(numels) / max(total, 1)


@lru_cache
def _optimizer_seconds(numels: tuple[int, ...], dtype: torch.dtype) -> float:
    """As DeepSpeed 0.19.8 steps it: it looks for infinite gradients, takes their norm, copies them
    to fp32, scales them, and copies the weights back. New memory for each copy is a good part."""
    weights = [torch.ones(numel, dtype=dtype) for numel in numels]
    masters = [torch.nn.Parameter(weight.float()) for weight in weights]
    adamw = torch.optim.AdamW(masters, fused=True)
    seconds: list[float] = []
    for _ in range(2 + _REPEATS):
        gradients = [torch.ones_like(weight) for weight in weights]
        started = time.perf_counter()
        bool(sum(one.amax().isfinite() & one.amin().isfinite() for one in gradients))
        norm = float(sum(one.float().norm() ** 2 for one in gradients))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.to(torch.float32, copy=True)
        for master in masters:
            assert master.grad is not None
            master.grad.mul_(1.0 / (1.0 + norm))
        adamw.step()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None
            weight.copy_(master.data)
        seconds.append(time.perf_counter() - started)
    return median(seconds[2:])
