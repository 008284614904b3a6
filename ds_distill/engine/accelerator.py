"""Has deepspeed choose its accelerator on a machine without a GPU: to be imported before it.

It would look for an accelerator of every kind. It remembers what it chose, so the environment is
afterwards as it was.
"""

import os

import torch

if not torch.cuda.is_available() and "DS_ACCELERATOR" not in os.environ:
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        from deepspeed.accelerator import get_accelerator

        get_accelerator()
    finally:
        del os.environ["DS_ACCELERATOR"]
