"""docs/first_distillation.ipynb runs from its first cell to the last; it is committed as it ran."""

import re
from pathlib import Path

import nbformat

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first_distillation.ipynb"


def outputs(notebook):
    return [one for cell in notebook.cells for one in cell.get("outputs", [])]


def test_the_notebook_is_committed_with_what_it_printed():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, 4)
    nbformat.validate(notebook)
    numbers = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert numbers == [*range(1, len(numbers) + 1)], "run once, from the first cell to the last"
    assert not any(one.output_type == "error" for one in outputs(notebook))
    assert "iframe" in str(outputs(notebook)[-1].data["text/html"]), "the report is shown"
    assert not re.search(r"/(root|tmp|home|work)/", text), "no path of a machine"
