"""linear_cross_entropy against PyTorch's cross-entropy of all logits, alone and with others on the
same head."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, INTERPRETED, MODULES, V

from ds_kernels import linear_cross_entropy, linear_kl

N, WIDTH, KNOWN = 7, 8, 29
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def made(dtype, device, rows=N):
    """Hidden states, weight and bias of a student, then of a teacher, which are rounded."""
    torch.manual_seed(0)
    shapes = [(rows, WIDTH), (V, WIDTH), (V,), (rows, 5), (V, 5), (V,)]
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(i < 3) for i, tensor in enumerate(tensors)]


def exact(tensors):
    return [tensor.detach().double().requires_grad_(i < 3) for i, tensor in enumerate(tensors)]


def assert_near(ours, theirs, tolerance):
    for own, other in zip(ours, theirs, strict=True):
        assert (own.double() - other).abs().max() <= tolerance * other.abs().max()


@pytest.fixture(params=[2, 100], ids="chunks of {}".format)
def _chunks(request, monkeypatch):
    budget = 8 * V * request.param
    monkeypatch.setattr(MODULES["_projections"], "LOGIT_BYTES", {"cpu": budget, "cuda": budget})


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_losses_and_gradients(dtype, biased, scale, device):
    """Of rows with factors of their own, so small ones that float16 has none of their products."""
    factors = scale * torch.rand(N, device=device)
    labels = torch.arange(N, device=device)
    found = []
    for fused in (True, False):
        hidden, weight, bias, *_ = (given := made(dtype, device)) if fused else exact(given)
        used = bias if biased else None
        if fused:
            losses, _ = linear_cross_entropy(hidden, weight, labels, student_bias=used)
            assert losses.dtype == torch.float32
        else:
            losses = F.cross_entropy(F.linear(hidden, weight, used), labels, reduction="none")
        (losses * factors).sum().backward()
        grads = [hidden.grad, weight.grad, *([bias.grad] if biased else [])]
        found.append([losses, *(grads if scale == 1 or dtype != torch.float16 else [])])
    assert_near(*found, TOLERANCE[dtype])


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("divergence", ["kl", "mse"])
@pytest.mark.parametrize("entries", [V, KNOWN])
def test_a_slot_takes_the_gradients_of_other_losses(dtype, divergence, entries, device):
    """Of two, the second of which runs at other rows, as they are without it."""
    labels, other_rows = torch.arange(N, device=device), torch.tensor([0, 2, 4], device=device)
    found = []
    for with_slot in (True, False):
        hidden, weight, bias, *teacher = made(dtype, device)
        losses, slot = linear_cross_entropy(hidden, weight, labels, student_bias=bias)
        for rows in (None, other_rows):
            losses = losses + linear_kl(
                hidden,
                weight,
                *teacher[:2],
                rows,
                student_bias=bias,
                teacher_bias=teacher[2],
                entries=entries,
                slot=slot if with_slot else None,
                divergence=divergence,
            )
        losses.sum().backward()
        assert weight.grad.is_contiguous()
        found.append([losses.detach(), hidden.grad, weight.grad, bias.grad])
    wanted = [None if tensor is None else tensor.double() for tensor in found[1]]
    assert_near(found[0], wanted, TOLERANCE[dtype])


def test_gradients_numerically(device):
    tensors = [tensor.requires_grad_() for tensor in exact(made(torch.float32, device, 3))]
    labels = torch.tensor([3, 0, V - 1], device=device)

    def both(*given):
        hidden, weight, bias = given
        losses, slot = linear_cross_entropy(hidden, weight, labels, student_bias=bias)
        taught = [tensor.detach() for tensor in tensors[3:5]]
        kl = linear_kl(hidden, weight, *taught, entries=KNOWN, slot=slot, reduction="none")
        return losses + kl

    assert torch.autograd.gradcheck(both, tuple(tensors[:3]))


def test_a_tied_weight_and_no_row(device):
    table = torch.randn(V, WIDTH, device=device).requires_grad_()
    ids = torch.tensor([3, 0, 3], device=device)
    grads = []
    for fused in (True, False):
        if fused:
            losses, _ = linear_cross_entropy(table[ids].tanh(), table, ids)
        else:
            losses = F.cross_entropy(table[ids].tanh() @ table.T, ids, reduction="none")
        grads += torch.autograd.grad(losses.sum(), table)
    torch.testing.assert_close(*grads)
    losses, _ = linear_cross_entropy(table[ids[:0]], table, ids[:0])
    losses.sum().backward()
    assert losses.shape == (0,) and table.grad is not None and not table.grad.any()


def test_what_needs_no_gradient(device):
    """A frozen weight has none, by no loss; of a loss that is not used, the slot still gives its
    own; an expanded gradient is not written over."""
    labels = torch.arange(N, device=device)
    hidden, weight, _, *teacher = made(torch.float32, device)
    losses, slot = linear_cross_entropy(hidden, weight.detach(), labels)
    (losses.sum() + linear_kl(hidden, weight.detach(), *teacher[:2], slot=slot)).backward()
    assert hidden.grad is not None and weight.grad is None
    _, slot = linear_cross_entropy(hidden, weight, labels)
    of_slot = torch.autograd.grad(linear_kl(hidden, weight, *teacher[:2], slot=slot), weight)
    alone = torch.autograd.grad(linear_kl(hidden, weight, *teacher[:2]), weight)
    assert torch.equal(*of_slot, *alone)
    into = torch.autograd.grad(linear_kl(hidden, weight, *teacher[:2], slot=slot), slot)
    assert torch.equal(*into, *alone)
    with torch.no_grad():
        _, slot = linear_cross_entropy(hidden, weight, labels)
    of_slot = torch.autograd.grad(linear_kl(hidden, weight, *teacher[:2], slot=slot), weight)
    assert torch.equal(*of_slot, *alone)
    losses, slot = linear_cross_entropy(hidden, weight, labels)
    more = torch.autograd.grad(losses.sum() + slot.sum(), weight, retain_graph=True)
    torch.testing.assert_close(more[0] - 1, *torch.autograd.grad(losses.sum(), weight))


def test_refused(device):
    hidden, weight, bias, *teacher = made(torch.float32, device)
    labels = torch.arange(N, device=device)
    for given, message in (
        ((hidden, weight, labels[:3]), "labels are torch.int64 \\[3\\]"),
        ((hidden, weight, labels.float()), "labels are torch.float32"),
        ((hidden[None], weight, labels[:1]), "student_hidden is"),
        ((hidden, weight.half(), labels), "student_weight is torch.float16"),
        ((hidden, weight.T, labels), "does not project"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(*given)
    with pytest.raises(ValueError, match="student_bias"):
        linear_cross_entropy(hidden, weight, labels, student_bias=bias[:-1])
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"labels run from -100 to .*0 to {V - 1} wanted"):
            linear_cross_entropy(hidden, weight, torch.tensor([*range(N - 1), -100]))
    losses, slot = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(ValueError, match="is not of student_weight"):
        linear_kl(hidden, weight, *teacher[:2], slot=slot[1:])
    (gradient,) = torch.autograd.grad(losses.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.func.grad(lambda weight: linear_cross_entropy(hidden, weight, labels)[0].sum())(
            weight
        )
    losses, _ = linear_cross_entropy(hidden, weight, labels)
    weight.data = torch.empty(0)
    with pytest.raises(RuntimeError, match="released after the forward pass"):
        losses.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason="compiled code is not interpreted")
def test_compiled(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, V)

        def forward(self, hidden, labels, *teacher):
            hidden, weight, bias = self.layer(hidden).tanh(), self.head.weight, self.head.bias
            losses, slot = linear_cross_entropy(hidden, weight, labels, student_bias=bias)
            return losses.sum() + linear_kl(hidden, weight, *teacher, student_bias=bias, slot=slot)

    hidden, _, _, *teacher = made(torch.float32, device)
    model = Model().to(device)
    results = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        forward(hidden, torch.arange(N, device=device), *teacher[:2]).backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other)
    torch._dynamo.reset()
