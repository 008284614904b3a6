"""A process that was killed while it loaded DeepSpeed's extension does not block the next one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

START = "from ds_distill.engine.world import World; print('ranks', World.start().size)"


@pytest.fixture
def start(command_environment: dict[str, str]) -> Any:
    """Starts a world of one process, if asked with a folder of extensions of its own."""

    def run(**own: str) -> subprocess.CompletedProcess[str]:
        environment = {**command_environment, **own}
        command = [sys.executable, "-c", START]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)

    return run


def test_a_lock_that_a_killed_process_left_is_removed(tmp_path: Path, start: Any) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    start()  # builds the extension, if no test did before
    built = Path(_get_build_directory("deepspeed_shm_comm", verbose=False))
    if not (built / "deepspeed_shm_comm.so").is_file():
        pytest.skip("DeepSpeed builds no extension here")
    shutil.copytree(built, tmp_path / built.name, dirs_exist_ok=True)
    left = tmp_path / built.name / "lock"
    left.touch()
    done = start(TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0 and "ranks 1" in done.stdout, done.stdout + done.stderr
    assert not left.exists()


def test_a_lock_that_a_process_holds_is_left(tmp_path: Path) -> None:
    from ds_distill.engine.extension import _is_open

    held = tmp_path / "lock"
    descriptor = os.open(held, os.O_CREAT | os.O_EXCL)
    assert _is_open(held)
    os.close(descriptor)
    assert not _is_open(held)
