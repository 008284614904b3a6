"""torch.compile with its own backend: it writes and builds C++ for each op."""

import pytest
import torch
from cases import CASES
from kernels.test_torch_compile import check_compiled


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_fullgraph(case):
    check_compiled(case, "inductor", torch.device("cpu"))
