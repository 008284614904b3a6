"""Every launch of every op at the shapes of 24-layer encoders and their students."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from assembly import Compiled, Loop
from compiling import Launch, recorded

import ds_kernels

VOCABULARIES = (30522, 50265, 128100)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, COUNTED = 8192, 1229  # 15% of 64 x 128 tokens


@dataclass(frozen=True)
class Call:
    """An op both ways on a few rows of real widths: what it launches does not depend on more."""

    op: str
    shape: str
    dtype: torch.dtype
    modules: tuple[str, ...]
    run: Callable[[torch.dtype], torch.Tensor]

    def launches(self, target: str) -> list[Launch]:
        modules = [importlib.import_module(f"ds_kernels.{name}") for name in self.modules]
        with recorded(*modules, target=target) as launches:
            self.run(self.dtype).backward()
        return launches


def elements(launch: Launch, loop: Loop) -> float:
    """Pairs of logits, scores, or columns of hidden states that a program takes in one turn. In the
    loop over the K entries of `topk_kl`: one of each thread."""
    arguments = launch.arguments
    if "heads" in arguments:
        return arguments["BLOCK"] ** 2
    if loop.whole:  # a row, or its K entries
        return next(arguments[name] for name in ("V", "K") if name in arguments)
    if "log_probs" in arguments and not loop.special and not loop.stores:
        return loop.threads
    size = arguments.get("student", arguments.get("students"))
    width = (size[0] if isinstance(size, tuple) else size).element_size()
    both = 1 if "log_probs" in arguments else 2
    read = sum(bytes * count for bytes, count in loop.loads.items())
    return read * loop.threads / (both * width) if read else arguments["BLOCK"]


def each(launch: Launch, compiled: Compiled) -> list[float]:
    """Instructions per element in each loop, or in the whole of a program without one."""
    return [round(loop.each(elements(launch, loop)), 1) for loop in compiled.loops]


def calls() -> Iterator[Call]:
    for dtype in DTYPES:
        for width in VOCABULARIES:
            shape = f"V={width}"
            yield Call("masked_kl", shape, dtype, ("_rows",), _masked("kl", width))
            yield Call("topk_kl", f"{shape} K=64", dtype, ("_topk",), _topk(width))
            yield Call(
                "linear_kl", shape, dtype, ("_rows", "_projections", "linear_kl"), _linear(width)
            )
        for name in ("reverse_kl", "js", "tv"):
            yield Call(f"masked_{name}", "V=30522", dtype, ("_rows",), _masked(name, 30522))
        for width, layers in ((768, 12), (1024, 24)):
            shape = f"D={width} layers={layers}"
            yield Call("masked_cosine", shape, dtype, ("masked_cosine",), _cosine(width, layers))
        shape = "S=512 heads of 64"
        yield Call("attention_kl", shape, dtype, ("_scores",), _attention(64))
        yield Call("relation_kl", shape, dtype, ("_scores",), _relation(64))


def _masked(divergence: str, width: int) -> Callable[[torch.dtype], torch.Tensor]:
    def run(dtype: torch.dtype) -> torch.Tensor:
        student = torch.zeros(2, width, dtype=dtype, requires_grad=True)
        rows = torch.arange(2)
        return ds_kernels.masked_kl(student, student.detach(), rows, divergence=divergence)

    return run


def _topk(width: int) -> Callable[[torch.dtype], torch.Tensor]:
    def run(dtype: torch.dtype) -> torch.Tensor:
        student = torch.zeros(2, width, dtype=dtype, requires_grad=True)
        ids, rows = torch.arange(64).expand(2, -1), torch.arange(2)
        return ds_kernels.topk_kl(student, torch.zeros(2, 64), ids, torch.zeros(2), rows)

    return run


def _linear(width: int) -> Callable[[torch.dtype], torch.Tensor]:
    def run(dtype: torch.dtype) -> torch.Tensor:
        hidden = torch.zeros(2, 16, dtype=dtype, requires_grad=True)
        head, bias = torch.zeros(width, 16, dtype=dtype), torch.zeros(width, dtype=dtype)
        biases = {"student_bias": bias, "teacher_bias": bias}
        return ds_kernels.linear_kl(hidden, head, hidden, head, **biases)

    return run


def _cosine(width: int, layers: int) -> Callable[[torch.dtype], torch.Tensor]:
    def run(dtype: torch.dtype) -> torch.Tensor:
        states = [torch.zeros(2, width, dtype=dtype, requires_grad=True) for _ in range(layers)]
        return ds_kernels.masked_cosine(states, [x.detach() for x in states], torch.arange(2))

    return run


def _attention(width: int) -> Callable[[torch.dtype], torch.Tensor]:
    def run(dtype: torch.dtype) -> torch.Tensor:
        query = torch.zeros(1, 2, 512, width, dtype=dtype, requires_grad=True)
        return ds_kernels.attention_kl(query, query, query, query)

    return run


def _relation(width: int) -> Callable[[torch.dtype], torch.Tensor]:
    def run(dtype: torch.dtype) -> torch.Tensor:
        states = torch.zeros(1, 512, 2 * width, dtype=dtype, requires_grad=True)
        return ds_kernels.relation_kl(states, states.detach(), heads=2)

    return run
