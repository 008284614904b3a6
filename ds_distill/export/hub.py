"""A finished run on the Hugging Face hub: the student with its card, results and report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from ds_distill.errors import UserError, first_line
from ds_distill.files import read_json
from ds_distill.run.folder import RunFolder, student_folder

_LEFT_OUT = ("training.json",)
"""Of the student's folder: what resumes a run."""
_OF_EXAMPLES = "texts"
"""In records of results.json: real texts, which may be private."""


def uploads_of(folder: Path) -> list[CommitOperationAdd]:
    """What of a finished run goes to the hub: the student's folder as it is, with exported files,
    and results.json without texts of examples. The report stays: it may show some.

    Raises UserError for a run that has not finished, or has no student.
    """
    run = RunFolder(folder)
    if not run.holds_run():
        raise UserError(f"{folder}: is no run's folder.")
    run.check_finished()
    student = student_folder(folder)
    assert student is not None
    files = sorted(path for path in student.rglob("*") if path.is_file())
    found = [
        CommitOperationAdd(str(path.relative_to(student)), path)
        for path in files
        if path.name not in _LEFT_OUT and path.name[0] != "."
    ]
    results = json.dumps(_without_texts(read_json(run.results)), indent=2, ensure_ascii=False)
    return [*found, CommitOperationAdd("results.json", results.encode())]


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_texts(one) for key, one in value.items() if key != _OF_EXAMPLES}
    return [_without_texts(one) for one in value] if isinstance(value, list) else value


def check_name(repo: str) -> None:
    """Raises UserError where `repo` is no name of a repository."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{repo}: {first_line(error)}") from error


def check_access(repo: str) -> None:
    """Raises UserError, before hours of work, where `repo` is no name of a repository, or the hub
    does not know who pushes."""
    check_name(repo)
    if get_token() is None:
        raise UserError(
            "the hub's token is not there. Log in once with `hf auth login`, or set HF_TOKEN. It "
            "is read from there, and written nowhere."
        )
    _asked(lambda: HfApi().whoami())


def push(uploads: list[CommitOperationAdd], repo: str, *, public: bool, message: str) -> str:
    """One commit with all files; returns the repository's address. Where it is not there it is
    made, private unless `public`; one that is there keeps its visibility.

    Raises UserError where the hub refuses, or cannot be reached.
    """
    check_access(repo)
    api = HfApi()
    url = _asked(lambda: api.create_repo(repo, private=not public, exist_ok=True))
    _asked(lambda: api.create_commit(url.repo_id, uploads, commit_message=message))
    return str(url)


def _asked(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except OfflineModeIsEnabled as error:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it.") from error
    except HfHubHTTPError as error:
        raise UserError(f"the hub refused: {first_line(error)}") from error
    except ValueError as error:  # an invalid card, or an answer that is no JSON
        raise UserError(f"the hub does not take it: {first_line(error)}") from error
    except Exception as error:  # of connections, by whatever library makes them
        raise UserError(f"the hub cannot be reached: {first_line(error)}") from error
