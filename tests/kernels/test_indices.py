"""Rows given as indices; ids that repeat in a row are refused."""

import pytest
import torch
from cases import INTERPRETED, MODULES, ROW_CASES, TOPK, lead_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ds_kernels

ROWS = [0, 1, 4]


def oracle(case, student, teacher, rows):
    """Loss of each index in turn, float64: row by row, no tensor of indices."""
    everything = torch.ones(lead_of(case), dtype=torch.bool, device=student[0].device)
    options = {"temperature": 2.0} if case.tempered else {}
    losses = case.wanted(student, teacher, everything, weight=1.5, tolerance=0.25, **options)
    losses = losses.flatten(-2)
    return torch.stack([losses[..., row] for row in rows], -1)


def check_indices(case, rows, device, seed=0):
    student, teacher, exact, exact_teacher = case.inputs(lead_of(case), torch.float32, device, seed)
    options = {"weight": 1.5, "tolerance": 0.25}
    if case.tempered:
        options["temperature"] = 2.0
    mask = torch.tensor(rows, dtype=torch.int64, device=device)
    slots = oracle(case, exact, exact_teacher, rows)
    sums = [
        ({"reduction": "sum"}, slots.sum()),
        ({"reduction": "mean"}, slots.sum() / len(rows)),
    ]
    for reduction, wanted in sums[: 1 if INTERPRETED else 2]:
        loss = case.op(student, teacher, mask, **options, **reduction)
        torch.testing.assert_close(loss.double(), wanted, rtol=2e-5, atol=2e-6)
        compare(loss, student, wanted, exact)
    losses = case.op(student, teacher, mask, reduction="none", **options)
    torch.testing.assert_close(losses.double(), slots, rtol=2e-5, atol=2e-6)
    upstream = torch.randn(slots.shape, dtype=torch.float64, device=device)
    compare((losses * upstream.float()).sum(), student, (slots * upstream).sum(), exact)


def compare(loss, student, wanted, exact):
    ours = torch.autograd.grad(loss, student)
    theirs = torch.autograd.grad(wanted, exact, retain_graph=True)
    for gradient, other in zip(ours, theirs, strict=True):
        atol = 5e-6 * max(1.0, other.abs().max().item())
        torch.testing.assert_close(gradient.double(), other, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("case", ROW_CASES, ids=repr)
def test_losses_and_gradients_of_indices(case, device):
    """Losses and every gradient, in each reduction, per-row upstream gradients with "none"."""
    check_indices(case, ROWS, device)


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("keep", [1 << 28, 0])
def test_indices_of_linear_kl_in_chunks(keep, device, monkeypatch):
    """With kept derivatives and with a second projection."""
    module = MODULES["_projections"]
    monkeypatch.setattr(module, "KEEP_BYTES", {"cpu": keep, "cuda": keep})
    monkeypatch.setattr(module, "LOGIT_BYTES", {"cpu": 8 * 37 * 2, "cuda": 8 * 37 * 2})
    for case in ROW_CASES:
        if case.name.startswith("linear"):
            check_indices(case, ROWS, device)


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.sampled_from(ROW_CASES),
    st.sets(st.integers(0, 5), min_size=1).map(sorted),
    st.integers(0, 99),
)
def test_any_indices(case, rows, seed):
    check_indices(case, rows, torch.device("cpu"), seed)


def test_topk_refuses_an_id_that_stands_twice(device):
    """On a GPU, where a check would wait for the device, the loss is infinite."""
    (student,), (log_probs, ids, tail) = ([x.to(device) for x in xs] for xs in TOPK.make((4,)))
    student = student.float().requires_grad_()
    ids[2, 3] = ids[2, 0]
    if device.type == "cpu" and not INTERPRETED:
        with pytest.raises(ValueError, match=rf"id {ids[2, 0]} stands twice in row 2"):
            ds_kernels.topk_kl(student, log_probs, ids, tail)
    else:
        losses = ds_kernels.topk_kl(student, log_probs, ids, tail, reduction="none")
        assert losses.isfinite().tolist() == [True, True, False, True]
        assert losses[2].item() == float("inf")


def test_topk_padding_and_rows_that_do_not_count_may_repeat(device):
    (student,), (log_probs, ids, tail) = ([x.to(device) for x in xs] for xs in TOPK.make((4,)))
    ids[:, 2:] = -1
    mask = torch.tensor([True, True, False, True], device=device)
    wanted = ds_kernels.topk_kl(student, log_probs, ids, tail, mask)
    ids[2] = 0
    assert wanted.isfinite()
    assert ds_kernels.topk_kl(student, log_probs, ids, tail, mask) == wanted


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("case", ROW_CASES, ids=repr)
def test_indices_are_refused(case):
    """On a GPU, where a check would wait for the device, see the test below."""
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, torch.device("cpu"))
    for value, message in (
        (-1, "row indices run from .*; 0 to 5 wanted"),
        (6, "row indices run from .*; 0 to 5 wanted"),
        (1, "row indices must ascend, each once"),
        (0, "row indices must ascend, each once"),
    ):
        with pytest.raises(ValueError, match=message):
            case.op(student, teacher, torch.tensor([1, value]))


@pytest.mark.interpreted
@pytest.mark.skipif(not INTERPRETED, reason="of the kernels: the references index tensors")
@pytest.mark.parametrize("op", [ds_kernels.masked_kl, ds_kernels.masked_cosine])
def test_a_kernel_touches_no_row_outside(op, monkeypatch):
    """Such an index has an infinite loss, and no gradient."""
    monkeypatch.setattr(MODULES["_shared"], "_looks_at", lambda values: False)
    student, teacher = torch.randn(2, 6, 8)
    student.requires_grad_()
    losses = op(student, teacher, torch.tensor([1, 1 << 30, -(1 << 30)]), reduction="none")
    assert losses.isfinite().tolist() == [True, False, False]
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    assert gradient.isfinite().all() and gradient.any(-1).nonzero().tolist() == [[1]]
