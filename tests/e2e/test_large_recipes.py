"""The recipes of large teachers on 2 ranks with stand-ins: live, and cached by one override."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_recipes import Toys

from ds_distill.recipe import dump_recipe, load_recipe


@pytest.mark.parametrize("name", ["large-teachers", "large-masked-lm"])
def test_live_and_cached_are_one_override_apart(name: str, tmp_path: Path) -> None:
    whole = load_recipe(name)
    recipe = Toys(tmp_path).recipe(whole)
    settings = yaml.safe_load(dump_recipe(recipe)) | {"deepspeed": "zero3_bf16"}
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    for teachers in ("live", "cached"):
        folder = tmp_path / teachers
        command = [sys.executable, "-m", "ds_distill", "launch", str(file), "--num-gpus", "2"]
        command += ["--folder", str(folder)]
        if teachers == "cached":
            command.append("phases.distil.teachers=cached")
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        results = json.loads((folder / "results.json").read_text())
        [cache] = [record for record in results["phases"] if "added" in record]
        assert (cache["added"] > 0) == (teachers == "cached")
        assert results["student"] == "student"
    assert load_recipe(name).phases[-2].teachers == "live"
