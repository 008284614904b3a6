"""Every kernel compiles for GPUs that are not here, spills no register there, and takes as few
instructions as it was written for: counts are exact for a compiler."""

import os
import sys
from pathlib import Path

import pytest
import torch
from cases import INTERPRETED, MODULES
from processes import ended

pytest.importorskip("triton", reason="compiling needs Triton")
if INTERPRETED:
    pytest.skip("interpreted kernels do not compile", allow_module_level=True)
from compiling import TARGETS, recorded
from kernels.test_gpu_compile import cases_of, check_launch, compile_all
from launches import Call, calls

import ds_kernels

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("call", "target"), cases_of("series"))
def test_a_launch(call, target):
    check_launch(call, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("width", "teacher_width"), [(26, 64), (32, 64), (128, 128), (32, 256), (256, 256)]
)
def test_heads_of_other_widths(width, teacher_width, dtype, target):
    if teacher_width > 64 and dtype == torch.float32:
        pytest.skip("spills, and runs slower")
    query = torch.zeros(1, 2, 512, width, dtype=dtype, requires_grad=True)
    teacher = torch.zeros(1, 2, 512, teacher_width, dtype=dtype)
    with recorded(MODULES["_scores"], target=target) as launches:
        ds_kernels.attention_kl(query, query, teacher, teacher).backward()
        student = torch.zeros(1, 512, 2 * width, dtype=dtype, requires_grad=True)
        other = torch.zeros(1, 512, 2 * teacher_width, dtype=dtype)
        ds_kernels.relation_kl(student, other, heads=2).backward()
    compile_all(launches, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["masked_kl", "masked_cosine", "topk_kl", "linear_kl"])
def test_float64_compiles(op, target):
    """For gradient checks. Attention and relations take the reference in float64."""
    call = next(call for call in calls() if call.op == op)
    compile_all(
        Call(call.op, call.shape, torch.float64, call.modules, call.run).launches(target), target
    )


def test_limits_under_another_triton():
    """The GPU machine's, 3.6.0: `pip install --no-deps --target FOLDER triton==3.6.0`."""
    folder = os.environ.get("OTHER_TRITON", "")
    if not (Path(folder) / "triton").is_dir():
        pytest.skip("OTHER_TRITON names no folder with another Triton")
    paths = [folder, str(Path(ds_kernels.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OTHER_TRITON": ""}
    files = [str(TESTS / folder / "test_gpu_compile.py") for folder in ("kernels", "ci")]
    options = ["-q", "-p", "no:cacheprovider", "-k", "sm_90 and bfloat16"]
    ended(sys.executable, "-m", "pytest", *options, *files, env=environment, timeout=None)
