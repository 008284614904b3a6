"""What tests count belongs to their file, in any order and on any number of workers."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import budget
import counted
import pytest

TESTS = Path(__file__).parents[1]

# A run of pytest of its own: the tests' counting does not reach a Python with -I, nor its workers.
CONFTEST = """
import os
for name in ("PYTHONPATH", "DS_DISTILL_COUNTS"):
    os.environ.pop(name, None)

import subprocess, sys
from pathlib import Path

import budget, pytest

def pytest_configure(config):
    budget.register(config, Path("budget.json"))

@pytest.fixture(scope="session")
def of_all():
    subprocess.run([sys.executable, "-c", ""])
    subprocess.run(["true"])

@pytest.fixture(scope="module")
def of_a_file(of_all):
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
"""
FILES = {
    "test_first.py": """
import subprocess, sys
def test_one(of_all, of_a_file): pass
def test_other(of_a_file):
    below = "import torch"
    program = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {below!r}])"
    own = {"PYTHONPATH": "own", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program + "; os.kill(os.getpid(), 9)"], env=own)
    assert subprocess.run([sys.executable, "-c", "import torch"], env=own).returncode == 3
""",
    "test_second.py": """
import pytest, subprocess, sys
from hypothesis import assume, given, settings, strategies
def test_three(of_a_file, of_all): subprocess.run([sys.executable, "-c", ""])
@settings(max_examples=7, derandomize=True, database=None)
@given(strategies.integers())
def test_four(number): assume(number % 3)  # one drawn in vain is none
""",
    "ci/test_later.py": """
import subprocess, sys
def test_later(): subprocess.run([sys.executable, "-c", ""])
""",
    "own/sitecustomize.py": "import sys; sys.planted = True",
    "own/torch.py": "import sys; sys.exit(3 if sys.planted else 4)",
}
LINES = {
    "fixture of_all": {"starts": 1},
    "test_first.py": {"cases": 2, "starts": 3, "starts_with_torch": 2, "forks": 1},
    "test_second.py": {"cases": 2, "starts": 1, "forks": 1, "hypothesis_examples": 7},
}
BUDGET: dict[str, Any] = {
    "weights_ms": json.loads(budget.BUDGET.read_text())["weights_ms"],
    "most_ms": {"test": 100_000, "test-ci": 100_000},
    "slack": {},
    "tiers": {"test": LINES, "test-ci": {"ci/test_later.py": {"cases": 1, "starts": 1}}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """BUDGET with another value at a place; None: without it."""
    other = copy.deepcopy(BUDGET)
    *way, last = path.split("/")
    place = other
    for name in way:
        place = place.setdefault(name, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return other


MORE = "tiers/test/test_first.py/starts_with_torch"


@pytest.mark.parametrize(
    ("paths", "options", "given", "code", "said"),
    [
        ("test_first.py test_second.py ci", ["-n", "2", "--dist", "loadfile"], BUDGET, 0, ""),
        (
            "ci test_second.py test_first.py",
            ["-n", "0"],
            changed(MORE, 1),
            1,
            "make test: test_first.py has 2 starts_with_torch, 1 are its line",
        ),
        (
            "none",
            ["-n", "0", "test_second.py", "test_first.py", "ci"],
            changed("tiers/test/test_second.py", None),
            0,  # told, not failed: no whole run
            'make test: test_second.py has no line. Add: "test_second.py": {"cases": 2, "forks": 1',
        ),
        ("test_first.py test_second.py ci", ["-n", "0"], changed("tiers", {}), 0, ""),
        (
            "test_first.py test_second.py ci",
            ["-n", "0"],
            changed("uses_all/test", "Why."),
            1,
            "make test: no test uses Term kl. Why.",
        ),
    ],
    ids=["two workers", "other order, above", "some files", "no lines yet", "parts unused"],
)
def test_counts_are_the_same_in_any_order_and_on_any_workers(
    tmp_path, paths, options, given, code, said
):
    for name, text in {**FILES, "conftest.py": CONFTEST, "budget.json": json.dumps(given)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    ini = f"[pytest]\npythonpath = {TESTS}\ntestpaths = {paths}\n"
    (tmp_path / "pytest.ini").write_text(ini)
    program = "import os, pytest, sys; os.environ.update(DS_DISTILL_COUNTS_TO='counts.json'); "
    program += "sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-I", "-c", program, "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    assert bool(said) == ("above tests/budget.json" in done.stdout)
    counts = json.loads((tmp_path / "counts.json").read_text())["tiers"]
    for tier, lines in BUDGET["tiers"].items():
        kinds = {
            file: {kind: of[kind] for kind in of if kind != budget.SECONDS}
            for file, of in counts[tier].items()
        }
        assert {file: of for file, of in kinds.items() if of} == lines


@pytest.mark.parametrize("name", counted.KINDS)
def test_this_run_counts(name):
    assert counted.is_on()
    module = pytest.importorskip(name)
    for path in counted.KINDS[name]:
        assert hasattr(attrgetter(path)(module), "__wrapped__"), path


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (BUDGET, None),
        (changed("tiers/test/test_first.py/forks", 9), None),  # a line is the most
        (changed("tiers/test/test_first.py/forks", 0), "test_first.py has 1 forks, 0 are its line"),
        (changed("tiers/test/test_first.py/forks", None), "has 1 forks, 0 are its line"),
        (changed("tiers/test/fixture of_all", None), "fixture of_all has no line"),
        (changed("most_ms/test", 9_000), "make test weighs 9,"),
        (changed("most_ms", {"test": 9_999_999}), None),
        (changed("tiers", {}), None),
        ({**BUDGET, "tiers": {}, "most_ms": {"test": 9_000}}, "make test weighs 9,"),
    ],
)
def test_what_is_above_the_budget_is_said(given, said):
    found = budget.mistakes(BUDGET["tiers"], given)
    assert (len(found), said in found[0]) == (1, True) if said else found == [], found


def test_slack_comes_on_top_of_a_line():
    given = changed("tiers/test/test_first.py/starts", 2)
    assert len(budget.mistakes(BUDGET["tiers"], given)) == 1
    given["slack"] = {"test_first.py": {"starts": 1, "why": "A start that meets no port."}}
    assert budget.mistakes(BUDGET["tiers"], given) == []


def test_lines_are_written_for_the_tiers_of_a_run():
    """Weights, slack and the other tiers' lines stay, and a kind without a weight is no kind."""
    given = changed("slack/test_first.py", {"starts": 1, "why": "of old"})
    counts = {"test": {"test_new.py": {"cases": 3, "processor_seconds": 8.5}}, "": {"end": {}}}
    read = json.loads(budget.written(copy.deepcopy(given), counts))
    assert read == {**given, "tiers": {**given["tiers"], "test": {"test_new.py": {"cases": 3}}}}
