"""Ranks of DeepSpeed's launcher and of torchrun end when that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from processes import left_of, marked, within
from unit.test_launcher import RANK

from ds_distill.process.ports import free_port


def ranks_of(environment: dict[str, str]) -> list[psutil.Process]:
    return [one for one in left_of(environment) if "RANK" in one.environ()]


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """All at once. `torchrun` alone shows what it does by itself: its ranks go on."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    found = Path(sys.executable).parent
    port = ["--master_port", str(free_port())]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    commands = {
        "deepspeed": [sys.executable, str(found / "deepspeed"), "--num_gpus", "2", *port],
        "torchrun": [*torchrun, "--master-port", str(free_port())],
        "alone": [*torchrun, "--master-port", str(free_port())],
    }
    environments, started = {}, {}
    try:
        for name, command in commands.items():
            up = tmp_path / name
            up.mkdir()
            root = str(Path(__file__).parents[2])
            environments[name] = {
                **os.environ,
                **marked(),
                "UP": str(up),
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "PATH": f"{found}:{os.environ['PATH']}",
                "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
            }
            started[name] = subprocess.Popen(
                [*command, str(script), "alone" if name == "alone" else "heeds"],
                env=environments[name],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        for name, process in started.items():
            assert within(120, lambda: len(list((tmp_path / name).iterdir())) == 2), name  # noqa: B023
            assert len(ranks_of(environments[name])) == 2
            process.send_signal(signal.SIGKILL)
            process.wait()
        for name in ("deepspeed", "torchrun"):
            assert within(5, lambda: not left_of(environments[name])), name  # noqa: B023
        assert len(ranks_of(environments["alone"])) == 2
    finally:
        for environment in environments.values():
            for one in left_of(environment):
                with suppress(psutil.Error):
                    one.kill()
