"""The small forms of the built-in recipes, whole, on real data: some minutes each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_distill.recipe import builtin_recipes
from ds_distill.recipe.load import small_form

STUDIES = Path(__file__).parents[2] / "tools" / "studies"
SMALL = [name for name, path in builtin_recipes().items() if small_form(path).is_file()]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_form_runs_whole(name, ds_distill, shared_data, tmp_path):
    folder = tmp_path / "run"
    data = tmp_path / "data"  # what is not among the shared data is written there
    if name == "similarity":
        subprocess.run([sys.executable, STUDIES / "docstring_pairs.py", data], check=True)
    if name == "llm-and-encoder":
        subprocess.run([sys.executable, STUDIES / "stand_in_answers.py", data], check=True)
    if name == "clinical-notes":
        writer = STUDIES / "span_questions.py"
        subprocess.run([sys.executable, writer, shared_data, data], check=True)
    shared_data = data if data.is_dir() else shared_data
    command = ["run", name, "--small", f"data_folder={shared_data}", "--folder", folder]
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    ds_distill(*command, cwd=tmp_path, env=threads, timeout=3600)
    results = json.loads((folder / "results.json").read_text())
    judged = [r["models"] for r in results["phases"] if r["kind"] == "evaluate"]  # of some none
    assert all(results["student"] in models for models in judged[-1:])
    assert (folder / "student").is_dir()
    assert str(shared_data) not in (folder / "student" / "README.md").read_text()
