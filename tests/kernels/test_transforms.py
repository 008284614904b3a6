"""Derivatives that the ops do not have are refused; the others are right."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from cases import CASES, INTERPRETED, lead_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the same outside the interpreter")


def dual(loss, tensors):
    with forward_ad.dual_level():
        return loss(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors))


def compiled_jvp(loss, tensors):
    def run(*given):
        return torch.func.jvp(loss, given, given)

    return torch.compile(run, backend="eager", fullgraph=True)(*tensors)


FORWARD = {
    "jvp": lambda loss, given: torch.func.jvp(loss, given, given),
    "jacfwd": lambda loss, given: torch.func.jacfwd(loss)(*given),
    "linearize": lambda loss, given: torch.func.linearize(loss, *given),
    "dual": dual,
}
BACKWARD = {
    "grad": lambda loss, given: torch.func.grad(loss)(*given),
    "vjp": lambda loss, given: torch.func.vjp(loss, *given),
    "jacrev": lambda loss, given: torch.func.jacrev(loss)(*given),
    "hessian": lambda loss, given: torch.func.hessian(loss)(*given),
}


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_other_derivatives_are_refused(case, device):
    student, teacher, *_ = case.inputs(lead_of(case), torch.float32, device)

    def loss(*tensors):
        return case.op(list(tensors), teacher)

    given = tuple(x.detach() for x in student)
    for requires_grad in (False, True):
        given = tuple(x.requires_grad_(requires_grad) for x in given)
        for name, derivative in FORWARD.items():
            with pytest.raises(RuntimeError, match=r"ds_kernels.*forward-mode.*loss.backward"):
                raise AssertionError(f"{name}: {derivative(loss, given)}")
    for name, derivative in BACKWARD.items():
        with pytest.raises(RuntimeError, match=r"ds_kernels.*not implemented; loss.backward"):
            raise AssertionError(f"{name}: {derivative(loss, given)}")
    # Nothing is left behind that would refuse what works.
    wanted = torch.autograd.grad(case.op(student, teacher), student)
    loss(*given).backward()
    for x, gradient in zip(given, wanted, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=0, atol=0)


def test_compiled_forward_mode_is_refused(device):
    student, teacher, *_ = CASES[0].inputs((3,), torch.float32, device)
    with pytest.raises(Exception, match=r"(?s)forward-mode"):
        compiled_jvp(lambda x: CASES[0].op([x], teacher), (student[0].detach(),))
    torch._dynamo.reset()


def test_a_transform_without_derivatives_works(device):
    student, teacher, *_ = CASES[0].inputs((3, 2), torch.float32, device)
    rows = torch.func.vmap(lambda s, t: CASES[0].op([s], [t]))(student[0].detach(), teacher[0])
    torch.testing.assert_close(
        rows, CASES[0].op(student, teacher, reduction="none").detach().mean(1)
    )


def test_a_tangent_of_the_teacher_alone_is_as_its_gradient(device):
    """None: gradients go to the student only, in either direction."""
    student, teacher, *_ = CASES[0].inputs((3,), torch.float32, device)
    fixed = student[0].detach()
    _, tangent = torch.func.jvp(lambda t: CASES[0].op([fixed], [t]), (teacher[0],), (teacher[0],))
    assert tangent == 0
