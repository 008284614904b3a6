"""The lower bounds of pyproject.toml are versions that the tests ran on."""

import importlib.util
import tomllib
from pathlib import Path

FILE = Path(__file__).parents[1] / "versions" / "oldest.py"
SPEC = importlib.util.spec_from_file_location("oldest", FILE)
oldest = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(oldest)


def test_the_stated_bounds_are_those_that_are_tried():
    project = tomllib.loads((oldest.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = dict(line.split(">=", 1) for line in project["dependencies"])
    assert {name: bounds[name] for name in oldest.OLDEST} == oldest.OLDEST


def test_the_tests_that_are_run_exist():
    for test in oldest.TESTS:
        file, _, name = test.partition("::")
        assert f"def {name}" in (oldest.ROOT / file).read_text(encoding="utf-8")
