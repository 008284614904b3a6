from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from processes import marked
from two_hosts.launches import METACHARACTERS, Run
from two_hosts.network import TwoHosts, two_hosts

from ds_distill.files import write_json
from ds_distill.run.inputs import describe_environment

RESULTS = Path(__file__).parents[1] / "results" / "two-hosts.json"
"""Written with DS_DISTILL_WRITE_RESULTS=1: where the tests may not make namespaces, CI among such
places, it tells what came of them."""


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Two hosts with ssh, on one machine; skips where that is not allowed."""
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def environment(command_environment: dict[str, str]) -> dict[str, str]:
    """What is started with it is found by `left_of`."""
    return {**command_environment, **marked()}


@pytest.fixture
def whole(hosts: TwoHosts, toy_recipe: Path, environment: dict[str, str], tmp_path: Path) -> Path:
    """The run of two ranks on one host."""
    Run(hosts, tmp_path / "whole", environment, "--num-gpus", "2").end(0)
    described = yaml.safe_load((tmp_path / "whole" / "recipe.yaml").read_text())["description"]
    assert described == METACHARACTERS
    return tmp_path / "whole"


_outcomes: dict[str, dict[str, object]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    here = report.nodeid.startswith("tests/two_hosts/")
    if here and (report.when == "call" or report.outcome == "failed"):
        seconds = round(report.duration, 1)
        name = report.nodeid.removeprefix("tests/two_hosts/")
        _outcomes[name] = {"outcome": report.outcome, "seconds": seconds}


def pytest_sessionfinish() -> None:
    if os.environ.get("DS_DISTILL_WRITE_RESULTS") == "1" and _outcomes:
        command = 'DS_DISTILL_WRITE_RESULTS=1 pytest tests/two_hosts -m "slow or not slow"'
        environment = describe_environment(1, "cpu")
        write_json(RESULTS, {"command": command, "tests": _outcomes, **environment})
