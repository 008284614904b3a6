"""`ds-distill init`: a first recipe from data and teachers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.loading import go_offline, import_without_torch, quiet_libraries
from ds_distill.errors import UserError
from ds_distill.init import DEFAULT_TEACHER
from ds_distill.process.terminal import say


@dataclass(frozen=True)
class AboutData:
    """What the data are, where it is not to be guessed."""

    task: Annotated[
        str | None, typer.Option(help="task.type.", show_default="guessed from the columns")
    ] = None
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="The text's column; twice for pairs."),
    ] = None
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="The labels' column.")] = None


def init(
    data: Annotated[
        Path,
        typer.Argument(help="A folder with a file per split, or one file: as task.data.path."),
    ],
    about: AboutData,
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
    output: Annotated[
        Path | None, typer.Option(help="The recipe to write.", show_default="DATA's name.yaml")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a first recipe for your data and teachers, with a comment on each guess.

    The columns are guessed from their names and labels, the labels come from teachers and data, the
    length from the texts. Where it cannot be told, a message says which option decides.
    """
    target = output or Path(f"{data.resolve().name.split('.')[0]}.yaml")
    if target.exists() and not force:
        raise UserError(f"{target}: is there already. Name another file with --output, or --force.")
    if not data.exists():
        raise UserError(f"{data}: no such file or folder.")
    teachers = teacher or [DEFAULT_TEACHER]
    go_offline([*teachers, *([student] if student else [])])
    import_without_torch()
    quiet_libraries()
    from ds_distill.files import write_text
    from ds_distill.init.guess import DataOptions, guess
    from ds_distill.init.recipe import recipe_text
    from ds_distill.recipe.tasks import TASKS

    if about.task is not None and about.task not in TASKS:
        raise UserError(f"--task {about.task}: choose one of {', '.join(TASKS)}.")
    found = guess(data, DataOptions(about.task, about.text or (), about.label))
    for sentence in found.notes:
        say(sentence)
    made = recipe_text(found, str(data), teacher or [], student)
    write_text(target, made)
    say(f"\n{made}\nWritten to {target}.")
    if not teacher:
        say(
            f"No --teacher was named: {DEFAULT_TEACHER} is fine-tuned first, 355 million "
            "parameters. Without a GPU that takes days: name a small one there, such as "
            "--teacher google/bert_uncased_L-4_H-256_A-4."
        )
    say("Next:")
    for command in ("check", "plan", "run"):
        say(f"  ds-distill {command} {target}")
