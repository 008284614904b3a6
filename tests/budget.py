"""What the tests may cost, in counts: those of a busy machine are those of a quiet one.

    DS_DISTILL_COUNTS_TO=counts.json make test     what a run counted, in all its processes
    python tests/budget.py counts.json             that in weights, beside real processor seconds
    python tests/budget.py counts.json --write     each file's line in tests/budget.json

tests/budget.json has a line of counts for each file of a tier, the weight of each kind in ms of a
quiet core, and the most that a tier may weigh. A whole run of a tier fails where a file is above
its line or without one, where the tier has lines, or the tier above its most; a run of some files
tells it. A file's `slack`
is what may come on top of its line, and why. What session fixtures count has lines of its own: they
are made by whichever test comes first. A whole `make test` fails, too, where no test used some part
of ds_distill: not where none speaks of it.
"""

from __future__ import annotations

import argparse
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
import pytest

BUDGET = Path(__file__).with_name("budget.json")
TO = "DS_DISTILL_COUNTS_TO"
FOLDER = pytest.StashKey[Path]()
LINES = pytest.StashKey[Path]()
SAID = pytest.StashKey[list[str]]()
SECONDS = "processor_seconds"
"""Beside the kinds, and compared with nothing."""

Files = dict[str, Counter[str]]


TIERS = {"ci": "test-ci", "series": "test-slow", "two_hosts": "test-slow"}
"""Folder of tests -> the target of the Makefile that runs it."""


def tier(item: pytest.Item) -> str:
    folders = item.nodeid.partition("::")[0].split("/")
    return next((TIERS[name] for name in folders if name in TIERS), "test")


class Counting:
    """A plugin of pytest, in the process that runs tests."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        counted.switch(f"{tier(item)}\t{item.nodeid.partition('::')[0]}")
        counted.note("#cases")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        with counted.aside(fixturedef.argname):
            return (yield)

    def pytest_sessionfinish(self) -> None:
        counted.switch("\tend")


class Judging:
    """A plugin of pytest, in the process that the tests' processes report to."""

    @pytest.hookimpl(optionalhook=True)  # where xdist is
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["counts"] = str(node.config.stash[FOLDER])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        config = session.config
        counts = read(sorted(config.stash[FOLDER].glob("*.log")))
        if to := os.environ.get(TO):
            Path(to).write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
        if exitstatus != 0:
            return  # a test that fails is run in other ways
        of_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        whole = (of_all or config.args == ["tests/ci"]) and not config.getoption("keyword")
        budget = json.loads(config.stash[LINES].read_text(encoding="utf-8"))
        config.stash[SAID] = mistakes(counts["tiers"], budget)
        for name, why in budget.get("uses_all", {}).items() if whole else ():
            parts = unused(counts["used"].get(name, [])) if name in counts["tiers"] else []
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
        config.pluginmanager.register(Counting())


def read(logs: list[Path]) -> dict[str, Any]:
    """Counts by tier and file, and the parts that a tier used."""
    tiers: dict[str, Files] = {}
    used: dict[str, set[str]] = {}
    for log in logs:
        its: dict[tuple[str, str], Counter[str]] = {}
        now = ("", "collection")
        for line in log.read_text(encoding="utf-8").splitlines():
            mark, said = line[0], line[1:]
            if mark == "=":
                now = tuple(said.split("\t"))  # type: ignore[assignment]
            elif mark == "@":
                used.setdefault(now[0], set()).add(said)
            else:
                kind, count = (SECONDS, float(said)) if mark == "+" else (said, 1)
                its.setdefault(now, Counter())[kind] += count  # type: ignore[assignment]
        for (name, file), counts in its.items():
            known = tiers.setdefault(name, {}).setdefault(file, Counter())
            # Each worker makes a session's fixture anew: how many do is no property of the tests.
            known.update(counts - known if file.startswith("fixture ") else counts)
    return {
        "tiers": {
            name: {file: shown(files[file]) for file in sorted(files)}
            for name, files in sorted(tiers.items())
        },
        "used": {name: sorted(parts) for name, parts in sorted(used.items())},
    }


def shown(counts: Counter[str]) -> dict[str, Any]:
    return {kind: round(count, 1) for kind, count in sorted(counts.items())}


def weight(counts: dict[str, Any], weights: dict[str, float]) -> float:
    """In ms of a quiet core."""
    return sum(count * weights[kind] for kind, count in counts.items() if kind in weights)


