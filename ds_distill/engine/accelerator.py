"""What deepspeed must find in the environment: to be imported before it."""

import os

import torch

if not torch.cuda.is_available():
    # It looks for an accelerator when it is imported. Without the process count it would take the
    # number of NUMA nodes for the number of devices.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")  # its INFO lines drown the run's own
