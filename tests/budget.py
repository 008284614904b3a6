"""What the tests may cost, in counts: those of a busy machine are those of a quiet one.

    DS_DISTILL_COUNTS_TO=counts.json make test     what a run counted, in all its processes
    python tests/budget.py counts.json             what its weights explain of its seconds

tests/budget.json has the weight of each kind in ms of a quiet core, and the most that a tier may
weigh. A whole run of a tier fails where it is above that; a run of some files tells it. A whole
`make test` fails, too, where no test used some part of ds_distill: not where none speaks of it.
What session fixtures count is no file's: they are made by whichever test comes first.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import counted
import numpy as np
import pytest

BUDGET = Path(__file__).with_name("budget.json")
TO = "DS_DISTILL_COUNTS_TO"
FOLDER = pytest.StashKey[Path]()
LINES = pytest.StashKey[Path]()
SAID = pytest.StashKey[list[str]]()
SECONDS = "processor_seconds"
"""Beside a file's counts. Nothing depends on them."""
Files = dict[str, Counter[str]]


TIERS = {"ci": "test-ci", "series": "test-slow", "two_hosts": "test-slow"}
"""Folder of tests -> the target of the Makefile that runs it."""


def tier(item: pytest.Item) -> str:
    folders = item.nodeid.partition("::")[0].split("/")
    return next((TIERS[name] for name in folders if name in TIERS), "test")


class Counting:
    """A plugin of pytest, in the process that runs tests."""

    def __init__(self, seconds: Path) -> None:
        self._to = seconds
        self._seconds: Counter[str] = Counter()
        self._aside = 0.0  # of fixtures of the session, which is no file's

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        name = f"{tier(item)}\t{item.nodeid.partition('::')[0]}"
        counted.switch(name)
        counted.note("#cases")
        started = processor_seconds() - self._aside
        try:
            return (yield)
        finally:
            seconds = processor_seconds() - self._aside - started
            self._seconds[name] += seconds  # type: ignore[assignment]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        started = processor_seconds()
        with counted.aside(fixturedef.argname):
            try:
                return (yield)
            finally:
                self._aside += processor_seconds() - started

    def pytest_sessionfinish(self) -> None:
        counted.switch("\tend")
        self._to.write_text(json.dumps(self._seconds), encoding="utf-8")


def processor_seconds() -> float:
    """Of this process, of the children that it has waited for, and of warm forks."""
    return sum(os.times()[:4]) + counted.seconds_of_forks


class Judging:
    """A plugin of pytest, in the process that the tests' processes report to."""

    @pytest.hookimpl(optionalhook=True)  # where xdist is
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["counts"] = str(node.config.stash[FOLDER])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        config = session.config
        tiers, used = read(sorted(config.stash[FOLDER].glob("*.log")))
        if to := os.environ.get(TO):
            for path in config.stash[FOLDER].glob("*.seconds"):
                for name, seconds in json.loads(path.read_text(encoding="utf-8")).items():
                    of_tier, _, file = name.partition("\t")
                    tiers[of_tier][file][SECONDS] += seconds
            Path(to).write_text(json.dumps(tiers, indent=1, sort_keys=True), encoding="utf-8")
        if exitstatus != 0:
            return  # a test that fails is run in other ways
        of_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        whole = (of_all or config.args == ["tests/ci"]) and not config.getoption("keyword")
        budget = json.loads(config.stash[LINES].read_text(encoding="utf-8"))
        config.stash[SAID] = mistakes(tiers, budget)
        for name, why in budget.get("uses_all", {}).items() if whole else ():
            parts = unused(used.get(name, set())) if name in tiers else []
            config.stash[SAID] += [f"make {name}: no test uses {part}. {why}" for part in parts]
        if config.stash[SAID] and whole:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if said := config.stash.get(SAID, []):
            terminalreporter.section("above tests/budget.json")
            terminalreporter.write_line("\n".join(said))

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


def register(config: pytest.Config, budget: Path = BUDGET) -> None:
    """Count in this run of pytest. One that a test starts belongs to that test."""
    given = getattr(config, "workerinput", {}).get("counts")
    if counted.is_on() or config.option.collectonly:
        return
    if given is None:
        config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="counts-"))
        config.stash[LINES] = budget
        config.pluginmanager.register(Judging())
    if given is not None or not config.getoption("numprocesses", None):
        folder = Path(given or config.stash[FOLDER])
        log = folder / f"{os.environ['PYTEST_XDIST_WORKER'] if given else 'alone'}.log"
        counted.start(str(log), str(folder / "site"))
        config.pluginmanager.register(Counting(Path(log).with_suffix(".seconds")))


