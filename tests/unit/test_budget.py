"""What tests count belongs to their file, in any order and on any number of workers."""

import json
import sys
from operator import attrgetter
from pathlib import Path

import budget
import counted
import pytest
from processes import ended

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
COUNTS = {
    "test": {
        "fixture of_all": {"starts": 1},
        "test_first.py": {"cases": 2, "starts": 3, "starts_with_torch": 2, "forks": 1},
        "test_second.py": {"cases": 2, "starts": 1, "forks": 1, "hypothesis_examples": 7},
    },
    "test-ci": {"ci/test_later.py": {"cases": 1, "starts": 1}},
}
WEIGHTS = {"cases": 24, "starts": 110, "starts_with_torch": 4200, "forks": 25}
BUDGET = {"weights_ms": WEIGHTS, "most_ms": {"test": 100_000, "test-ci": 100_000}}
TIGHT = {**BUDGET, "most_ms": {"test": 9_000, "test-ci": 100_000}}
ALL = "test_first.py test_second.py ci"


@pytest.mark.parametrize(
    ("paths", "options", "given", "code", "said"),
    [
        (ALL, ["-n", "2", "--dist", "loadfile"], BUDGET, 0, ""),
        ("ci test_second.py test_first.py", ["-n", "0"], TIGHT, 1, "make test weighs 9,"),
        # Told, not failed: no whole run.
        ("none", ["-n", "0", "test_second.py", "test_first.py", "ci"], TIGHT, 0, "weighs 9,"),
        (
            *(ALL, ["-n", "0"], {**BUDGET, "uses_all": {"test": "Why."}}, 1),
            "make test: no test uses Term kl. Why.",
        ),
    ],
    ids=["two workers", "other order, above", "some files", "parts unused"],
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
    options = ["-q", "-p", "no:cacheprovider", *options]
    done = ended(sys.executable, "-I", "-c", program, *options, cwd=tmp_path, code=code)
    assert said in done.stdout and bool(said) == ("above tests/budget.json" in done.stdout)
    counts = json.loads((tmp_path / "counts.json").read_text())
    for files in map(counts.get, COUNTS):
        timed = {file for file, of in files.items() if of.pop(budget.SECONDS, 0) > 0}
        assert timed == {file for file in files if not file.startswith("fixture ")}
    assert {tier: counts[tier] for tier in COUNTS} == COUNTS


@pytest.mark.parametrize("name", counted.KINDS)
def test_this_run_counts(name):
    assert counted.is_on()
    module = pytest.importorskip(name)
    for path in counted.KINDS[name]:
        assert hasattr(attrgetter(path)(module), "__wrapped__"), path
