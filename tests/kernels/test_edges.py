"""Inputs that broke published kernels: infinities, underflow, offsets, wide rows, tiny widths."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from cases import (
    CASES,
    COSINE,
    DTYPES,
    INTERPRETED,
    KL,
    MODULES,
    error,
    kl_rows,
    make_topk,
    topk_rows,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import ds_kernels

INF = float("inf")
FEW = MODULES["masked_kl"].FEW
DIVERGENCES = ("kl", "reverse_kl", "js", "tv")
OPS = {name: partial(ds_kernels.masked_kl, divergence=name) for name in DIVERGENCES}
OPS["cosine"] = ds_kernels.masked_cosine


def both(op, student, teacher, **options):
    student = student.detach().clone().requires_grad_()
    losses = op(student, teacher, reduction="none", **options)
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    return losses.detach(), gradient


def case_of(name):
    return next(case for case in CASES if case.name == name)


def _shifted(shift):
    return lambda student, teacher: (student + shift, teacher)


def _infinite_teacher(student, teacher):
    return student, teacher.index_fill(1, torch.arange(20, device=teacher.device), -INF)


def _underflow(student, teacher):
    """Both probabilities underflow, at unlike rates: 0 * inf must not appear."""
    student, teacher = torch.zeros_like(student), torch.zeros_like(teacher)
    student[:, 1:], teacher[:, 1:] = -900.0, -300.0
    student[:, 5], teacher[:, 5] = -20.0, -100.0
    return student, teacher


def _far(distance):
    """exp(log p - log q) overflows float32 from 88.8 on."""

    def made(student, teacher):
        student, teacher = torch.zeros_like(student), torch.zeros_like(teacher)
        student[:, 1] = teacher[:, 0] = distance
        return student, teacher

    return made


def _near_and_far(student, teacher):
    """Subtracting a far logit first would round log p to the size of the student's logit."""
    student[:, 20:] -= 1500.0
    teacher[:, 20:] -= 30.0  # some mass is there
    return student, teacher


