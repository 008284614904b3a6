"""Run the kernels' tests, those of the series too, under several Triton versions, each in an
environment of its own: registers are allotted by the ptxas that a version brings, so each may spill
elsewhere.

python tests/kernels/triton_versions.py 3.6.0 '3.9.*'
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ["-q", "--no-header", "tests/kernels", "tests/ci/test_gpu_compile.py"]
TESTS += [f"tests/series/test_{name}.py" for name in ("gpu_compile", "memory", "torch_compile")]
TESTS += ["--ignore=tests/kernels/test_interpreter.py"]
"""Triton 3.6's interpreter fails in NumPy 2.4 and later, which makes no number of an array."""


def run(version: str, folder: Path) -> int:
    """Torch and the rest are this environment's, behind the Triton of the new one."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--ignore-installed", "--no-deps"]
    subprocess.run([*install, f"triton=={version}"], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(site, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "OMP_NUM_THREADS": "1"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    show = "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)"
    subprocess.run([python, "-c", show], env=environment, check=True)
    return subprocess.run([python, "-m", "pytest", *TESTS], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    codes = {}
    for version in sys.argv[1:] or ["3.6.0", "3.9.*"]:
        with tempfile.TemporaryDirectory() as folder:
            print(f"== triton {version}", flush=True)
            codes[version] = run(version, Path(folder))
    print(codes)
    sys.exit(max(codes.values()))
