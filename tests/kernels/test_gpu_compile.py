"""Every kernel compiles for GPUs that are not here, and spills no register there."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from cases import INTERPRETED, MODULES

pytest.importorskip("triton", reason="compiling needs Triton")
if INTERPRETED:
    pytest.skip("interpreted kernels do not compile", allow_module_level=True)

from compiling import TARGETS, Launch, recorded

import ds_kernels

VOCABULARIES = [30522, 50265, 128100]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# By default every vocabulary and every dtype once; the rest of the square is slow.
PAIRS = [
    pytest.param(width, dtype, id=f"{width}-{dtype}", marks=[] if i == j else pytest.mark.slow)
    for i, width in enumerate(VOCABULARIES)
    for j, dtype in enumerate(DTYPES)
]


_launches: list[Launch] = []


def _compile(index: int, target: str) -> int | None:
    return _launches[index].compile(target)


def compile_all(launches: list[Launch], target: str, wanted: set[str]) -> None:
    """In two processes, forked so that they see the launches, which cannot be pickled."""
    assert {launch.kernel.__name__ for launch in launches} == wanted
    _launches[:] = launches
    with multiprocessing.get_context("fork").Pool(2) as pool:
        jobs = [(index, target) for index in range(len(launches))]
        for launch, spilled in zip(launches, pool.starmap(_compile, jobs, 1), strict=True):
            assert not spilled, f"{launch.kernel.__name__} spills {spilled} bytes on {target}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("width", "dtype"), PAIRS)
def test_vocabulary_kernels(width: int, dtype: torch.dtype, target: str) -> None:
    student = torch.zeros(2, width, dtype=dtype, requires_grad=True)
    teacher, mask = student.detach(), torch.ones(2, dtype=torch.bool)
    ids = torch.arange(64).expand(2, -1)
    names = ("_rows", "linear_kl", "_topk")
    with recorded(*(MODULES[name] for name in names)) as launches:
        ds_kernels.masked_kl(student, teacher, mask).backward()
        ds_kernels.topk_kl(student, torch.zeros(2, 64), ids, torch.zeros(2), mask).backward()
        hidden = torch.zeros(2, 16, dtype=dtype, requires_grad=True)
        head, bias = torch.zeros(width, 16, dtype=dtype), torch.zeros(width, dtype=dtype)
        biases = {"student_bias": bias, "teacher_bias": bias}
        ds_kernels.linear_kl(hidden, head, hidden, head, **biases).backward()
    compile_all(
        launches,
        target,
        {
            "_forward_kernel",
            "_backward_kernel",
            "_tail_backward_kernel",
            "_entries_backward_kernel",
        },
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(low, marks=pytest.mark.slow) for low in DTYPES[:2])],
    ids=str,
)
def test_divergences(dtype: torch.dtype, target: str) -> None:
    student = torch.zeros(2, 30522, dtype=dtype, requires_grad=True)
    with recorded(MODULES["_rows"]) as launches:
        for op in (ds_kernels.masked_reverse_kl, ds_kernels.masked_js, ds_kernels.masked_tv):
            op(student, student.detach()).backward()
    compile_all(launches, target, {"_forward_kernel", "_backward_kernel"})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "layers"),
    [
        (768, 12),
        pytest.param(312, 1, marks=pytest.mark.slow),
        pytest.param(1024, 24, marks=pytest.mark.slow),
    ],
)
def test_cosine(width: int, layers: int, dtype: torch.dtype, target: str) -> None:
    students = [torch.zeros(2, width, dtype=dtype, requires_grad=True) for _ in range(layers)]
    mask = torch.ones(2, dtype=torch.bool)
    with recorded(MODULES["masked_cosine"]) as launches:
        ds_kernels.masked_cosine(students, [x.detach() for x in students], mask).backward()
    compile_all(launches, target, {"_forward_kernel", "_backward_kernel"})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("width", "teacher_width", "dtype"),
    [
        (64, 64, torch.bfloat16),
        (64, 64, torch.float16),
        (64, 64, torch.float32),
        pytest.param(26, 64, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(32, 64, torch.float32, marks=pytest.mark.slow),
        pytest.param(128, 128, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(128, 128, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_score_kernels(width: int, teacher_width: int, dtype: torch.dtype, target: str) -> None:
    query = torch.zeros(1, 2, 512, width, dtype=dtype, requires_grad=True)
    teacher = torch.zeros(1, 2, 512, teacher_width, dtype=dtype)
    bias = torch.zeros(1, 2, 512, 512, dtype=dtype)
    with recorded(MODULES["_scores"]) as launches:
        ds_kernels.attention_kl(
            query, query, teacher, teacher, student_bias=bias, teacher_bias=bias
        ).backward()
        student = torch.zeros(1, 512, 2 * width, dtype=dtype, requires_grad=True)
        other = torch.zeros(1, 512, 2 * teacher_width, dtype=dtype)
        ds_kernels.relation_kl(student, other, heads=2).backward()
    compile_all(launches, target, {"_forward_kernel", "_backward_kernel"})
