"""`ds-distill`: what is done with students and finished runs, one thin function each."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.loading import go_offline, quiet_libraries, text_output
from ds_distill.cli.options import Given, SplitOption, TaskOption, command
from ds_distill.errors import UserError
from ds_distill.files import why_unwritable
from ds_distill.process.terminal import say


@command("ds-distill status runs/my-run")
def status(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
) -> None:
    """What came of a run, and what to do next.

    Exit codes: 0 it is finished; 3 it runs; 75 it can go on; 2 or 1 it has failed, as its own.
    """
    from ds_distill.run.folder import RunFolder

    code, text = RunFolder(folder).status()
    say(text)
    raise typer.Exit(code)


@command(
    "ds-distill evaluate runs/mine my.yaml --split test; "
    "ds-distill evaluate google-bert/bert-base-uncased my.yaml --task sentiment"
)
def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A folder that transformers loads, a run's (its student), or a hub id."
        ),
    ],
    given: Given,
    task: TaskOption = None,
    split: SplitOption = "test",
    output: Annotated[
        Path | None,
        typer.Option(
            help="A new folder for results.json, report.html and what `report` compares.",
            show_default="nothing is kept",
        ),
    ] = None,
) -> None:
    """Evaluate any checkpoint on a recipe's task, as runs evaluate their models.

    The checkpoint needs a head of the task, trained on its labels. Nothing is trained.
    """
    if output is not None and output.exists():
        raise UserError(f"--output {output}: exists already. Name a new folder.")
    if output is not None and (why := why_unwritable(output)) is not None:
        raise UserError(f"--output {output}: {why}. Name another folder.")
    loaded = given.load([checkpoint])
    quiet_libraries()
    from ds_distill.run.any_checkpoint import evaluation_recipe
    from ds_distill.run.folder import student_folder

    model = str(student_folder(checkpoint) or checkpoint)
    recipe = evaluation_recipe(loaded, task, model, split)
    with tempfile.TemporaryDirectory(prefix="ds-distill-") as temporary:
        from ds_distill.files import read_json
        from ds_distill.reporting.result_tables import evaluation_tables
        from ds_distill.run.execute import execute  # imports deepspeed: seconds

        folder = output or Path(temporary) / "run"
        execute(recipe, folder)
        [record] = read_json(folder / "results.json")["phases"]
    for table in evaluation_tables(record):
        say(f"\n{table.text()}")
    if output is not None:
        say(f"\nReport   {output / 'report.html'}\nResults  {output / 'results.json'}")


LossOption = Annotated[
    float,
    typer.Option(
        min=0,
        help="Points of the task's metric that int8 may lose (of a loss: per cent of it). "
        "Where it loses more beyond chance, nothing is written.",
    ),
]


@command("ds-distill export runs/mine --onnx --int8")
def export(
    student: Annotated[
        Path,
        typer.Argument(help="A finished run's folder, whose student is meant; or a model's."),
    ],
    split: SplitOption = "validation",
    recipe: Annotated[
        str | None, typer.Option(help="Whose task's data judge, where STUDENT is no run.")
    ] = None,
    task: TaskOption = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="The format: ONNX, for onnxruntime and others.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Write a second file, with weights in int8.")
    ] = False,
    max_loss: LossOption = 1.0,
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
    run, model = _run_and_model(student, recipe)
    loaded = Given(recipe or f"{run}/recipe.yaml").load([str(model)])
    quiet_libraries()
    from ds_distill.export.onnx_model import check_installed

    check_installed()
    from ds_distill.export.student import RECORD, export_student, export_table
    from ds_distill.records import read_results

    if task is None and run is not None and recipe is None:
        task = read_results(run / "results.json")["task"]
    target = output or model / "onnx"
    found = export_student(
        model,
        target,
        loaded,
        task,
        split=split,
        int8=int8,
        max_loss=max_loss,
        progress=partial(say, error=True),
    )
    say("\n" + export_table(found).text())
    say(f"\nFiles    {target}\nFigures  {target / RECORD}")


def _run_and_model(student: Path, recipe: str | None) -> tuple[Path | None, Path]:
    """The student's run, None where it is of none; its model's folder."""
    from ds_distill.run.folder import run_of, student_folder

    run = run_of(student)
    if run is None and recipe is None:
        raise UserError(
            f"{student}: is no run's folder, so nothing says on which data to compare the files. "
            "Name a recipe with the model's task: --recipe FILE."
        )
    return run, (student_folder(run) if run is not None else None) or student


@command("ds-distill push runs/mine me/tickets-student --dry-run")
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="NAME/MODEL on the hub.")],
    public: Annotated[
        bool, typer.Option("--public", help="A new repository is for all to see.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files, and push nothing.")
    ] = False,
) -> None:
    """Push a finished run to the hub: student, card, exported files, results.

    The repository is made where it is not there, private unless --public. The token is that of
    `hf auth login` or HF_TOKEN; it is written nowhere. Texts of examples stay here.
    """
    from ds_distill.export import hub

    hub.check_name(repo)
    uploads = hub.uploads_of(run)
    for one in uploads:
        say(f"{one.upload_info.size / 1e6:10.3f} MB  {one.path_in_repo}")
    if dry_run:
        say(f"Nothing was pushed. Without --dry-run these go to {repo}.")
        return
    url = hub.push(uploads, repo, public=public, message=f"ds-distill push {run.resolve().name}")
    say(f"Pushed to {url}")


@command("ds-distill report runs/first runs/second --output both.html")
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of finished runs, or of `evaluate`."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The page to write; the numbers go to a .json beside it.",
            show_default="comparison.html; of one run its report.html",
        ),
    ] = None,
) -> None:
    """Set finished runs side by side, on the terminal and on a page.

    Models that judged the same examples stand in one table, with the paired interval of their
    difference to the first run's student; other tasks and splits in tables of their own. Of one
    run it writes report.html anew; of one that has not finished it says where the run stopped.
    """
    from ds_distill.files import write_json, write_text
    from ds_distill.recipe import load_recipe
    from ds_distill.records import read_results
    from ds_distill.reporting.page import page
    from ds_distill.run.folder import SWEEP, RunFolder
    from ds_distill.run.publish import report_stopped, write_report
    from ds_distill.sweep.side_by_side import side_by_side, side_table
    from ds_distill.tables import Table

    for run in runs:
        if (run / SWEEP).is_file():
            _say_sweep(run, alone=len(runs) == 1)
            return
    first = RunFolder(runs[0])
    if len(runs) == 1 and first.holds_run() and (output is None or not first.results.is_file()):
        recipe = load_recipe(runs[0] / "recipe.yaml")
        if first.results.is_file():
            write_report(recipe, first, read_results(first.results))
        else:
            report_stopped(recipe, first, "It has not finished.")
            say(first.how_to_finish())
        say(f"Report   {first.report}")
        return
    output = output or Path("comparison.html")
    if output.suffix != ".html":
        raise UserError(f"--output {output}: name a file that ends in .html.")
    groups = side_by_side(runs)
    tables = [*map(side_table, groups)]
    say("\n\n".join(map(Table.text, tables)))
    write_json(output.with_suffix(".json"), groups)
    sentences = (
        []
        if len(tables) == 1
        else ["The runs were judged on different examples, tasks or metrics: a table for each."]
    )
    write_text(output, page("Runs side by side", sentences, tables).html())
    say(f"\nReport   {output}\nResults  {output.with_suffix('.json')}")


def _say_sweep(folder: Path, *, alone: bool) -> None:
    """Where a sweep's own page is. Raises UserError where there is none, or other runs are asked
    for."""
    page = folder / "report.html"
    if not alone:
        raise UserError(f"{folder}: holds a sweep. Name its runs: {folder / 'runs'}/...")
    if not page.is_file():
        raise UserError(
            f"{folder}: holds a sweep that has no report yet. Finish it with the sweep's command "
            f"and --resume, or name runs that have ended: {folder / 'runs'}/..."
        )
    say(f"{folder} holds a sweep, which has a page of its own.")
    say(f"\nReport   {page}\nResults  {folder / 'results.json'}")


@command("ds-distill predict runs/quickstart texts.txt > predictions.jsonl")
def predict(
    model: Annotated[
        str, typer.Argument(metavar="STUDENT", help="A run's folder, a model's, or a hub id.")
    ],
    file: Annotated[
        Path,
        typer.Argument(
            help="jsonl, csv, tsv, parquet, conll or txt, plain or gzip; - is standard input: an "
            "object of JSON or a text on each line."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="standard output")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Column of the text, or of the question.",
            show_default="text, tokens, question or text_a",
        ),
    ] = None,
    text_b: Annotated[
        str | None, typer.Option(help="Column of the second text of a pair, or of the context.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per forward pass.")] = 32,
) -> None:
    """Label the texts of a file, or answer its questions: a line of JSON each, the row with its
    prediction."""
    if output is not None and output.is_file() and file.is_file() and output.samefile(file):
        raise UserError(f"--output {output}: is the file of the texts. Name another one.")
    go_offline([model])
    with text_output(output) as target:
        quiet_libraries()
        from ds_distill.predictors.file import predict_file

        predict_file(
            model,
            file,
            target,
            text=text,
            text_b=text_b,
            batch_size=batch_size,
            progress=partial(say, error=True),
        )
