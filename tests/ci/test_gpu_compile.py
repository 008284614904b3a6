"""Every kernel compiles for every GPU: the launches that `make test` leaves out."""

import pytest
from kernels.test_gpu_compile import cases_of, check_launch


@pytest.mark.parametrize(("call", "target"), cases_of("ci"))
def test_a_launch(call, target):
    check_launch(call, target)
