"""`ds-distill init`: a first recipe from data and teachers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.loading import go_offline, import_without_torch, quiet_libraries
from ds_distill.errors import UserError
from ds_distill.process.terminal import say


def init(
    data: Annotated[
        Path,
        typer.Argument(help="A folder with a file per split, or one file: as task.data.path."),
    ],
    teacher: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR", help="A teacher's folder or hub id; may be given several times."
        ),
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(
            help="The student's folder or hub id.",
            show_default="some of the first teacher's layers",
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="task.type.", show_default="guessed from the columns")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="The text's column; twice for pairs."),
    ] = None,
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="The labels' column.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="The recipe to write.", show_default="DATA's name.yaml")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a first recipe for your data and teachers, with a comment on each guess.

    What the columns are is guessed from their names and content, the labels and their order come
    from teachers and data, the length from the texts. What cannot be told is asked on a terminal;
    elsewhere the message says which option decides. Nothing is trained.
    """
    target = output or Path(f"{data.resolve().name.split('.')[0]}.yaml")
    if target.exists() and not force:
        raise UserError(f"{target}: is there already. Name another file with --output, or --force.")
    if not data.exists():
        raise UserError(f"{data}: no such file or folder.")
    go_offline([*(teacher or []), *([student] if student else [])], [], None)
    import_without_torch()
    quiet_libraries()
    from ds_distill.files import write_text
    from ds_distill.init.guess import DataOptions, guess
    from ds_distill.init.recipe import recipe_text
    from ds_distill.recipe.tasks import TASKS

    if task is not None and task not in TASKS:
        raise UserError(f"--task {task}: choose one of {', '.join(TASKS)}.")
    found = guess(data, DataOptions(task, text or (), label), _choose)
    for sentence in found.notes:
        say(sentence)
    made = recipe_text(found, str(data), teacher or [], student)
    write_text(target, made)
    say(f"\n{made}\nWritten to {target}. Next:")
    for command in ("check", "plan", "run"):
        say(f"  ds-distill {command} {target}")


def _choose(what: str, options: Sequence[str], flag: str) -> str:
    if len(options) == 1:
        return options[0]
    if not sys.stdin.isatty():
        raise UserError(f"{what} It may be {', '.join(options)}. Say which: {flag} COLUMN.")
    for number, option in enumerate(options, 1):
        say(f"  {number}  {option}")
    number = typer.prompt(what, type=int, default=1)
    return options[min(max(number, 1), len(options)) - 1]
