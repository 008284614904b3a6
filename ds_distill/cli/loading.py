"""What commands share: how a recipe is loaded and run, and what they write."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit
from urllib.request import getproxies

from ds_distill.errors import UserError
from ds_distill.files import is_disk_full, kind_of_node, new_file
from ds_distill.process.failures import first_failure
from ds_distill.process.garbage_collection import without_garbage_collection
from ds_distill.process.identity import (
    get_rank,
    get_world_size,
    is_launched,
    is_rank,
    restarts,
)
from ds_distill.process.signals import Stopped, exit_on_signal, print_error
from ds_distill.process.terminal import say

if TYPE_CHECKING:
    from ds_distill.recipe import Recipe
    from ds_distill.run.folder import Resume


def go_offline(references: Iterable[str], models_folder: str | None = None) -> None:
    """Set HF_HUB_OFFLINE, and say so, where one of these models and data is of the hub and that
    cannot be reached: its own client tries for half a minute per file. To be called before
    huggingface_hub is imported, by transformers or datasets too, which read the variable then."""
    if "HF_HUB_OFFLINE" in os.environ or getproxies():
        return
    others = [one for one in references if ":" not in one and one[:1] not in (".", "/", "~")]
    if all(os.path.exists(os.path.join(models_folder or "", one)) for one in others):
        return
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((endpoint.hostname, endpoint.port or 443), timeout=5.0).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if not is_rank():
            say(
                f"Note: {endpoint.hostname} cannot be reached ({error.strerror or error}); of "
                "models and data of the hub only local copies are used.",
                error=True,
            )


def phases_until(recipe: Recipe, name: str) -> int:
    """How many phases end with the one of that name. Raises UserError where there is none."""
    names = recipe.phase_names()
    if name not in names:
        raise UserError(f"--until {name}: the recipe's phases are {', '.join(names)}.")
    return names.index(name) + 1


def execute_recipe(recipe: Recipe, path: Path, *, resume: Resume, first: int | None = None) -> None:
    """Run it, or its first phases, and say where the results are, or how to go on."""
    from ds_distill.run.folder import RunFolder

    folder = RunFolder(path)
    if restarts() and (failure := first_failure(path)) is not None and failure.is_final:
        sys.exit(failure.exit_code)  # torchrun starts all anew whatever ends a rank
    if restarts():
        resume = "auto"

    def message() -> str:
        return folder.how_to_continue(*([] if first is not None else ["--resume"]))

    has_saved = None if is_rank() else folder.progress(recipe)
    try:
        with exit_on_signal(message, has_saved=has_saved):
            with without_garbage_collection():
                from ds_distill.run.execute import execute  # imports deepspeed: seconds

            execute(recipe, path, resume=resume, first=first)
    except Stopped as error:
        if get_world_size() > 1:
            raise
        if not is_launched():
            print_error(f"{error}. {message()}")
        sys.exit(error.exit_code)
    except Exception as error:
        if isinstance(error, UserError) or not is_disk_full(error):
            raise
        file = getattr(error, "filename", None) or path
        option = "" if first is not None else " with --resume"
        raise UserError(
            f"no space left on the disk while writing {file}. Finished work is saved: free "
            f"some space, then run the same command{option}."
        ) from error
    if get_rank() == 0 and first is None:
        say(f"\nReport   {path / 'report.html'}")
        say(f"Results  {path / 'results.json'}")
        if folder.student.is_dir():
            say(f"Student  {path / 'student'}")


def print_reading(done: int, files: int) -> None:
    if done == 50:  # extracting docstrings for the first time takes half a minute
        say(f"Reading the docstrings of {files:,} files, once ...", error=True)


def import_without_torch() -> None:
    """Import transformers and datasets as if torch were not installed: they read configurations,
    tokenizers and data without it, in a third of the time."""
    if "torch" in sys.modules:
        return
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # about models, which need torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing torch now fails
    try:
        import datasets  # noqa: F401
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]


def quiet_libraries() -> None:
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@contextmanager
def text_output(file: Path | None) -> Iterator[TextIO]:
    """A new file, which is there once the block has ended well; standard output for None and for
    /dev/stdout, which would be emptied if it were opened again. A device, a pipe or a link is
    written into.

    Raises UserError where it cannot be opened.
    """
    if file is None or str(file) == "/dev/stdout":
        yield sys.stdout
        return
    with ExitStack() as opened:
        try:
            whole = kind_of_node(file) in (None, "a file", "a folder")
            aside = opened.enter_context(new_file(file)) if whole else file
            lines = opened.enter_context(open(aside, "w", encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"{file}: cannot be written: {error.strerror or error}. Name another file."
            ) from error
        yield lines


def write_json_output(file: Path, data: Any) -> None:
    """Write JSON to where a user says; see `text_output`."""
    with text_output(file) as lines:
        lines.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
