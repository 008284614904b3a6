"""The wheel: what is in it, and that it works where the checkout is not."""

import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from unit.test_packaging import (
    ROOT,
    run,
    wheel,  # noqa: F401
)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of an environment with the wheel; other packages come from the present
    one. A plain path in a .pth file does not read that path's own .pth files, so an editable
    install of this project stays out of sight."""
    home = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    [site] = (home / "lib").glob("python*/site-packages")
    (site / "present.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_installed_package_is_the_wheels(installed, tmp_path):
    code = "import ds_distill, ds_kernels; print(ds_distill.__file__, ds_kernels.__file__)"
    for file in run(installed / "python", "-c", code, cwd=tmp_path).split():
        assert Path(file).is_relative_to(installed.parent)


def test_the_installed_command_finds_the_builtin_recipes(installed, tmp_path):
    command = installed / "ds-distill"
    listed = {line.split()[0] for line in run(command, "recipes", cwd=tmp_path).splitlines()}
    assert listed == {path.stem for path in (ROOT / "ds_configs" / "recipes").glob("*.yaml")}
    printed = run(command, "recipes", "quickstart", cwd=tmp_path)
    assert printed == (ROOT / "ds_configs" / "recipes" / "quickstart.yaml").read_text()


def test_the_installed_command_checks_a_builtin_recipe(installed, toy_task, tiny_models, tmp_path):
    """`check` also reads the built-in DeepSpeed config that the recipe names."""
    model = tiny_models["toy"]
    overrides = [
        f"task={{data: {{path: '{toy_task}'}}, max_length: 32}}",
        f"teachers={{first: {{model: '{model}'}}, second: {{model: '{model}'}}}}",
        f"student={{model: '{model}', layers: [0]}}",
        "phases.teach-first.focus=null",
        "phases.teach-second.focus=null",
    ]
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = (installed / "ds-distill", "check", "quickstart", *overrides)
    assert "no mistakes found" in run(*command, cwd=tmp_path, **environment)


@pytest.mark.parametrize("place", ["checkout", "elsewhere"])
def test_the_name_kernels_stays_free(place, installed, tmp_path):
    """transformers probes for the PyPI package `kernels`; the folder of that name here must not
    pass for it."""
    code = (
        "import importlib.util; spec = importlib.util.find_spec('kernels');"
        "print(spec.origin if spec else None)"
    )
    cwd = ROOT if place == "checkout" else tmp_path
    origin = run(installed / "python", "-c", code, cwd=cwd).strip()
    assert origin == "None" or not Path(origin).is_relative_to(ROOT)
