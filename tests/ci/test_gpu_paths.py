"""What runs otherwise on a GPU, as far as a CPU can show it."""

from __future__ import annotations

import os
import subprocess
import sys

OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_a_lone_process_ends_its_group() -> None:
    """NCCL's warning that it was not ended was the last that a user read of a run."""
    said = "import atexit, torch.distributed as dist; from ds_distill.engine.world import World; "
    said += "atexit.register(lambda: print(dist.is_initialized())); World.start(); "
    said += "assert dist.is_initialized()"
    outside = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    done = subprocess.run([sys.executable, "-c", said], env=outside, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "False\n", done.stderr
