"""Packed views: without padding, and with the same outputs as padded ones."""

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import python

KERNEL = """
import contextlib, sys, torch
sys.path[:0] = [{tests!r}]
torch.cuda.device = contextlib.nullcontext  # the launch chooses its device, and here is none
from unit.test_packed import attentions_differ, passes_differ
print(max(attentions_differ(), passes_differ()))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(find_spec("flashdeberta") is None, reason="flashdeberta is not installed")
def test_flashdebertas_kernel_is_the_plain_attention():
    """In Triton's interpreter, which only a new process can turn on."""
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 9):
        pytest.skip("the interpreter of Triton below 3.9 fails on its loops under numpy 2.4")
    code = KERNEL.format(tests=str(Path(__file__).parents[1]))
    done = python(code, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=None)
    assert float(done.stdout.splitlines()[-1]) < 1e-5
