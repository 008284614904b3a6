"""DeepSpeed: initialise, step, checkpoint, teacher placement. Nothing else imports it.

Only `engine`, `placement` and `world` import deepspeed, which takes seconds: commands that
start no engine import none of them.
"""

import os

import torch

if not torch.cuda.is_available():
    # Before deepspeed is imported: it looks for an accelerator then. Without the process
    # count it would take the number of NUMA nodes for the number of devices.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")  # its INFO lines drown the run's own