HOSTILE = {
    **{f"shifted by {shift}": _shifted(shift) for shift in (80.0, -80.0, 900.0, -900.0)},
    **{f"far by {distance}": _far(distance) for distance in (30.0, 95.0, 400.0)},
    "infinite in the teacher": _infinite_teacher,
    "underflow": _underflow,
    "near and far": _near_and_far,
}


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_logits(kind, name, device):
    """The losses and gradients of the formula in float64."""
    if name == "reverse_kl" and kind == "infinite in the teacher":
        pytest.skip("is infinite")
    torch.manual_seed(0)
    student, teacher = HOSTILE[kind](*(torch.randn(3, 37, device=device) for _ in range(2)))
    losses, gradient = both(OPS[name], student, teacher)
    exact = student.double().requires_grad_()
    oracle = case_of(name).rows([exact], [teacher.double()], 1.0)
    torch.testing.assert_close(losses.double(), oracle, rtol=2e-6, atol=2e-6)
    (wanted,) = torch.autograd.grad(oracle.sum(), exact)
    atol = 5e-7 * max(4.0, oracle.max().item())  # derivatives are differences of such numbers
    torch.testing.assert_close(gradient.double(), wanted.nan_to_num(), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_infinite_logits_in_both(name, device):
    """Columns that are -inf on both sides count nothing, a leading tile of them included."""
    torch.manual_seed(0)
    teacher, student = (torch.randn(2, 53, device=device) for _ in range(2))
    teacher[:, :18] = student[:, :18] = -INF
    teacher[:, 40] = student[:, 40] = -INF
    kept = [*range(18, 40), *range(41, 53)]
    losses, gradient = both(OPS[name], student, teacher)
    wanted, wanted_gradient = both(OPS[name], student[:, kept], teacher[:, kept])
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(gradient[:, kept], wanted_gradient)
    assert (gradient[:, :18] == 0).all() and (gradient[:, 40] == 0).all()


def test_infinite_logit_in_the_student(device):
    """The divergence is infinite where the teacher gives mass, as in eager PyTorch."""
    teacher, student = (torch.zeros(1, 37, device=device) for _ in range(2))
    student[0, 3] = -INF
    losses, gradient = both(ds_kernels.masked_kl, student, teacher)
    assert losses.item() == INF
    assert gradient.isfinite().all() and gradient[0, 3].item() == pytest.approx(-1 / 37)
    losses, _ = both(OPS["js"], student, teacher)
    assert 0 < losses.item() < math.log(2)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_row_without_any_logit_is_nan(name, device):
    """No distribution, so no number that looks like a loss."""
    teacher, student = (torch.zeros(3, 37, device=device) for _ in range(2))
    teacher[0] = student[1] = -INF
    teacher[2] = student[2] = -INF
    losses, _ = both(OPS[name], student, teacher)
    assert losses.isnan().all()


def test_dtypes_may_differ(device):
    torch.manual_seed(0)
    teacher, student = (torch.randn(3, 37, device=device) for _ in range(2))
    losses, gradient = both(ds_kernels.masked_kl, student.bfloat16(), teacher)
    wanted, _ = both(ds_kernels.masked_kl, student.bfloat16().float(), teacher)
    torch.testing.assert_close(losses, wanted)
    assert gradient.dtype == torch.bfloat16


def test_row_offsets_pass_32_bits(device):
    """A row that starts 2^31 elements in: an int32 offset would wrap to another address."""
    step = 2**30 + 8
    try:
        store = torch.empty(2 * step + 40, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("4 GiB of memory are not free")
    rows = store.as_strided((3, 37), (step, 1))
    torch.manual_seed(0)
    values = torch.randn(3, 37, device=device).half()
    rows.copy_(values)
    teacher = torch.randn(3, 37, device=device).half()
    mask = torch.tensor([False, False, True], device=device)
    loss = ds_kernels.masked_kl(rows, teacher, mask)
    torch.testing.assert_close(loss, ds_kernels.masked_kl(values, teacher, mask))
    loss = ds_kernels.masked_cosine(rows, teacher, mask)
    torch.testing.assert_close(loss, ds_kernels.masked_cosine(values, teacher, mask))


def test_cosine_of_zero_vectors(device):
    student = torch.zeros(2, 37, device=device)
    student[1] = 1.0
    teacher = 1.0 - student
    losses, gradient = both(ds_kernels.masked_cosine, student, teacher)
    assert losses.tolist() == [1.0, 1.0]
    assert (gradient == 0).all()


def test_cosine_of_nearly_parallel_vectors(device):
    torch.manual_seed(0)
    teacher = torch.randn(4, 37, device=device)
    student = teacher + 1e-4 * torch.randn(4, 37, device=device)
    losses, _ = both(ds_kernels.masked_cosine, student, teacher)
    exact = COSINE.rows([student.double()], [teacher.double()], 1.0)
    torch.testing.assert_close(losses.double(), exact, rtol=1e-3, atol=0)


def test_topk_tail_that_does_not_sum_to_one(device):
    """Entries and tail after 16-bit storage are renormalised."""
    torch.manual_seed(0)
    (student,), (log_probs, ids, tail) = ([x.to(device) for x in xs] for xs in make_topk((4,)))
    stored = [(log_probs - 0.3).half(), ids.int(), (tail - 0.3).half()]
    losses, _ = both(lambda s, t, **o: ds_kernels.topk_kl(s, *t, **o), student.float(), stored)
    oracle = topk_rows([student], [stored[0].double(), ids, stored[2].double()], 1.0)
    torch.testing.assert_close(losses.double(), oracle, rtol=2e-5, atol=2e-6)
    assert (losses >= 0).all()


def test_topk_of_every_column_is_the_full_divergence(device):
    torch.manual_seed(0)
    teacher, student = (torch.randn(3, 37, device=device) for _ in range(2))
    log_probs, ids = (teacher / 2).log_softmax(-1).topk(37, -1)
    nothing = torch.full((3,), -INF, device=device)
    ours = both(
        lambda s, t, **o: ds_kernels.topk_kl(s, log_probs, ids, nothing, **o),
        student,
        teacher,
        temperature=2.0,
    )
    full = both(ds_kernels.masked_kl, student, teacher, temperature=2.0)
    for a, b in zip(ours, full, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_topk_refuses_ids_outside(device):
    (student,), (log_probs, ids, tail) = ([x.to(device) for x in xs] for xs in make_topk((4,)))
    ids[0, 0] = 37
    if device.type == "cpu":
        with pytest.raises(ValueError, match="teacher_ids run from -1 to 37"):
            ds_kernels.topk_kl(student, log_probs, ids, tail)
    else:
        assert ds_kernels.topk_kl(student, log_probs, ids, tail).item() == INF


def test_attention_refuses_heads_that_are_too_wide():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="at most 256"):
        wide = torch.randn(1, 2, 5, 257)
        ds_kernels.attention_kl(q, q, wide, wide)


def test_attention_of_heads_as_wide_as_those_of_an_ib_bert(device):
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, 19, 32, device=device, requires_grad=True) for _ in range(2))
    teacher = [torch.randn(1, 2, 19, 256, device=device) for _ in range(2)]
    mask = torch.arange(19, device=device)[None] < 17
    loss = ds_kernels.attention_kl(q, k, *teacher, mask)
    log_q, log_p = (
        (a[..., :17, :].double() @ b[..., :17, :].double().mT / a.shape[-1] ** 0.5).log_softmax(-1)
        for a, b in ((q, k), teacher)
    )
    wanted = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-4, atol=1e-6)
    ours, exact = (torch.autograd.grad(each, (q, k)) for each in (loss, wanted))
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-6)


