"""What holds for every op: values, gradients, masks, reductions, strides, refusals."""

import pytest
import torch
from cases import CASES, DTYPES, INTERPRETED, MODULES, error, lead_of, mask_of

import ds_kernels

ids = {"ids": repr}


def gradients(losses, tensors, upstream=None):
    upstream = torch.ones_like(losses) if upstream is None else upstream.to(losses)
    return list(torch.autograd.grad(losses, tensors, upstream))


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, marks=pytest.mark.interpreted), torch.float32, torch.float16],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, **ids)
def test_error_is_not_above_eager(case, dtype, device):
    """Loss and gradients against float64 from the unrounded inputs, per-row upstream gradients."""
    mask = mask_of(case, device)
    options = {"weight": 1.5, "tolerance": 0.25}
    if case.tempered:
        options["temperature"] = 2.0
    student, teacher, exact_student, exact_teacher = case.inputs(lead_of(case), dtype, device)
    if case.name == "tv":  # its derivative jumps where rounding an input swaps p and q
        exact_student = [x.detach().double().requires_grad_() for x in student]
        exact_teacher = [x.double() for x in teacher]
    losses = case.op(student, teacher, mask, reduction="none", **options)
    oracle = case.wanted(exact_student, exact_teacher, mask, **options)
    eager = case.wanted(student, teacher, mask, **options)
    assert losses.shape == oracle.shape and losses.dtype == torch.float32
    upstream = torch.randn(oracle.shape, dtype=torch.float64, device=device)
    # Rounding of the inputs is in both errors; what may be added is a rounding of the result.
    epsilon = torch.finfo(dtype).eps
    slack = max(epsilon, 8 * torch.finfo(torch.float32).eps)
    assert error(losses, oracle) <= error(eager, oracle) + slack * oracle.abs().max().item()
    triples = zip(
        gradients(losses, student, upstream),
        gradients(eager, student, upstream),
        gradients(oracle, exact_student, upstream),
        strict=True,
    )
    for ours, theirs, exact in triples:
        assert ours.dtype == dtype
        assert error(ours, exact) <= error(theirs, exact) + slack * exact.abs().max().item()


@pytest.mark.parametrize("case", CASES, **ids)
def test_gradcheck(case, device):
    """Numerical derivatives, float64 accumulators, per-row upstream gradients."""
    lead = (1, 18) if case.scores else (2,)
    torch.manual_seed(0)
    student, teacher = ([x.to(device) for x in xs] for xs in case.make(lead))
    options = {"temperature": 2.0} if case.tempered else {}
    for x in student:
        x.requires_grad_()

    def run(*tensors):
        return case.op(
            list(tensors), teacher, reduction="none", tolerance=0.01, weight=1.5, **options
        )

    # The fast mode projects on one random direction: few calls, for the interpreter's sake.
    assert torch.autograd.gradcheck(run, student, fast_mode=INTERPRETED, atol=1e-6)
    if case.scores and device.type == "cuda":  # Triton 3.6 compiles no products of float64
        assert ds_kernels.last_path() == "reference"
        MODULES["_shared"].note_path("none")


@pytest.mark.parametrize("case", CASES, **ids)
def test_reductions_and_masks(case, device):
    mask = mask_of(case, device)
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    rows = case.op(student, teacher, mask, reduction="none")
    assert rows.shape == case.loss_shape(lead_of(case))
    assert (rows[~case.counted(mask).expand(rows.shape)] == 0).all()
    heads = rows.shape[1] if case.scores else 1
    total = rows.sum()
    count = mask.sum().item()
    close = torch.testing.assert_close
    if not INTERPRETED:  # the same outside the interpreter
        close(case.op(student, teacher, mask), total / heads / count)
        close(case.op(student, teacher, mask, reduction="sum"), total)
        assert case.op(student, teacher, mask & False) == 0
        full = case.op(student, teacher, reduction="none")
        close(case.op(student, teacher), full.sum() / heads / mask.numel())
    if case.scores:
        lengths = torch.tensor([lead_of(case)[1], 20], device=device)
        straight = torch.arange(lead_of(case)[1], device=device) < lengths[:, None]
        close(case.op(student, teacher, lengths), case.op(student, teacher, straight))
    else:
        indices = mask.flatten().nonzero().squeeze(1)
        close(case.op(student, teacher, indices), total / count)
        each = rows.flatten(-2)[..., indices]
        close(case.op(student, teacher, indices, reduction="none"), each, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, **ids)
