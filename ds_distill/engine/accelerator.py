"""Environment variables that deepspeed reads when it is imported: import this module before it."""

import os

import torch

if not torch.cuda.is_available():
    # Without LOCAL_SIZE deepspeed would use the number of NUMA nodes as the number of devices.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")  # its INFO lines would hide the run's own
