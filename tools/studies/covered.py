"""Which tests of `make test` run which lines of the package, in their processes and their forks.

    pip install coverage
    python tools/studies/covered.py --out covered.json

What a fixture of the session runs belongs to every test that asks for it, and what one of a file
runs to all tests of the file. `mutants.py` reads the file: a mutant is tried by the tests that run
its line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest
from mutants import copied_tree

NOW = "COVERED_NOW"
"""Environment variable: the file with the name of what a worker runs, for processes that it starts
or has started before."""
SETTINGS = """
[run]
source = {tree}/ds_distill, {tree}/kernels/ds_kernels
parallel = true
data_file = {folder}/lines
patch = fork, _exit, subprocess
disable_warnings = no-data-collected, module-not-measured, module-not-imported, couldnt-parse
"""
IN_A_WARM_FORK = """    os.setsid()
    import coverage as _coverage
    if _coverage.Coverage.current() is not None and "COVERED_NOW" in os.environ:
        with open(os.environ["COVERED_NOW"]) as _now:
            _coverage.Coverage.current().switch_context(_now.read())
"""


class Contexts:
    """A plugin of pytest: coverage's context is the test that runs, or the session's fixture."""

    def __init__(self) -> None:
        self._now = Path(f"{os.environ['COVERED_FOLDER']}/{os.getpid()}.now")
        self._now.write_text("")
        self._tests: dict[str, Any] = {}
        self._files: dict[str, float] = {}
        os.environ[NOW] = str(self._now)
        coverage.process_startup()

    def _turn_to(self, name: str) -> str:
        before = self._now.read_text()
        self._now.write_text(name)
        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(name)
        return before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[Any]:
        self._turn_to(item.nodeid)
        file = item.nodeid.partition("::")[0]
        started = sum(os.times()[:4]) - self._files.get(file, 0.0)  # with children
        try:
            return (yield)
        finally:
            seconds = round(sum(os.times()[:4]) - self._files.get(file, 0.0) - started, 3)
            self._tests[item.nodeid] = {"seconds": seconds, "fixtures": item.fixturenames}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        if fixturedef.scope == "module":
            file, started = request.node.nodeid, sum(os.times()[:4])
            before = self._turn_to(f"file {file}")
            try:
                return (yield)
            finally:
                self._turn_to(before)
                spent = sum(os.times()[:4]) - started
                self._files[file] = self._files.get(file, 0.0) + spent
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        before = self._turn_to(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._turn_to(before)

    def pytest_sessionfinish(self) -> None:
        if (current := coverage.Coverage.current()) is not None:
            current.stop()
            current.save()
        self._now.with_suffix(".tests").write_text(json.dumps([self._tests, self._files]))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of xdist: workers alone run tests
        config.pluginmanager.register(Contexts())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("tests", nargs="*", help="pytest's arguments; none: all of make test")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, tree = Path(name), copied_tree(Path(name) / "tree")
        warm = tree / "tests/warm.py"
        warm.write_text(warm.read_text().replace("    os.setsid()\n", IN_A_WARM_FORK))
        settings = folder / "coveragerc"
        settings.write_text(SETTINGS.format(tree=tree, folder=folder))
        paths = [str(tree), str(tree / "kernels"), str(tree / "tests"), str(Path(__file__).parent)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "COVERAGE_PROCESS_START": str(settings),
            "COVERED_FOLDER": name,
        }
        plugins = ["-p", "covered", "-p", "no:cacheprovider"]
        command = ["pytest", "-q", *plugins]
        workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        command = [sys.executable, "-m", *command, *workers, *given.tests]
        subprocess.run(command, cwd=tree, env=environment, check=False)
        given.out.write_text(json.dumps(gathered(folder, tree)), encoding="utf-8")


def gathered(folder: Path, tree: Path) -> dict[str, Any]:
    """Tests by number, with their seconds; those of a file's own fixtures; by file and line the
    numbers of the tests that run it."""
    tests: dict[str, Any] = {}
    files: dict[str, float] = {}
    for path in folder.glob("*.tests"):
        own, of_files = json.loads(path.read_text())
        tests |= own
        files |= of_files
    numbers = {name: number for number, name in enumerate(tests)}
    of_context: dict[str, set[int]] = {name: {number} for name, number in numbers.items()}
    for name, about in tests.items():
        of_context.setdefault(f"file {name.partition('::')[0]}", set()).add(numbers[name])
        for fixture in about["fixtures"]:
            of_context.setdefault(f"fixture {fixture}", set()).add(numbers[name])
    found = coverage.Coverage(data_file=str(folder / "lines"), config_file=False)
    found.combine([str(folder)], keep=True)
    data, lines = found.get_data(), {}
    for path in data.measured_files():
        own = {
            line: sorted(set().union(*(of_context.get(context, set()) for context in contexts)))
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        lines[str(Path(path).relative_to(tree))] = {line: own[line] for line in own if own[line]}
    seconds = [about["seconds"] for about in tests.values()]
    return {"tests": list(tests), "seconds": seconds, "files": files, "lines": lines}


if __name__ == "__main__":
    main()
