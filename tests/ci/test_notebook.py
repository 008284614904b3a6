"""docs/first_distillation.ipynb runs from its first cell to the last; it is committed as it ran."""

import nbformat
from e2e.test_notebook import NOTEBOOK, outputs
from nbclient import NotebookClient

SMALL = """
from pathlib import Path

PER_LABEL = {"lessons": 40, "train": 40, "validation": 60, "test": 30}
EPOCHS = 1
"""


def test_the_notebook_runs(tmp_path, monkeypatch, command_environment):
    for name, value in command_environment.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, 4)
    [parameters] = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    parameters.source = SMALL
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = outputs(notebook)
    assert "iframe" in str(shown[-1].data["text/html"])
    assert (tmp_path / "runs" / "texts" / "student" / "model.safetensors").is_file()
