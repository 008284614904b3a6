"""The wheel: what is in it, and that it works where the checkout is not."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command, cwd, **environment):
    """Standard output of a command that must end well."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation)
    run(*pip, "--wheel-dir", folder, ROOT, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("METADATA"))
        description = archive.read(metadata).decode()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"ds_distill", "ds_configs", "ds_kernels"}
    wanted = [
        *(ROOT / "ds_distill").rglob("*.py"),
        *(ROOT / "ds_distill" / "reporting").glob("*.[jhc]*"),
        ROOT / "ds_distill" / "py.typed",
        *(ROOT / "ds_configs").rglob("*.json"),
        *(ROOT / "ds_configs").rglob("*.yaml"),
    ]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names
    kernels = (ROOT / "kernels" / "ds_kernels").glob("*.py")
    assert {f"ds_kernels/{path.name}" for path in [*kernels, Path("py.typed")]} <= names
    assert not [name for name in names if "test" in name.lower()]
    assert "License-Expression: Apache-2.0" in description
    assert any(name.endswith("licenses/LICENSE") for name in names)