def read(logs: list[Path]) -> tuple[dict[str, Files], dict[str, set[str]]]:
    """Counts by tier and file, and the parts that a tier used."""
    tiers: dict[str, Files] = {}
    used: dict[str, set[str]] = {}
    for log in logs:
        its: dict[tuple[str, ...], Counter[str]] = {}
        now: tuple[str, ...] = ("", "collection")
        for line in log.read_text(encoding="utf-8").splitlines():
            mark, said = line[0], line[1:]
            if mark == "=":
                now = tuple(said.split("\t"))
            elif mark == "@":
                used.setdefault(now[0], set()).add(said)
            else:
                its.setdefault(now, Counter())[said] += 1
        for (name, file), counts in its.items():
            known = tiers.setdefault(name, {}).setdefault(file, Counter())
            # Each worker makes a session's fixture anew: how many do is no property of the tests.
            known.update(counts - known if file.startswith("fixture ") else counts)
    return tiers, used


def mistakes(tiers: dict[str, Files], budget: dict[str, Any]) -> list[str]:
    """Where a tier is above the budget, in words."""
    found = []
    for name, most in budget["most_ms"].items():
        files = tiers.get(name, {})
        sum_ms = sum(weight(counts, budget["weights_ms"]) for counts in files.values())
        if sum_ms > most:
            heaviest = max(files, key=lambda file: weight(files[file], budget["weights_ms"]))
            found.append(
                f"make {name} weighs {sum_ms:,.0f} ms, {most:,} are the most. The heaviest is "
                f"{heaviest}: make it less, or raise the most and say why."
            )
    return found


def weight(counts: dict[str, int], weights: dict[str, float]) -> float:
    """In ms of a quiet core."""
    return sum(count * weights[kind] for kind, count in counts.items() if kind in weights)


def unused(used: set[str]) -> list[str]:
    """The parts, commands and ZeRO stages of ds_distill that are not among those used: `make test`
    holds an example of everything."""
    from ds_distill.cli import app
    from ds_distill.recipe.codecs import CODECS
    from ds_distill.recipe.data import SOURCES
    from ds_distill.recipe.metrics import METRICS
    from ds_distill.recipe.phases import PHASES
    from ds_distill.recipe.policies import POLICIES
    from ds_distill.recipe.tasks import TASKS
    from ds_distill.recipe.terms import TERMS

    commands = [*app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        commands += group.typer_instance.registered_commands
    names = {one.name or one.callback.__name__ for one in commands if one.callback is not None}
    every = {
        *(
            f"{part.kind_of_part.capitalize()} {name}"
            for table in (PHASES, TERMS, POLICIES, CODECS, SOURCES, TASKS, *METRICS.values())
            for name, part in table.items()
            if getattr(part, "runs", "") is not None  # a name for what others do
        ),
        *(f"command {name}" for name in names),
        *(f"stage {stage}" for stage in range(4)),
    }
    return sorted(every - used)


def report(counts: Path) -> None:
    """Print what the weights, and the best there could be, explain of each tier's seconds."""
    from scipy.optimize import nnls

    weights = json.loads(BUDGET.read_text(encoding="utf-8"))["weights_ms"]
    for name, files in json.loads(counts.read_text(encoding="utf-8")).items():
        files = {file: of for file, of in files.items() if SECONDS in of}
        timed = [*files.values()]
        if not name or not timed:
            continue
        seconds = np.array([of[SECONDS] for of in timed])
        kinds = np.array([[of.get(kind, 0) for kind in weights] for of in timed])
        said = kinds @ np.array([*weights.values()]) / 1000
        best, _ = nnls(kinds, seconds)
        print(f"make {name}: {seconds.sum():.0f} s of {len(timed)} files, {said.sum():.0f} weighed")
        for what, found in {"the weights": said, "the best weights": kinds @ best}.items():
            left = np.square(seconds - found).sum() / np.square(seconds - seconds.mean()).sum()
            print(f"  {what} explain {100 * (1 - left):.0f}% of the variance between files")
        print("  " + json.dumps({k: round(1000 * w) for k, w in zip(weights, best, strict=True)}))
        far = sorted(zip(files, said - seconds, seconds, strict=True), key=lambda one: one[1])
        for file, difference, took in [*far[:5], *far[-5:]]:
            print(f"  {file}: {took:.1f} s, {difference:+.1f} weighed")


if __name__ == "__main__":
    report(Path(sys.argv[1]))
