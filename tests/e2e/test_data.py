"""Recipes whose data come from several places, or are windows of long texts, from end to end."""

import copy
import json
from pathlib import Path

import datasets
import pytest
from runs import results, written


def examples(folder, split):
    [file] = (folder / "data" / split).glob("units-*.arrow")
    return datasets.Dataset.from_file(str(file))


@pytest.fixture
def long_texts(masked_lm_settings, tmp_path):
    """A masked-LM recipe on texts of about 150 words, of which models read 30."""
    found = copy.deepcopy(masked_lm_settings)
    source = Path(found["task"]["data"]["path"])
    (tmp_path / "texts").mkdir()
    for file in source.glob("*.txt"):
        lines = file.read_text().splitlines()
        joined = [" ".join(lines[at : at + 20]) for at in range(0, len(lines), 20)]
        (tmp_path / "texts" / file.name).write_text("\n".join(joined) + "\n")
    found["task"]["data"] = {"path": str(tmp_path / "texts")}
    found["task"]["long"] = "split"
    found["task"]["masking"]["variants"] = 1
    found["training"]["epochs"] = 1
    codec = {"name": "compact", "temperature": 2.0}
    found["phases"].insert(1, {"cache": {"splits": ["train"], "codec": codec}})
    found["phases"][2]["distil"]["teachers"] = "cached"
    return found


def test_windows_are_cached_trained_on_and_evaluated(long_texts, ds_distill, tmp_path):
    written(long_texts, tmp_path)
    ds_distill("run", "recipe.yaml", "--folder", "run", cwd=tmp_path)
    texts = (tmp_path / "texts" / "train.txt").read_text().splitlines()
    windows = examples(tmp_path / "run", "train")
    assert len(windows) > 4 * len(texts)
    assert " ".join(windows["text"][:]) == " ".join(texts), "nothing is lost"
    assert len(set(windows["group"][:])) == len(texts)
    [cache] = (one for one in results(tmp_path / "run")["phases"] if one["kind"] == "cache")
    assert str(len(windows)) in json.dumps(cache)


def test_check_reports_what_is_cut(long_texts, ds_distill, tmp_path):
    written(long_texts, tmp_path)
    split = ds_distill("check", "recipe.yaml", cwd=tmp_path)
    cut = ds_distill("check", "recipe.yaml", "task.long=cut", cwd=tmp_path)
    assert "thrown away" not in split.stdout + split.stderr
    output = " ".join((cut.stdout + cut.stderr).split())
    assert "of the tokens of split 'train' are thrown away" in output
    assert "task.max_length=32" in output and "task.long=split" in output