def test_linear_refuses_other_vocabularies():
    h, w = torch.randn(3, 4), torch.randn(7, 4)
    with pytest.raises(ValueError, match="give `entries`, the size of the common prefix"):
        ds_kernels.linear_kl(h, w, h, torch.randn(6, 4))
    for entries in (0, 7):
        with pytest.raises(ValueError, match=f"entries {entries}; from 1 to 6 wanted"):
            ds_kernels.linear_kl(h, w, h, torch.randn(6, 4), entries=entries)
    with pytest.raises(ValueError, match="does not project"):
        ds_kernels.linear_kl(h, torch.randn(7, 5), h, w)
    with pytest.raises(ValueError, match="must agree, outside autocast"):
        ds_kernels.linear_kl(h, w.half(), h, w)
    with pytest.raises(ValueError, match="student_bias"):
        ds_kernels.linear_kl(h, w, h, w, student_bias=torch.zeros(6))


def test_what_linear_keeps(device):
    """Nothing of the teacher beside the derivatives; of squared errors no temperature."""
    h, w = (torch.randn(n, 4, device=device, requires_grad=True) for n in (3, 7))
    teacher = torch.randn(3, 5, device=device), torch.randn(7, 5, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        ds_kernels.linear_kl(h, w, *teacher)
    assert (7, 4) in kept and not {(3, 5), (7, 5)} & {*map(tuple, kept)}
    losses = [ds_kernels.linear_kl(h, w, *teacher, divergence="mse", temperature=t) for t in (1, 3)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (h, w)) for loss in losses))


def test_linear_weight_released_before_backward():
    h, w = torch.randn(3, 4, requires_grad=True), torch.nn.Parameter(torch.randn(7, 4))
    loss = ds_kernels.linear_kl(h, w, torch.randn(3, 4), torch.randn(7, 4))
    w.data = torch.empty(0)
    with pytest.raises(RuntimeError, match="released after the forward pass"):
        loss.backward()


