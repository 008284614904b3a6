"""torch.compile(fullgraph=True) of a small model with each op equals the eager model."""

import pytest
import torch
from cases import CASES, INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiled code is not interpreted")


class Model(torch.nn.Module):
    """A layer before the op, so that gradients pass through compiled code on both sides."""

    def __init__(self, case, width):
        super().__init__()
        torch.manual_seed(0)
        self.case, self.layer = case, torch.nn.Linear(width, width)

    def forward(self, student, teacher, mask):
        first = self.layer(student[0]).tanh()
        return self.case.op([first, *student[1:]], teacher, mask, weight=2.0) * 3


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_fullgraph(case, device):
    check_compiled(case, "aot_eager", device)


def check_compiled(case, backend, device):
    lead = (2, 9) if case.scores else (2, 4)
    student, teacher, *_ = case.inputs(lead, torch.float32, device)
    mask = torch.ones(lead, dtype=torch.bool, device=device)
    mask[1, 2:] = False
    if case.name.startswith("linear"):  # a bool mask there has a data-dependent number of rows
        mask = mask.flatten().nonzero().squeeze(1)
    model = Model(case, student[0].shape[-1]).to(device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for forward in (model, compiled):
        model.zero_grad()
        loss = forward(student, teacher, mask)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact)
    torch._dynamo.reset()