def test_no_counted_row(case, device):
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    nothing = torch.zeros(lead_of(case), dtype=torch.bool, device=device)
    masks = (
        [nothing] if case.scores else [nothing, torch.zeros(0, dtype=torch.int64, device=device)]
    )
    for mask in masks:
        loss = case.op(student, teacher, mask)
        assert loss == 0
        assert all((grad == 0).all() for grad in gradients(loss, student))


@pytest.mark.parametrize("case", CASES, **ids)
def test_no_row_at_all(case, device):
    student, teacher, *_ = case.inputs((0, 4), torch.float32, device)
    loss = case.op(student, teacher)
    assert loss == 0
    assert [grad.shape for grad in gradients(loss, student)] == [x.shape for x in student]


@pytest.mark.parametrize("case", CASES, **ids)
def test_nan_in_rows_that_do_not_count(case, device):
    mask = mask_of(case, device)
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    clean = case.op(student, teacher, mask)
    wanted = gradients(clean, student)
    outside = ~mask[:, None].expand(-1, student[0].shape[1], -1) if student[0].dim() == 4 else ~mask
    with torch.no_grad():
        for x in (*student, *teacher):
            if x.is_floating_point() and x.shape[: outside.dim()] == outside.shape:
                x[outside] = float("nan")
    loss = case.op(student, teacher, mask)
    assert loss == clean
    for ours, exact in zip(gradients(loss, student), wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, **ids)
def test_nan_in_a_counted_row_shows(case, device):
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    with torch.no_grad():
        student[0].view(-1)[0] = float("nan")
    assert case.op(student, teacher, tolerance=0.1).isnan()


@pytest.mark.parametrize("case", CASES, **ids)
def test_strides(case, device):
    """Transposed, sliced and expanded inputs; an upstream gradient of stride 0."""
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    losses = case.op(student, teacher, reduction="none")
    wanted = gradients(losses, student)

    def transposed(x):
        return x.detach().mT.contiguous().mT if x.dim() > 1 else x.detach()

    def sliced(x):
        wide = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
        wide[..., 2:-1] = x.detach()
        return wide[..., 2:-1]

    for change in (transposed, sliced):
        changed = [change(x).requires_grad_() for x in student]
        again = case.op(changed, [change(x) for x in teacher], reduction="none")
        torch.testing.assert_close(again, losses)
        upstream = torch.ones((), device=device).expand(again.shape)
        for ours, exact in zip(gradients(again, changed, upstream), wanted, strict=True):
            # A product of another layout sums in another order, and what cancels keeps the
            # rounding of what it is made of.
            atol = 1e-5 * max(1.0, float(exact.abs().max()))
            torch.testing.assert_close(ours, exact, rtol=1.3e-6, atol=atol)
    expanded = [x[:1].detach().expand(x.shape) if x.dim() > 2 else x.detach() for x in student]
    copied = [x.contiguous() for x in expanded]
    torch.testing.assert_close(case.op(expanded, teacher), case.op(copied, teacher))


@pytest.mark.parametrize("case", [case for case in CASES if case.equal], **ids)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_teacher_equals_student(case, dtype, device):
    student, *_ = case.inputs(lead_of(case), dtype, device)
    losses = case.op(student, [x.detach().clone() for x in student], reduction="none")
    assert (losses >= 0).all() and losses.max() < 1e-6
    assert all(grad.abs().max() < 1e-6 for grad in gradients(losses, student))


