"""Every kernel compiles for GPUs that are not here, spills no register there, and takes as few
instructions as it was written for: counts are exact for a compiler."""

import multiprocessing

import pytest
import torch
from cases import INTERPRETED, MODULES

pytest.importorskip("triton", reason="compiling needs Triton")
if INTERPRETED:
    pytest.skip("interpreted kernels do not compile", allow_module_level=True)

import triton
from compiling import TARGETS, recorded
from launches import DTYPES, VOCABULARIES, Call, _cosine, calls, each

import ds_kernels

# By default every op, vocabulary and dtype once per target, and all that has a limit; the rest is
# slow.
FEW = {
    *((f"V={width}", dtype) for width, dtype in zip(VOCABULARIES, DTYPES, strict=True)),
    *((f"V={width} K=64", dtype) for width, dtype in zip(VOCABULARIES, DTYPES, strict=True)),
    *(("D=768 layers=12", dtype) for dtype in DTYPES),
    *(("S=512 heads of 64", dtype) for dtype in DTYPES),
}


def has_limit(call, target):
    return target == "sm_90" and call.dtype == torch.bfloat16 and call.op in LIMITS


SPILLED = {("3.6", "sm_100"): 80}
"""Bytes, by Triton's version and target: backward kernels of attention_kl, and of masked_reverse_kl
in float32. On eight warps nothing is spilled, and a tenth more instructions are taken."""

LIMITS = {
    # op: instructions of a thread per pair of logits or per score, both loops of the forward
    # kernel and each backward kernel, on sm_90 in bfloat16.
    "masked_kl": (45, 18),
    "topk_kl": (None, None, 10),
    "attention_kl": (60, 25, 30),
    "relation_kl": (60, 40),
    "masked_reverse_kl": (50, 20),
    "masked_js": (117, 66),
    "masked_tv": (56, 50),
}


IN_MAKE_TEST = ("masked_kl", "relation_kl")
"""One op of rows, and one of scores."""


def tier(call, target):
    """Of `make test`, of `make test-ci`, or of the series."""
    few = (call.shape, call.dtype) in FEW and target in ("sm_90", "gfx942")  # one of each vendor
    if not few and not has_limit(call, target):
        return "series"
    first = (target, call.dtype) == ("sm_90", torch.bfloat16) and call.op in IN_MAKE_TEST
    return "test" if first else "ci"


CASES = [
    pytest.param(call, target, id=f"{call.op}-{call.shape}-{call.dtype}-{target}")
    for call in calls()
    for target in TARGETS
]


def cases_of(name):
    return [case for case in CASES if tier(*case.values) == name]


_launches = []


def _compile(index, target):
    return _launches[index].compile(target)


def compile_all(launches, target):
    """In two processes, forked so that they see the launches, which cannot be pickled."""
    _launches[:] = launches
    with multiprocessing.get_context("fork").Pool(2) as pool:
        jobs = [(index, target) for index in range(len(launches))]
        found = pool.starmap(_compile, jobs, 1)
    for launch, compiled in zip(launches, found, strict=True):
        name = launch.kernel.__name__
        most = SPILLED.get((triton.__version__[:3], target), 0)
        assert compiled.spilled <= most, f"{name} spills {compiled.spilled} bytes on {target}"
    return found


@pytest.mark.parametrize(("call", "target"), cases_of("test"))
def test_a_launch(call, target):
    check_launch(call, target)


def check_launch(call, target):
    launches = call.launches(target)
    assert len(launches) == {"topk_kl": 4, "attention_kl": 3, "linear_kl": 1}.get(call.op, 2)
    found = compile_all(launches, target)
    if call.op == "masked_kl":
        check_streams(found)
    if not has_limit(call, target):
        return
    for launch, compiled, most in zip(launches, found, LIMITS[call.op], strict=False):
        if most is not None:
            assert not any(loop.whole for loop in compiled.loops), "a count is of a loop"
            assert sum(each(launch, compiled)) <= most, compiled
    if "heads" in call.shape:
        assert all(loop.matrix == "HGMMA" for one in found for loop in one.loops)
    else:
        check_streams(found[1:3] if call.op == "topk_kl" else found[:2])