@pytest.mark.parametrize("keep", [1 << 28, 0])
@pytest.mark.parametrize("entries", [None, 29])
def test_linear_in_chunks(keep, entries, device, monkeypatch):
    """Several chunks of rows, with kept derivatives and with a second projection; tied head. What
    is not compared may be anything."""
    module = MODULES["_projections"]
    monkeypatch.setattr(module, "KEEP_BYTES", {"cpu": keep, "cuda": keep})
    monkeypatch.setattr(module, "LOGIT_BYTES", {"cpu": 8 * 37 * 2, "cuda": 8 * 37 * 2})
    torch.manual_seed(0)
    ids = torch.randint(37, (7,), device=device)
    table = torch.randn(37, 8, device=device).requires_grad_()
    teacher, head = torch.randn(7, 8, device=device), torch.randn(37, 8, device=device)
    mask = torch.tensor([True, False, True, True, True, False, True], device=device)
    upstream = torch.randn(7, device=device)
    if entries is not None:
        ids = ids.clamp(max=entries - 1)
        head[entries:] = float("nan")
        with torch.no_grad():
            table[entries:] = float("nan")
    results = []
    for fused in (True, False):
        hidden = table[ids].tanh()
        if fused:
            losses = ds_kernels.linear_kl(
                hidden, table, teacher, head, mask, entries=entries, reduction="none"
            )
        else:
            own, others = table[:entries], head[:entries]
            losses = kl_rows([hidden @ own.T], [teacher @ others.T], 1.0) * mask
        results.append([losses, *torch.autograd.grad(losses, table, upstream)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


@st.composite
def _problems(draw):
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded"]))
    tensors = []
    for _ in range(2):
        scale = draw(st.sampled_from([1e-3, 1.0, 10.0, 1000.0]))
        x = (torch.randn(rows, width) * scale + draw(st.sampled_from([0.0, -50.0, 50.0]))).to(dtype)
        if layout == "transposed":
            x = x.T.contiguous().T
        elif layout == "sliced":
            x = torch.cat((x, x), 1)[:, 1 : width + 1]
        elif layout == "expanded":
            x = x[:1].expand(rows, width)
        tensors.append(x)
    if width > 1 and draw(st.booleans()):
        hole = draw(st.integers(0, width - 2))
        tensors = [x.index_fill(1, torch.arange(hole), -INF) for x in tensors]
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    return (
        *tensors,
        mask,
        draw(st.sampled_from([0.5, 1.0, 2.0])),
        draw(st.sampled_from([0.0, 0.3])),
    )


@settings(
    max_examples=12 if INTERPRETED else 150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(_problems())
def test_any_shape_mask_stride_and_scale(problem):
    student, teacher, mask, temperature, tolerance = problem
    rows = mask.nonzero().squeeze(1)
    options = {"temperature": temperature, "tolerance": tolerance}
    student = student.detach().requires_grad_()
    if listed := mask.numel() % 2 == 0:
        options["mask"] = rows
    else:
        options["mask"] = mask
    losses = ds_kernels.masked_kl(student, teacher, reduction="none", **options)
    if listed:
        losses = losses.new_zeros(len(mask)).index_copy(0, rows, losses)
    exact = student.detach().double().requires_grad_()
    options["mask"] = mask
    oracle = KL.wanted([exact], [teacher.double()], **options)
    eager = KL.wanted([student], [teacher], **options)
    size = oracle.abs().max().item() + 1
    assert error(losses, oracle) <= error(eager, oracle) + 1e-5 * size
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    (wanted,) = torch.autograd.grad(oracle.sum(), exact)
    near = (oracle.detach() > 0) != (losses.detach() > 0)  # a hinge that rounding opens or shuts
    slack = 2 * torch.finfo(student.dtype).eps + 1e-4
    assert error(gradient[~near], wanted[~near].nan_to_num()) <= slack * temperature


PLACES = [
    ((37, 37), (0, 0)),  # each row begins elsewhere in its 16 bytes, the teacher's alike
    ((40, 40), (0, 0)),  # all begin with them
    ((41, 45), (0, 0)),  # alike, by other strides
    ((40, 37), (0, 0)),  # unlike
    ((48, 48), (3, 3)),  # parts of wider rows
    ((48, 40), (0, 1)),
]
# The interpreter takes long, and the siblings of masked_kl read as it does.
PLACED = [
    (name, *place, dtype)
    for name in OPS
    for place in PLACES
    for dtype in (torch.float32, torch.bfloat16)
    if not INTERPRETED
    or (name == "kl" and (place in PLACES[::3] or dtype == torch.float32))
    or (place in PLACES[::3] and dtype == torch.float32)
]


@pytest.mark.parametrize(("name", "widths", "firsts", "dtype"), PLACED)
def test_rows_begin_anywhere_in_memory(name, widths, firsts, dtype, device):
    """Rows of 37 in many places: the losses of the formula, and nothing of the neighbours."""
    torch.manual_seed(0)
    rows = [(torch.randn(5, 37, device=device) * 2).to(dtype) for _ in range(2)]
    placed = []
    for row, width, first in zip(rows, widths, firsts, strict=True):
        wide = torch.full((5, width), torch.nan, dtype=dtype, device=device)
        wide[:, first : first + 37] = row
        placed.append(wide[:, first : first + 37])
    student = placed[0].requires_grad_()
    losses = OPS[name](student, placed[1], reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    exact = rows[0].double().requires_grad_()
    oracle = case_of(name).rows([exact], [rows[1].double()], 1.0)
    (wanted,) = torch.autograd.grad(oracle.sum(), exact)
    torch.testing.assert_close(losses.detach().double(), oracle.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("gap", [0.001, 0.1, 3.0])
def test_accuracy_at_any_gap(gap, temperature, device, monkeypatch):
    """float32 against float64: a loss that is a millionth of the logits, what all logits of a row
    have in common, which is not part of it, and columns that neither has, in rows that begin
    anywhere. A row for each spread and offset."""
    if INTERPRETED:
        monkeypatch.setattr(MODULES["_tiles"], "row_tile", lambda *sizes: (64, 1))
    torch.manual_seed(0)
    width = 101 if INTERPRETED else 301
    settings = [(std, offset) for std in (1, 2, 4, 8) for offset in (-80, 0, 80)]
    spread, offsets = torch.tensor(settings, device=device).float()[:, :, None].unbind(1)
    wide = torch.randn(len(settings), width + 2, device=device) * spread
    wide[:, 7:10] = -INF
    teacher = (wide - offsets)[:, 1:-1]
    student = (wide + torch.randn_like(wide) * gap + offsets)[:, 1:-1]
    losses, gradient = both(ds_kernels.masked_kl, student, teacher, temperature=temperature)
    exact = student.double().requires_grad_()
    oracle = kl_rows([exact], [teacher.double()], temperature)
    (wanted,) = torch.autograd.grad(oracle.sum(), exact)
    wanted = wanted.nan_to_num()  # of the columns that neither has
    # Of each distribution, exponents and the log of their sum are rounded: in all four times by
    # half of eps of the largest logit, where products are rounded on their own. What comes after
    # them is rounded by no more of 1.
    largest = torch.stack([student, teacher]).nan_to_num(neginf=0).abs().amax((0, 2))
    slip = 2 * torch.finfo(torch.float32).eps * (largest + temperature)
    assert ((gradient - wanted).norm(dim=1) <= slip).all()
    # Log-probabilities off by slip / T move the divergence, at most, by that times its sums of
    # |p - q| and p |log p - log q|, which Pinsker's inequality bounds.
    sums = (2 * oracle).sqrt() + oracle / temperature
    assert ((losses - oracle).abs() <= slip * sums + slip**2 / 2).all()


@pytest.mark.interpreted
@pytest.mark.skipif(not INTERPRETED, reason="hardware rounds a product and its sum once")
def test_accuracy_where_a_product_and_its_sum_are_rounded_apart(device, monkeypatch):
    """As the interpreter of Triton before 3.9 does."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    def apart(builder, x, y, z):
        return builder.binary_op(builder.binary_op(x, y, np.multiply), z, np.add)

    monkeypatch.setattr(Builder, "create_fma", apart)
    test_accuracy_at_any_gap(0.001, 0.5, device, monkeypatch)


def test_few_logits_in_plain_torch():
    """What class logits take on a GPU, here on the CPU: the same loss and gradient."""
    torch.manual_seed(0)
    student, teacher = torch.randn(9, 5), torch.randn(9, 5)
    teacher[0, 1] = student[0, 1] = -INF
    student[2] = torch.nan
    mask = torch.arange(9) != 2
    # Probabilities that are no normal float32, or none at all: what a file says that names no more.
    teacher[6:, 1] = torch.tensor([-90.0, -100.0, -105.0])
    plain = MODULES["masked_kl"]._Plain.apply
    for temperature, tolerance in ((1.0, 0.0), (2.0, 0.5)):
        leaf = student.clone().requires_grad_()
        losses = plain(leaf, teacher, mask, temperature, 1.5, tolerance)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        wanted, wanted_gradient = both(
            ds_kernels.masked_kl,
            student,
            teacher,
            mask=mask,
            temperature=temperature,
            weight=1.5,
            tolerance=tolerance,
        )
        torch.testing.assert_close(losses.detach(), wanted)
        torch.testing.assert_close(gradient, wanted_gradient)


@pytest.mark.parametrize(
    ("rows", "divergence", "path"),
    [(32, "kl", "torch"), (32 * 342, "kl", "none"), (32, "js", "none")],
)
def test_what_few_logits_are_on_a_gpu(rows, divergence, path):
    """Shapes and devices alone, of a GPU that need not be there: 65,536 logits are the most."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(MODULES["masked_kl"], "FEW", FEW)
        student = torch.empty(rows, 6, device="cuda")
        ds_kernels.masked_kl(student, student, divergence=divergence)
    assert ds_kernels.last_path() == path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_logits_in_rows_of_16_bytes(dtype, device):
    """float32 from 16-bit operands, written in place: on a GPU by torch.mm(out_dtype=, out=)."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 8, device=device).to(dtype)
    weight = torch.randn(37, 8, device=device).to(dtype)
    logits = MODULES["_projections"].logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert logits.stride() == ((48, 1) if device.type == "cuda" or INTERPRETED else (37, 1))
    exact = hidden.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("budget", [1 << 30, 600], ids=["at once", "in chunks"])
def test_products_in_multiples_of_8_are_the_whole_ones(dtype, budget, monkeypatch):
    """As on a GPU: 37 columns are 32 and 5."""
    module = MODULES["_projections"]
    monkeypatch.setattr(module, "LOGIT_BYTES", {"cpu": budget})
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8).to(dtype), torch.randn(37, 8).to(dtype)
    bias, teacher = torch.randn(37).to(dtype), torch.randn(6, 8).to(dtype)
    labels, rows = torch.randint(0, 37, (6,)), torch.tensor([0, 2, 3, 5])

    def gradients():
        student = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        losses, slot = ds_kernels.linear_cross_entropy(
            student[0], student[1], labels, student_bias=student[2]
        )
        kl = ds_kernels.linear_kl(
            student[0], student[1], teacher, weight, rows, student_bias=student[2], slot=slot
        )
        return list(torch.autograd.grad(losses.mean() + kl, student))

    whole = gradients()
    used = []

    def pieces(width, tensor):
        used.append(width)
        return [slice(0, 32), slice(32, width)]

    monkeypatch.setattr(module, "pieces", pieces)
    for ours, wanted in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(ours, wanted)
    assert set(used) == {37}


def test_pieces_are_all_columns_and_the_first_a_multiple_of_8():
    gpu = torch.empty(0, device="meta")
    found = MODULES["_projections"].pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        for width in (1, 7, 8, 9, 30522, 50265, 128100):
            columns = [number for part in found(width, gpu) for number in range(width)[part]]
            assert columns == list(range(width))
            assert len(found(width, gpu)) == (1 if width % 8 == 0 or width < 8 else 2)
    assert found(37, torch.empty(0)) == [slice(0, 37)]
