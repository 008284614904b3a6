"""What the tests cost: processor seconds, seconds and process starts of each module.

    python tests/costs.py --out tests/results/test-costs.json [what pytest is given]

Runs the tests in one process and merges what their modules took into the file; a test that took two
processor seconds or more is named. These are of this process and of all below it: a busy machine
changes them little. Half of a tier's sum is about its time on two quiet cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
DEAR = 2.0
"""Processor seconds from which on a test is named."""
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "pytest", "hypothesis")


def tier(item: pytest.Item) -> str:
    """The target of the Makefile that runs a test."""
    if item.get_closest_marker("slow"):
        return "test-slow"
    return "test-all" if item.get_closest_marker("further") else "test"


class Costs:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, Any]] = {}
        self.starts = 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: object) -> None:
        self.starts += event in STARTS

    def _now(self) -> Counter[str]:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        spent = sum(each.ru_utime + each.ru_stime for each in used)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                spent += sum(child.cpu_times()[:4])  # its own, and of what it waited for
        return Counter(
            processor_seconds=spent, seconds=time.monotonic(), process_starts=self.starts
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Set-up counts for the test that asks for it first."""
        before = self._now()
        result = yield
        spent = self._now()
        spent.subtract(before)
        name, _, test = item.nodeid.partition("::")
        module = self.modules.setdefault(name, {"tiers": {}, "dear": {}})
        costs = module["tiers"].setdefault(tier(item), Counter())
        costs.update({"tests": 1, **spent})
        if spent["processor_seconds"] >= DEAR:
            module["dear"][test] = round(spent["processor_seconds"], 1)
        return result


@functools.cache
def commit() -> str:
    described = ["git", "describe", "--always", "--exclude=*", "--dirty=+changes"]
    done = subprocess.run(described, cwd=ROOT, capture_output=True, check=True, text=True)
    return done.stdout.strip()


def merged(path: Path, modules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    known = json.loads(path.read_text())["modules"] if path.is_file() else {}
    for name, module in modules.items():
        tiers = {
            tier: {key: round(value, 1) for key, value in costs.items()}
            for tier, costs in module["tiers"].items()
        }
        before = known.get(name, {"tiers": {}, "dear": {}})
        known[name] = {
            "commit": commit(),
            "tiers": before["tiers"] | tiers,
            "dear": before["dear"] | module["dear"],
        }
    sums: dict[str, Counter[str]] = {}
    for module in known.values():
        for name, costs in module["tiers"].items():
            sums.setdefault(name, Counter()).update(costs)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "processor_cores": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "versions": {
            "python": sys.version.split()[0],
            **{library: metadata.version(library) for library in LIBRARIES},
        },
        "sums": {
            name: {key: round(value, 1) for key, value in costs.items()}
            for name, costs in sorted(sums.items())
        },
        "modules": dict(sorted(known.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a results file, merged into")
    arguments, rest = parser.parse_known_args()
    costs = Costs()
    code = pytest.main(["-n", "0", "-m", "not slow", *rest], plugins=[costs])
    text = json.dumps(merged(arguments.out, costs.modules), indent=1) + "\n"
    arguments.out.write_text(text, encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
