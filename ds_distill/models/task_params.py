"""How a shipped student is read: settings of its task that travel in its configuration, as
`task_specific_params`. One that no run has shipped has none; what is not as it should be is left
out."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

KEY = "task_specific_params"


def _params(config: PreTrainedConfig) -> dict[str, Any]:
    """Of the configuration's only task."""
    params = getattr(config, KEY, None)
    found = next(iter(params.values()), None) if isinstance(params, dict) else None
    return found if isinstance(found, dict) else {}


def count_of(config: PreTrainedConfig, name: str, otherwise: int) -> int:
    """A number above 0."""
    value = _params(config).get(name)
    return value if isinstance(value, int) and value > 0 else otherwise


def columns_of(config: PreTrainedConfig) -> tuple[tuple[str, ...], ...]:
    """The columns of a file that hold an example's texts, the first that are there, where the
    recipe named them."""
    value = _params(config).get("columns")
    return tuple(
        tuple(names)
        for names in (value if isinstance(value, list) else [])
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    )
