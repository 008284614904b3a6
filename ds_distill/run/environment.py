"""The environment of a run: versions, devices, git commit."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ds_distill

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "datasets",
    "tokenizers",
    "numpy",
    "triton",
    "flashdeberta",
)


def describe_environment(num_ranks: int, device: str) -> dict[str, Any]:
    """Versions, devices and git commit, for environment.json."""
    count = 0 if device.startswith("cpu") else torch.cuda.device_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ds_distill": ds_distill.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "ranks": num_ranks,
        "device": device,
    }


def software() -> dict[str, str | None]:
    """What must be the same on all ranks: versions, and a digest of this project's code."""
    digest, root = hashlib.sha256(), Path(ds_distill.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    versions = {name: _version(name) for name in PACKAGES}
    code = digest.hexdigest()[:12]
    return {"python": platform.python_version(), "code of ds_distill": code, **versions}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that the package runs from, with `+changes` if it was edited."""
    root = Path(ds_distill.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
