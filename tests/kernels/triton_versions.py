"""Run the kernels' tests under several Triton versions, each in an environment of its own.

python tests/kernels/triton_versions.py 3.6.0 '3.9.*'
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def run(version: str, folder: Path) -> int:
    python = folder / "bin" / "python"
    venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*install, f"torch=={torch.__version__.split('+')[0]}"], check=True)
    subprocess.run([*install, f"triton=={version}", "numpy", "pytest", "hypothesis"], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "pytest", "-q", "--no-header", "-m", "not slow", "tests/kernels"]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    codes = {}
    for version in sys.argv[1:] or ["3.6.0", "3.9.*"]:
        with tempfile.TemporaryDirectory() as folder:
            print(f"== triton {version}", flush=True)
            codes[version] = run(version, Path(folder))
    print(codes)
    sys.exit(max(codes.values()))