def check_streams(found):
    """Rows of logits are read and written 16 bytes at a time, ids 4, and no thread waits for
    another."""
    for compiled in found:
        for loop in compiled.loops:
            if loop.whole:  # its sums over threads are not repeated
                continue
            assert loop.shuffles == loop.barriers == 0
            assert loop.loads.keys() <= {16, 4} and loop.stores.keys() <= {16}, loop


FREE = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::reshape"),
    *("aten::view", "aten::squeeze", "aten::unsqueeze", "aten::expand", "aten::select"),
    *("aten::as_strided", "aten::detach", "aten::zeros", "aten::contiguous", "aten::result_type"),
    *("aten::ones_like", "aten::item", "aten::_local_scalar_dense", "aten::alias"),
}
"""Operations without a launch of their own."""


def launched(call, *modules):
    """What a GPU would be given: PyTorch's operations, not those within another, and kernels."""
    with recorded(*modules) as kernels, torch.profiler.profile() as profile:
        call()
    names = [one.kernel.__name__ for one in kernels]

    def within_another(event):
        above = event.cpu_parent
        counted = above is not None and above.name.startswith("aten::") and above.name not in FREE
        return above is not None and (counted or within_another(above))

    for event in profile.events():
        if event.name.startswith("aten::") and event.name not in FREE and not within_another(event):
            names.append(event.name)
    return names


BACK = ["_backward_kernel", "aten::div"]
COSINE = {
    # torch.compile of the plain formula over the counted rows (torch 2.13 for an H200) launches
    # three forward, of which the first writes all rows anew, and two backward.
    "list": (
        ["_forward_kernel", "aten::new_full", "aten::mean"],
        ["_backward_kernel", "aten::div"],
    ),
    "all": (["_forward_kernel", "aten::mean"], BACK),
    "none": (["_forward_kernel"], ["_backward_kernel"]),
}


@pytest.mark.parametrize(("how", "wanted"), COSINE.items(), ids=COSINE)
def test_the_launches_of_one_layers_cosine(how, wanted, monkeypatch):
    monkeypatch.setattr(MODULES["_shared"], "_looks_at", lambda values: False)
    student = torch.zeros(64, 768, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.arange(9) if how == "list" else None
    reduction = "none" if how == "none" else "mean"
    losses = []

    def forward():
        given = (student, student.detach(), rows)
        losses.append(ds_kernels.masked_cosine(*given, reduction=reduction))

    def backward():
        torch.autograd.grad(losses[0], student, upstream)

    module = MODULES["masked_cosine"]
    assert launched(forward, module) == wanted[0]
    upstream = torch.ones_like(losses[0])
    assert launched(backward, module) == wanted[1]


def test_the_instructions_of_one_layers_cosine():
    """A pair of states; torch.compile's kernels take 35 and 42 at their best (2 warps a row, sm_90,
    Triton 3.9), with five barriers forward and one backward. Each state is read once."""
    call = Call(
        "masked_cosine", "D=768 layers=1", torch.bfloat16, ("masked_cosine",), _cosine(768, 1)
    )
    launches = call.launches("sm_90")
    for launch, compiled, most in zip(
        launches, compile_all(launches, "sm_90"), (17, 13), strict=True
    ):
        (loop,) = compiled.loops
        assert each(launch, compiled)[0] <= most
        assert 16 * loop.loads[16] * loop.threads == 2 * 2 * 768


def _scored(student):
    return [x.view(1, 2, 32, 64) for x in (student, *[student.detach()] * 3)]


OTHERS = {
    "masked_kl": ("_rows", lambda x: ds_kernels.masked_kl(x, x.detach())),
    "topk_kl": (
        "_topk",
        lambda x: ds_kernels.topk_kl(
            x, torch.zeros(64, 2), torch.arange(2).expand(64, 2), torch.zeros(64)
        ),
    ),
    "attention_kl": ("_scores", lambda x: ds_kernels.attention_kl(*_scored(x))),
    "relation_kl": (
        "_scores",
        lambda x: ds_kernels.relation_kl(x[None], x.detach()[None], heads=2),
    ),
}


@pytest.mark.parametrize("op", OTHERS)
def test_the_statistics_have_no_gradient_of_zeros(op):
    student = torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)
    module, call = OTHERS[op]
    with recorded(MODULES[module]):
        loss = call(student)
    upstream = torch.ones_like(loss)
    names = launched(lambda: torch.autograd.grad(loss, student, upstream), MODULES[module])
    assert "_backward_kernel" in str(names) and "aten::zero_" not in names, names