def mistakes(tiers: dict[str, Any], budget: dict[str, Any]) -> list[str]:
    """Where counts are above the budget, in words."""
    found = []
    for name, most in budget["most_ms"].items():
        files, lines = tiers.get(name, {}), budget["tiers"].get(name)
        for file, counts in files.items() if lines is not None else ():
            counts = {kind: counts[kind] for kind in counts if kind in budget["weights_ms"]}
            if file not in lines and counts:
                line = json.dumps(counts, sort_keys=True)
                found.append(f'make {name}: {file} has no line. Add: "{file}": {line}')
                continue
            slack = budget["slack"].get(file, {})
            for kind, count in counts.items():
                may = lines[file].get(kind, 0) + slack.get(kind, 0)
                if count > may:
                    found.append(
                        f"make {name}: {file} has {count} {kind}, {may} are its line. Make them "
                        "fewer, or raise the line and say why."
                    )
        sum_ms = sum(weight(counts, budget["weights_ms"]) for counts in files.values())
        if sum_ms > most:
            found.append(f"make {name} weighs {sum_ms:,.0f} ms, {most:,} are the most.")
    return found


def unused(used: list[str]) -> list[str]:
    """The parts, commands and ZeRO stages of ds_distill that are not among those used: `make test`
    holds an example of everything."""
    from ds_distill.cli import app
    from ds_distill.recipe.codecs import CODECS
    from ds_distill.recipe.metrics import METRICS
    from ds_distill.recipe.phases import PHASES
    from ds_distill.recipe.policies import POLICIES
    from ds_distill.recipe.sources import SOURCES
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
    return sorted(every - set(used))


def report(tiers: dict[str, Any], weights: dict[str, float]) -> Iterator[str]:
    """What the weights explain of real processor seconds. Nothing depends on it."""
    import numpy as np
    from scipy.optimize import nnls

    for name, files in tiers.items():
        sums: Counter[str] = Counter()
        for counts in files.values():
            sums.update(counts)
        yield f"{name or 'outside of tests'}: {sums[SECONDS]:.0f} processor seconds"
        if not name:
            continue
        for kind, each in weights.items():
            yield f"  {sums[kind]:8,} {kind:20} at {each:5} ms: {sums[kind] * each / 1000:6.0f} s"
        pairs = {
            file: (weight(counts, weights) / 1000, counts.get(SECONDS, 0.0))
            for file, counts in files.items()
        }
        table = np.array([[counts.get(kind, 0) for kind in weights] for counts in files.values()])
        fitted, _ = nnls(table, np.array([counts.get(SECONDS, 0.0) for counts in files.values()]))
        best = {kind: round(each * 1000, 1) for kind, each in zip(weights, fitted, strict=True)}
        yield f"  weights that fit these seconds best: {json.dumps(best)}"
        both = sum(min(pair) for pair in pairs.values())
        yield f"  explained, file by file: {both / max(sums[SECONDS], 1e-9):.0%}"
        furthest = sorted(pairs, key=lambda file: -abs(pairs[file][0] - pairs[file][1]))
        for file in furthest[:15]:
            yield f"    {file}: {pairs[file][0]:.1f} s by weight, {pairs[file][1]:.1f} measured"


def written(budget: dict[str, Any], tiers: dict[str, Any]) -> str:
    """budget.json with the lines of the tiers that a run was of; a file is a line."""
    for name in set(tiers) & set(budget["most_ms"]):
        budget["tiers"][name] = {
            file: {kind: counts[kind] for kind in budget["weights_ms"] if kind in counts}
            for file, counts in tiers[name].items()
        }
    parts = []
    for key, value in budget.items():
        if key == "tiers":
            value = {
                name: "{\n"
                + ",\n".join(f'   "{file}": {json.dumps(of)}' for file, of in files.items() if of)
                + "\n  }"
                for name, files in value.items()
            }
            text = ",\n".join(f'  "{name}": {files}' for name, files in value.items())
        else:
            text = ",\n".join(f'  "{name}": {json.dumps(of)}' for name, of in value.items())
        parts.append(f' "{key}": {{\n{text}\n }}' if text else f' "{key}": {{}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("counts", type=Path, help=f"what {TO} named")
    parser.add_argument("--write", action="store_true", help="write tests/budget.json")
    arguments = parser.parse_args()
    tiers = json.loads(arguments.counts.read_text(encoding="utf-8"))["tiers"]
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    if arguments.write:
        BUDGET.write_text(written(budget, tiers), encoding="utf-8")
    print("\n".join(report(tiers, budget["weights_ms"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
