"""Seconds of a model's passes on this machine's CPU, by running a few of its layers."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from statistics import median

import torch

from ds_distill.planning.models import Pass, PlannedModel, prepared, run_pass, view_of

_LAYERS = 2, 5
"""The layers are alike: a deeper model is extrapolated from two depths."""

_EXAMPLES = 32
"""Of a larger micro-batch as many are run: each takes as long."""

_WEIGHTS = 4_000_000
"""Of the optimizer that is run."""

_REPEATS, _SECONDS = 5, 1.0
"""At least so many passes, and for so long; the median counts."""


def measured_seconds(model: PlannedModel, of: Pass) -> float:
    """Of a pass of all its layers, with random weights, on all threads of this process."""
    total = model.config.num_hidden_layers
    part = min(of.examples, _EXAMPLES)
    rows = None if of.rows is None else max(1, of.rows * part // of.examples)
    few, times = replace(of, examples=part, rows=rows), of.examples / part
    fewer, more = _LAYERS
    if total <= more:
        return _seconds(model, (total,), few)[0] * times
    short, longer = _seconds(model, _LAYERS, few)
    each = max(longer - short, 0.0) / (more - fewer)  # a machine that is busy may say less
    return (short + each * (total - fewer)) * times


@lru_cache(maxsize=256)
def _seconds(model: PlannedModel, depths: tuple[int, ...], of: Pass) -> list[float]:
    """Of a pass of so many layers each; they take turns."""
    view = view_of(of, "cpu")
    built = [prepared(model, layers, of, "cpu") for layers in depths]
    for one in built:
        run_pass(one, view, of)
    seconds: list[list[float]] = [[] for _ in depths]
    ends = time.perf_counter() + _SECONDS
    while len(seconds[0]) < _REPEATS or time.perf_counter() < ends:
        for one, taken in zip(built, seconds, strict=True):
            one.zero_grad()
            started = time.perf_counter()
            run_pass(one, view, of)
            taken.append(time.perf_counter() - started)
    return [median(taken) for taken in seconds]


@lru_cache
def optimizer_seconds_per_weight(dtype: torch.dtype) -> float:
    """Of AdamW as DeepSpeed 0.19.8 steps it: it looks for infinite gradients, copies them to fp32,
    scales them to their norm, and copies the weights back.

    dtype: of weights and gradients.
    """
    weights = torch.ones(_WEIGHTS, dtype=dtype)
    gradients = torch.ones(_WEIGHTS, dtype=dtype)
    master = torch.nn.Parameter(weights.float())
    adamw = torch.optim.AdamW([master], fused=True)
    seconds: list[float] = []
    for _ in range(2 + _REPEATS):
        started = time.perf_counter()
        copy = gradients.float()
        bool((copy.isinf() | copy.isnan()).float().max())
        master.grad = gradients.to(torch.float32, copy=True)
        master.grad.mul_(1.0 / (1.0 + float(master.grad.norm())))
        adamw.step()
        with torch.no_grad():
            weights.copy_(master)
        seconds.append(time.perf_counter() - started)
    return median(seconds[2:]) / _WEIGHTS
