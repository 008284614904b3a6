"""A file of figures that is whole after each part, and that a later call goes on with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ds_distill.files import read_json, write_json

_SETTINGS = ("settings", "dtype", "texts", "length_quantiles", "layers", "rounds", "spread")


def begin(path: Path | None, head: dict[str, Any], resume: bool) -> dict[str, Any]:
    """What a file is to hold before the first part: `head`, or with resume what is there.

    head: `environment`, and the settings that all parts share.

    Ends the process with exit code 2 where the file has other settings or is of another machine:
    such figures do not belong into one file.
    """
    if path is None or not resume or not path.is_file():
        return dict(head)
    there: dict[str, Any] = read_json(path)
    wanted, found = _compared(head), _compared(there)
    for key, value in wanted.items():
        if found.get(key) != value:
            print(
                f"--resume: {path} has {key}={found.get(key)!r}, and this call {value!r}. Give "
                "another --output, or leave --resume out to begin anew.",
                file=sys.stderr,
            )
            sys.exit(2)
    return there


def write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, figures)


def _compared(figures: dict[str, Any]) -> dict[str, Any]:
    environment = figures["environment"]
    names = ["packages", "python", "gpus", "device"]
    if not environment["gpus"]:
        names.append("processor")
    settings = {key: figures[key] for key in _SETTINGS if key in figures}
    return {key: environment[key] for key in names} | settings
