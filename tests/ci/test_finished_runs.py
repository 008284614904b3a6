"""What is done with finished runs: a checkpoint's score is that of the run that made it, runs are
compared example by example, students are exported and pushed."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import httpx
import pytest
import torch
from e2e.test_finished_runs import evaluated, place  # noqa: F401
from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from runs import command_line as ds_distill
from scipy.special import softmax
from transformers import AutoModelForSequenceClassification

from ds_distill.errors import UserError
from ds_distill.export import hub
from ds_distill.predictors.prediction import predict


def test_a_student_is_exported_where_int8_keeps_its_score(place, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "mine"
    shutil.copytree(place / "long", run)
    ds_distill("export", run, "--onnx", "--int8", "--split", "test")
    folder = run / "student" / "onnx"
    found = json.loads((folder / "export.json").read_text())
    score = evaluated(run)["models"]["student"]["accuracy"]
    assert found["PyTorch"]["score"] == found["files"]["model.onnx"]["score"] == score
    for name, one in found["files"].items():
        assert one["bytes"] == (folder / name).stat().st_size and one["milliseconds"] > 0
        assert one["logits"]["texts"] == found["examples"]
        low, high = one["interval"]
        assert low <= one["difference"] <= high
    assert found["files"]["model.onnx"]["logits"]["largest"] < 1e-4
    assert found["files"]["model_int8.onnx"]["logits"]["largest"] > 1e-4
    assert "| model_int8.onnx |" in (folder / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    for code in python_blocks(Path(__file__).parents[2] / "docs" / "serving.md"):
        traced = code.replace("dynamic=True", 'dynamic=True, backend="eager"')  # not made to C++
        exec(traced, {})
    monkeypatch.chdir(folder)
    names = {}
    [code] = python_blocks(folder / "README.md")
    exec(code.replace("model_int8.onnx", "model.onnx"), names)
    [answer] = predict(run, ["A text."])
    probabilities = list(softmax(names["outputs"][0][0]))
    assert probabilities == pytest.approx(list(answer["probabilities"].values()), abs=1e-5)
    with pytest.raises(UserError, match="--split tset: there is no such split"):
        ds_distill("export", run / "student", "--onnx", "--split", "tset")
    with pytest.raises(UserError, match="name the format"):
        ds_distill("export", run)
    with pytest.raises(UserError, match=r"no run's folder.*--recipe"):
        ds_distill("export", folder, "--onnx")
    with pytest.raises(UserError, match="is no export"):
        ds_distill("export", run, "--onnx", "--output", tmp_path)


def python_blocks(file):
    return re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL)


def test_an_export_in_int8_that_loses_too_much_is_not_written(place, tmp_path):
    """The student's logits get a large part that is the same for all classes: in fp32 it changes no
    answer, and in int8 it leaves no steps for the rest."""
    run = tmp_path / "long"
    shutil.copytree(place / "long", run)
    model = AutoModelForSequenceClassification.from_pretrained(run / "student")
    with torch.no_grad():
        model.bert.pooler.dense.bias[0] = 10.0  # tanh is 1
        model.bert.pooler.dense.weight[0] = 0.0
        model.classifier.weight[:, 0] = 1000.0
    model.save_pretrained(run / "student")
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    message = r"model_int8.onnx: on test its accuracy differs by -\d.* more than 1 points"
    with pytest.raises(UserError, match=message):
        ds_distill("export", run, "--onnx", "--int8", "--split", "test")
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


def test_a_student_is_pushed_to_a_private_repository(place, monkeypatch):
    """The hub's client is one that takes the same arguments, and keeps them."""
    api = create_autospec(HfApi, instance=True)
    api.create_repo.return_value = RepoUrl("https://huggingface.co/me/student")
    monkeypatch.setattr(hub, "HfApi", lambda: api)
    monkeypatch.setattr(hub, "get_token", lambda: "hf_secret")
    command = ["push", place / "long", "me/student"]
    planned = ds_distill(*command, "--dry-run")
    assert "Nothing was pushed" in planned.output
    assert not api.method_calls
    done = ds_distill(*command)
    assert api.create_repo.call_args.kwargs["private"] is True
    files = {}
    for add in api.create_commit.call_args.args[1]:
        with add.as_file() as content:
            files[add.path_in_repo] = content.read()
    student = place / "long" / "student"
    for name in ("config.json", "model.safetensors", "README.md", "tokenizer.json"):
        assert files[name] == (student / name).read_bytes()
    assert json.loads(files["results.json"])["student"] == "student"
    listed = {line.split()[-1] for line in planned.output.splitlines() if " MB " in line}
    assert listed == {*files}, "the dry run lists what is pushed"
    assert "hf_secret" not in done.output + str(api.mock_calls)

    run = ["run", place / "toy.yaml", "--folder", place / "long", "--resume"]
    run += ["training.epochs=6", "training.keep=last", "--push-to-hub", "me/student"]
    with pytest.raises(UserError, match="--until the run ends unfinished"):
        ds_distill(*run, "--until", "distil")
    response = httpx.Response(403, request=httpx.Request("POST", "https://huggingface.co"))
    api.create_commit.side_effect = HfHubHTTPError("no space left.", response=response)
    again = f"no space left. The run is finished; push it with: ds-distill push {place / 'long'}"
    with pytest.raises(UserError, match=re.escape(again)):
        ds_distill(*run)
    for raised, message in (
        (OfflineModeIsEnabled(), "HF_HUB_OFFLINE is set"),
        (ConnectionError("127.0.0.1:9"), "the hub cannot be reached"),
    ):
        api.whoami.side_effect = raised
        with pytest.raises(UserError, match=message):
            ds_distill(*command)
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="Log in once"):
        ds_distill(*command)
