"""What is done with finished runs: a checkpoint's score is that of the run that made it, runs are
compared example by example, students are exported and pushed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from e2e.test_finished_runs import (
    ds_distill,
    evaluated,
    place,  # noqa: F401
)
from scipy.special import softmax
from transformers import AutoModelForSequenceClassification

from ds_distill.errors import UserError
from ds_distill.predictors.prediction import predict


def test_a_student_is_exported_where_int8_keeps_its_score(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "mine"
    shutil.copytree(place / "long", run)
    done = ds_distill("export", run, "--onnx", "--int8", "--split", "test")
    assert done.exit_code == 0, done.output
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
    card = (run / "student" / "README.md").read_text()
    for page in (card, (folder / "README.md").read_text(), (run / "report.html").read_text()):
        assert "model_int8.onnx" in page
    monkeypatch.chdir(tmp_path)
    for code in python_blocks(Path(__file__).parents[2] / "docs" / "serving.md"):
        traced = code.replace("dynamic=True", 'dynamic=True, backend="eager"')  # not made to C++
        exec(traced, {})
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
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


def python_blocks(file: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL)


def test_an_export_in_int8_that_loses_too_much_is_not_written(place: Path, tmp_path: Path) -> None:
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


class Hub(BaseHTTPRequestHandler):
    """The calls of the Hugging Face hub that a push makes; it keeps what it gets."""

    asked: ClassVar[list[tuple[str, str, str]]] = []
    """Method, path, and token of each call."""
    created: ClassVar[dict[str, Any]] = {}
    files: ClassVar[dict[str, bytes]] = {}
    full: ClassVar[list[str]] = []
    """What it says to a commit, where it takes none."""
    large: ClassVar[dict[str, bytes]] = {}
    """By SHA-256: weights, which go as on the hub another way than text files."""

    def do_GET(self) -> None:
        self._answer({"name": "me", "type": "user", "orgs": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/create"):
            self.created.update(json.loads(body))
            self._answer({"url": f"http://{self.headers['Host']}/me/student", "name": "me/student"})
        elif self.path.endswith("/validate-yaml"):
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
            answers = [
                {"path": name, "uploadMode": mode, "shouldIgnore": False}
                for name, mode in zip(names, modes, strict=True)
            ]
            self._answer({"files": answers})
        elif self.path.endswith("/info/lfs/objects/batch"):
            here = f"http://{self.headers['Host']}/large"
            objects = [
                {**one, "actions": {"upload": {"href": f"{here}/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path and self.full:
            self._answer({}, 403, self.full[0])
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    self.files[value["path"]] = self.large[value["oid"]]
            self._answer(
                {
                    "commitUrl": f"http://{self.headers['Host']}/me/student/commit/1",
                    "commitOid": "1",
                }
            )
        else:
            self.send_error(404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.removeprefix("/large/")
        assert hashlib.sha256(content).hexdigest() == name
        self.large[name] = content
        self._answer({})

    def _answer(self, content: Any, status: int = 200, error: str = "") -> None:
        self.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("X-Error-Message", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_student_is_pushed_to_a_private_repository(
    place: Path, tmp_path: Path, command_environment: dict[str, str]
) -> None:
    done = ds_distill("push", place / "long", "me/student", "--dry-run")
    assert done.exit_code == 0 and "Nothing was pushed" in done.output
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**command_environment, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    environment |= {"HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)

    def called(*words: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ds_distill", *map(str, words)]
        return subprocess.run(
            command, env={**environment, **changes}, capture_output=True, text=True, timeout=120
        )

    def pushed(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return called("push", place / "long", *words, **changes)

    result = pushed("me/student")
    assert result.returncode == 0, result.stderr
    assert Hub.created["name"] == "student"
    assert Hub.created.get("visibility") == "private" or Hub.created.get("private") is True
    writes = ("/create", "/preupload/main", "/commit/main")  # the client asks other things without
    tokens = [token for _, path, token in Hub.asked if path.endswith(writes)]
    assert tokens == ["Bearer hf_secret"] * 3
    student = place / "long" / "student"
    assert list(Hub.large.values()) == [(student / "model.safetensors").read_bytes()]
    for name in ("config.json", "model.safetensors", "README.md", "tokenizer.json"):
        assert Hub.files[name] == (student / name).read_bytes()
    assert json.loads(Hub.files["results.json"])["student"] == "student"
    listed = {line.split()[-1] for line in done.output.splitlines() if " MB " in line}
    assert listed == {*Hub.files}, "the dry run lists what is pushed"
    text = "".join([result.stdout, result.stderr, *map(str, Hub.files.values())])
    assert "hf_secret" not in text
    for changes, message in (
        ({"HF_TOKEN": ""}, "Log in once"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ):
        refused = pushed("me/student", **changes)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    run = ["run", place / "toy.yaml", "--folder", place / "long", "--resume"]
    run += ["training.epochs=6", "training.keep=last", "--push-to-hub", "me/student"]
    Hub.full.append("no space left")
    refused = called(*run)
    assert refused.returncode == 2, refused.stderr
    again = f"no space left. The run is finished; push it with: ds-distill push {place / 'long'}"
    assert again in refused.stderr, refused.stderr
    with pytest.raises(UserError, match="--until the run ends unfinished"):
        ds_distill(*run, "--until", "distil")
    server.shutdown()