@pytest.mark.parametrize("case", CASES, **ids)
def test_hinge_gates_rows(case, device):
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    rows = case.op(student, teacher, reduction="none").detach()
    tolerance = rows.flatten().sort().values[rows.numel() // 2].item()
    losses = case.op(student, teacher, reduction="none", tolerance=tolerance)
    torch.testing.assert_close(losses, (rows - tolerance).clamp(min=0))
    above = rows.max().item()
    loss = case.op(student, teacher, tolerance=above)  # equality counts as below
    assert loss == 0
    assert all((grad == 0).all() for grad in gradients(loss, student))


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("case", CASES, **ids)
def test_only_the_student_gets_gradients(case, device):
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    for x in teacher:
        if x.is_floating_point():
            x.requires_grad_()
    loss = case.op(student, teacher)
    loss.backward()
    assert all(x.grad is not None for x in student)
    assert all(x.grad is None for x in teacher)
    with torch.no_grad():
        silent = case.op(student, teacher)
    assert not silent.requires_grad
    torch.testing.assert_close(silent, loss.detach(), rtol=0, atol=0)


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("case", CASES, **ids)
def test_double_backward_raises(case, device):
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    (grad, *_) = torch.autograd.grad(case.op(student, teacher), student, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        grad.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("case", CASES, **ids)
def test_two_runs_are_bit_identical(case, device):
    runs = []
    for _ in range(2):
        student, teacher, *_ = case.inputs(lead_of(case), torch.bfloat16, device)
        losses = case.op(student, teacher, mask_of(case, device), reduction="none")
        runs.append([losses, *gradients(losses, student)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("case", CASES, **ids)
def test_autocast(case, device):
    """The sums stay in float32; only a projection is done in the autocast dtype."""
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = case.op(student, teacher)
    assert inside.dtype == torch.float32
    grads = gradients(inside, student)
    assert all(grad.dtype == torch.float32 for grad in grads)
    outside = case.op(student, teacher)
    loose = case.name.startswith("linear")
    close = {"rtol": 0.05, "atol": 0.02} if loose else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(inside, outside, **close)
    for ours, exact in zip(grads, gradients(outside, student), strict=True):
        scale = exact.abs().max().item()
        close = {"rtol": 0, "atol": 0.05 * scale} if loose else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(ours, exact, **close)


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("case", CASES, **ids)
def test_refusals(case):
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, torch.device("cpu"))
    bad = [
        ("reduction must be one of", {"reduction": "batchmean"}),
        ("weight must be", {"weight": -1.0}),
        ("tolerance must be", {"tolerance": -0.1}),
        ("mask", {"mask": torch.ones(5, 5, dtype=torch.bool)}),
        ("mask must be", {"mask": torch.ones(lead_of(case))}),
    ]
    if case.tempered:
        bad += [("temperature must be positive", {"temperature": value}) for value in (0.0, -1.0)]
    if case.scores:
        wrong = torch.tensor([[-1, 1], [3, lead_of(case)[1] + 1]])
        bad += [("lengths run from", {"mask": lengths}) for lengths in wrong]
    for message, options in bad:
        mask = options.pop("mask", None)
        with pytest.raises(ValueError, match=message):
            case.op(student, teacher, mask, **options)
    short = [x[:1] if x.dim() > 2 else x for x in student]
    with pytest.raises(ValueError, match=r"\[1, "):
        case.op(short, teacher)
    with pytest.raises(ValueError, match=r"int64|dtype"):
        case.op([x.long() for x in student], teacher)


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("case", CASES, **ids)
def test_opcheck(case, device, monkeypatch):
    """Schema, fake and autograd registration of the custom ops behind a call."""
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)
    calls = []

    kind = type(MODULES["masked_kl"]._op)
    run = kind.__call__

    def note(op, *args):
        calls.append((op, args))
        return run(op, *args)

    monkeypatch.setattr(kind, "__call__", note)
    case.op(student, teacher, mask_of(case, device)).backward()
    monkeypatch.undo()
    assert len(calls) == 2
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils=checks)


@pytest.mark.skipif(INTERPRETED, reason="the Triton kernels have no chunks")
@pytest.mark.parametrize("case", CASES, **ids)
def test_reference_in_chunks(case, monkeypatch):
    """One row or one group of queries at a time, as for a real vocabulary."""
    cpu = torch.device("cpu")
    for mask in (None, mask_of(case, cpu)):
        student, teacher, *_ = case.inputs(lead_of(case), torch.float32, cpu)
        whole = case.op(student, teacher, mask, reduction="none")
        wanted = gradients(whole, student)
        with monkeypatch.context() as patch:
            for module in MODULES.values():
                if hasattr(module, "_REFERENCE_ELEMENTS"):
                    patch.setattr(module, "_REFERENCE_ELEMENTS", 50)
            parts = case.op(student, teacher, mask, reduction="none")
            torch.testing.assert_close(parts, whole)
            for ours, exact in zip(gradients(parts, student), wanted, strict=True):
                torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)


def test_kernels_is_no_package():
    """A regular package `kernels` would shadow the one that transformers looks for."""
    import importlib.util

    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or "ds_kernels" not in str(spec.origin)
    assert ds_kernels.__file__ is not None
