from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_hosts.network import TwoHosts, two_hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Two hosts with ssh, on one machine; skips where that is not allowed."""
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made
