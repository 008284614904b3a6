"""Ranks of DeepSpeed's launcher and of torchrun end when that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import left_of, marked, within

from ds_distill.process.ports import free_port

RANK = """
import ctypes, os, sys
if "heeds" in sys.argv:
    from ds_distill.process.launcher import end_with_launcher
    end_with_launcher()
import time
open(os.path.join(os.environ["UP"], os.environ["RANK"]), "w").close()
if os.environ["RANK"] == "1":
    ctypes.PyDLL(None).sleep(120)  # runs no other thread of Python
time.sleep(120)
"""


def ranks_of(environment: dict[str, str]) -> list[psutil.Process]:
    return [one for one in left_of(environment) if "RANK" in one.environ()]


@pytest.mark.further
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


def test_ranks_of_others_have_no_such_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the kernel comes when a thread of the parent ends, not the parent."""
    code = (
        "import ctypes, os\n"
        "from ds_distill.process.launcher import end_with_launcher\n"
        "end_with_launcher()\n"
        "found = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)\n"
        "print(found.value)"
    )

    def signal_of(**variables: str) -> int:
        environment = {**os.environ, **variables}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return int(done.stdout)

    for name in ("RANK", "TORCHELASTIC_RUN_ID", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert signal_of() == 0
    assert signal_of(RANK="0") == 0
    assert signal_of(RANK="0", TORCHELASTIC_RUN_ID="x", DS_DISTILL_LAUNCHED="x") == 0
    assert signal_of(RANK="0", TORCHELASTIC_RUN_ID="x") == signal.SIGKILL
