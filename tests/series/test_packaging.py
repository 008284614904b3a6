"""The wheel: what is in it, and that it works where the checkout is not."""

import venv

from unit.test_packaging import (
    ROOT,
    run,
    wheel,  # noqa: F401
)


def test_the_wheel_installs_into_an_empty_environment(wheel, tmp_path):
    """With all that it needs, at the versions of constraints.txt."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    pip = (home / "bin" / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    run(*pip, "torch", cwd=tmp_path)
    run(*pip, wheel, cwd=tmp_path)
    assert "quickstart" in run(home / "bin" / "ds-distill", "recipes", cwd=tmp_path)
    run(home / "bin" / "pip", "check", cwd=tmp_path)
    code = "import deepspeed, ds_distill.run.execute, ds_kernels"
    run(home / "bin" / "python", "-c", code, cwd=tmp_path, DS_ACCELERATOR="cpu")
