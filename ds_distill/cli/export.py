"""`ds-distill export`: a student as a file that serves without PyTorch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.loading import load, quiet_libraries
from ds_distill.errors import UserError
from ds_distill.process.terminal import say


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
    run = _run_of(student)
    if run is None and judged_on.recipe is None:
        raise UserError(
            f"{student}: is no run's folder, so nothing says on which data to compare the files. "
            "Name a recipe with the model's task: --recipe FILE."
        )
    _export(student, run, judged_on, int8, max_loss, output)


def _export(
    student: Path,
    run: Path | None,
    judged_on: JudgedOn,
    int8: bool,
    max_loss: float,
    output: Path | None,
) -> None:
    """run: the student's, None of a model from elsewhere."""
    from ds_distill.files import read_json, write_json
    from ds_distill.run.folder import RunFolder

    folder = RunFolder(run or student)
    of_run = judged_on.recipe is None and folder.results.is_file()
    recipe = load(judged_on.recipe or str(folder.path / "recipe.yaml"), [], False, [str(student)])
    task = judged_on.task or (read_json(folder.results)["task"] if of_run else None)
    quiet_libraries()
    from ds_distill.export.onnx_model import check_installed
    from ds_distill.export.student import RECORD, export_student
    from ds_distill.reporting.exported import export_table
    from ds_distill.reporting.tables import table_text
    from ds_distill.run.any_checkpoint import evaluation_recipe, student_of
    from ds_distill.run.publish import write_report

    check_installed()
    model = student_of(folder.path) or student
    target = output or model / "onnx"
    if target.exists() and not (target / RECORD).is_file():
        raise UserError(f"{target}: exists, and is no export. Name another folder: --output.")
    judging = evaluation_recipe(recipe, task, str(model), judged_on.split)
    with tempfile.TemporaryDirectory(prefix="ds-distill-") as temporary:
        found = export_student(
            judging,
            model,
            target,
            split=judged_on.split,
            int8=int8,
            max_loss=max_loss,
            scratch=Path(temporary) / "run",
            progress=lambda sentence: say(sentence, error=True),
        )
    if of_run:
        results = {**read_json(folder.results), "exported": found}
        write_json(folder.results, results)
        write_report(recipe, folder, results)
    say("\n" + table_text(export_table(found)))
    say(f"\nFiles    {target}\nFigures  {target / RECORD}")


def _run_of(student: Path) -> Path | None:
    """The run whose student is meant: its folder, or student/ in it."""
    for folder in (student, student.parent):
        if (folder / "recipe.yaml").is_file() and student in (folder, folder / "student"):
            return folder
    return None
