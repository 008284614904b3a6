"""Reading what somebody else has saved: a model's folder is not trusted."""

from __future__ import annotations

import os
from typing import Any

from ds_distill.errors import UserError, first_line

# Code in a model's folder is never run.
SAFE: dict[str, Any] = {"trust_remote_code": False}


class Unreachable(UserError):
    """A model whose configuration cannot be read."""

    def __init__(self, reference: str, reason: str) -> None:
        self.reference = reference
        super().__init__(
            f"its configuration cannot be read: {reason} Use a hub id that can be reached, a local "
            "folder, or pkg:PACKAGE/FOLDER.",
            at=f"model {reference!r}",
        )


def check_nodes(reference: str) -> None:
    """Raises UserError where something in a model's folder is neither a file nor a folder, such as
    a pipe, which would be waited for without end. Links are followed: the hub's cache is of
    them."""
    if not os.path.isdir(reference):
        return
    for entry in os.scandir(reference):
        if not (os.path.isfile(entry.path) or os.path.isdir(entry.path)):  # False for a loop
            what = "a link to nothing" if entry.is_symlink() else "no regular file"
            raise UserError(f"{entry.path}: is {what}. Remove it, or copy the model again.")


def unreadable(reference: str, what: str, error: BaseException) -> UserError:
    if "trust_remote_code" in str(
        error
    ):  # transformers advises it, but recipes have no such option
        return UserError(
            f"model {reference!r}: its {what} needs Python code from its own folder (`auto_map`), "
            "which is never run. Use a model type that transformers itself has."
        )
    if isinstance(error, RecursionError):
        return UserError(
            f"model {reference!r}: its {what} cannot be read: a JSON file is nested too deeply. "
            "Copy the model again."
        )
    if what == "configuration":
        return Unreachable(reference, first_line(error))
    return UserError(f"model {reference!r}: its {what} cannot be read: {first_line(error)}")
