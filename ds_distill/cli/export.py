"""`ds-distill export`: a student as a file that serves without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_distill.cli.loading import load, quiet_libraries
from ds_distill.errors import UserError
from ds_distill.process.terminal import say

if TYPE_CHECKING:
    from ds_distill.recipe import Recipe


@dataclass(frozen=True)
class JudgedOn:
    """The examples that files are compared on."""

    split: Annotated[str, typer.Option(help="The split that judges.")] = "validation"
    recipe: Annotated[
        str | None,
        typer.Option(help="Whose task's data judge, where STUDENT is no run."),
    ] = None
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which task, where the recipe has several.")
    ] = None


def export(
    student: Annotated[
        Path,
        typer.Argument(help="A finished run's folder, whose student is meant; or a model's."),
    ],
    judged_on: JudgedOn,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="The format: ONNX, for onnxruntime and others.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Write a second file, with weights in int8.")
    ] = False,
    max_loss: Annotated[
        float,
        typer.Option(
            min=0,
            help="Points of the task's metric that int8 may lose (of a loss: per cent of it). "
            "Where it loses more beyond chance, nothing is written.",
        ),
    ] = 1.0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The folder to write; an earlier export there is replaced.",
            show_default="onnx/ in the model's folder",
        ),
    ] = None,
) -> None:
    """Export a student to ONNX, and compare it with PyTorch's on real examples.

    The folder has model.onnx (fp32, batch and length free), with --int8 model_int8.onnx, the
    tokenizer, the configuration, a card with the comparison, and export.json. An fp32 file
    whose logits are not PyTorch's, or an int8 file that loses too much, is not written.
    """
    if not onnx:
        raise UserError("export: name the format, --onnx.")
    run, model, recipe = _read(student, judged_on)
    quiet_libraries()
    from ds_distill.export.onnx_model import check_installed

    check_installed()
    from ds_distill.export.student import RECORD, export_student
    from ds_distill.reporting.export_table import export_table

    target = output or model / "onnx"
    found = export_student(
        model,
        target,
        recipe,
        judged_on.task,
        run=run if judged_on.recipe is None else None,
        split=judged_on.split,
        int8=int8,
        max_loss=max_loss,
        progress=partial(say, error=True),
    )
    say("\n" + export_table(found).text())
    say(f"\nFiles    {target}\nFigures  {target / RECORD}")


def _read(student: Path, judged_on: JudgedOn) -> tuple[Path | None, Path, Recipe]:
    """(the student's run, None where it is of none; its model's folder; the recipe that judges)."""
    from ds_distill.run.folder import run_of, student_folder

    run = run_of(student)
    if run is None and judged_on.recipe is None:
        raise UserError(
            f"{student}: is no run's folder, so nothing says on which data to compare the files. "
            "Name a recipe with the model's task: --recipe FILE."
        )
    model = (student_folder(run) if run is not None else None) or student
    recipe = load(judged_on.recipe or f"{run}/recipe.yaml", [], False, [str(model)])
    return run, model, recipe
