"""How many examples a property of real tokenizers draws."""

from __future__ import annotations

from typing import Any

import pytest


def draws(later: int) -> list[Any]:
    """For `parametrize`: few in `make test`, as many as `later` in `make test-all`."""
    return [12, pytest.param(later, marks=pytest.mark.further)]
