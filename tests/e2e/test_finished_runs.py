"""What is done with finished runs: a checkpoint's score is that of the run that made it, runs are
compared example by example, students are exported and pushed."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from scipy.special import softmax
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner, Result

from ds_distill.cli import app
from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.scores import build_metric
from ds_distill.predictors.prediction import predict
from ds_distill.recipe.metrics.classes import Accuracy


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    toy_settings: dict[str, Any],
    command_environment: dict[str, str],
) -> Iterator[Path]:
    """A folder with a recipe of two tasks, a short and a longer run of it, and an evaluation of the
    longer run's student, all in this process."""
    here = tmp_path_factory.mktemp("evaluate")
    settings = copy.deepcopy(toy_settings)
    settings["tasks"] = {"kind": settings["task"], "again": settings.pop("task")}
    del settings["teachers"]["second"]
    settings["phases"] = [
        {"fine-tune": {"models": "first", "task": "kind"}},
        {"distil": {"losses": {"kl": {}}, "task": "kind"}},
        {"evaluate": {"task": "kind"}},
    ]
    (here / "toy.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DS_ACCELERATOR", "HF_DATASETS_CACHE", "OMP_NUM_THREADS"):
            patch.setenv(name, command_environment[name])
        for name, epochs in {"short": 1, "long": 6}.items():
            done = ds_distill(
                "run",
                here / "toy.yaml",
                "--folder",
                here / name,
                f"training.epochs={epochs}",
                "training.keep=last",
            )
            assert done.exit_code == 0, done.output
        yield here


def ds_distill(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if isinstance(result.exception, UserError):
        raise result.exception
    return result


def evaluated(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text())["phases"][-1])


def test_a_checkpoint_is_scored_as_in_its_run(place: Path) -> None:
    arguments = ["evaluate", place / "long", place / "toy.yaml", "--task", "kind"]
    done = ds_distill(*arguments, "--output", place / "judged")
    assert done.exit_code == 0, done.output
    ours, runs = evaluated(place / "judged"), evaluated(place / "long")
    checkpoint = ours["models"]["checkpoint"]
    assert checkpoint["role"] == "checkpoint", "it teaches nobody"
    student = runs["models"]["student"]
    assert student["accuracy"] > runs["baseline"]["accuracy"]
    for key in student.keys() - {"role"}:
        assert checkpoint[key] == student[key], key
    assert ours["baseline"] == runs["baseline"]
    assert ours["examples_mark"] == runs["examples_mark"]
    low, high = student["to_baseline"]["interval"]
    assert f"{100 * low:+.1f} to {100 * high:+.1f}" in done.output
    for label, share in student["per_class"].items():
        assert any(line.split() == [label, f"{share:.1%}"] for line in done.output.splitlines())
    assert "Accuracy on test" in (place / "judged" / "report.html").read_text()
    with pytest.raises(UserError, match="exists already"):
        ds_distill(*arguments, "--output", place / "judged")


def test_an_evaluation_that_cannot_be_is_refused(
    place: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    recipe, long = place / "toy.yaml", place / "long"
    with pytest.raises(
        UserError, match=r"^model .*BertModel, which is no trained classifier.*Fine-tune"
    ):
        ds_distill("evaluate", tiny_models["toy"], recipe, "--task", "kind")
    with pytest.raises(UserError, match=r"several tasks.*--task: kind, again"):
        ds_distill("evaluate", long, recipe)
    with pytest.raises(UserError, match=r"no such task.*Did you mean `kind`"):
        ds_distill("evaluate", long, recipe, "--task", "kinds")
    with pytest.raises(UserError, match="--split tset: there is no such split"):
        ds_distill("evaluate", long, recipe, "--task", "kind", "--split", "tset")
    labels = "tasks.kind.labels=[food, weather, plant]"
    with pytest.raises(UserError, match="plant"):
        ds_distill("evaluate", long, recipe, labels, "--task", "kind")
    (tmp_path / "recipe.yaml").write_text("name: unfinished\n")
    with pytest.raises(UserError, match="no student yet"):
        ds_distill("evaluate", tmp_path, recipe, "--task", "kind")


def test_the_report_of_a_finished_run_is_written_anew(place: Path) -> None:
    """It wrote comparison.html where one was, in the folder that one was in."""
    report = place / "short" / "report.html"
    before = report.read_text(encoding="utf-8")
    report.unlink()
    done = ds_distill("report", place / "short")
    assert done.exit_code == 0 and done.output == f"Report   {report}\n"
    assert report.read_text(encoding="utf-8") == before


def test_runs_stand_side_by_side_with_paired_intervals(place: Path) -> None:
    page = place / "both.html"
    done = ds_distill("report", place / "short", place / "long", "--output", page)
    assert done.exit_code == 0, done.output
    [group] = json.loads(page.with_suffix(".json").read_text())
    rows = {(row["run"], row["model"]): row for row in group["rows"]}
    assert list(rows) == [(r, m) for r in ("short", "long") for m in ("first", "student")]
    assert group["first"] == ["short", "student"] and rows["short", "student"]["to_first"] is None
    saved = [
        SavedPredictions.read(place / run / "predictions" / "02-evaluate.safetensors", "classes")
        for run in ("long", "short")
    ]
    long, short = (one.models["student"] for one in saved)
    right = [np.mean(one.logits.argmax(axis=1) == one.labels) for one in (long, short)]
    found = rows["long", "student"]["to_first"]
    assert found["difference"] == pytest.approx(right[0] - right[1])
    judge = build_metric("classes", Accuracy.Settings(), saved[0].labels)
    low, high = paired_interval(long, short, judge)
    assert found["interval"] == pytest.approx([low, high], abs=0.02)
    assert low > 0, "six epochs are better than one"
    assert group["pairs"] == [{"runs": ["short", "long"], "models": ["student"] * 2, **found}]
    sentence = "long (student) is better than short (student)"
    assert sentence in done.output and sentence in page.read_text()
    assert f"{rows['long', 'student']['parameters'] / 1e6:.1f} M" in done.output


def test_runs_on_other_examples_are_set_apart(place: Path, tmp_path: Path) -> None:
    other, fewer = tmp_path / "validation", tmp_path / "fewer"
    command = ["evaluate", place / "short", place / "toy.yaml", "--task", "kind"]
    for options in (
        ["--split", "validation", "--output", other],
        ["tasks.kind.data.limit.test=20", "--output", fewer],
    ):
        done = ds_distill(*command, *options)
        assert done.exit_code == 0, done.output
    few = "split test has 20 examples"
    assert f"WARNING: {few}" in done.output and few in (fewer / "report.html").read_text()
    assert [w for w in evaluated(fewer)["warnings"] if w.startswith(few)]
    gone = tmp_path / "gone"
    shutil.copytree(place / "long", gone)
    shutil.rmtree(gone / "predictions")
    page = tmp_path / "page.html"
    done = ds_distill("report", place / "short", other, gone, fewer, "--output", page)
    assert done.exit_code == 0, done.output
    test, validation, twenty = json.loads(page.with_suffix(".json").read_text())
    assert [row["run"] for row in test["rows"]] == ["short", "short", "gone", "gone"]
    assert [row["run"] for row in validation["rows"]] == ["validation"]
    assert [row["run"] for row in twenty["rows"]] == ["fewer"]
    assert "20 examples of test" in done.output
    assert done.output.count("not comparable") == 2 and not test["pairs"]
    with pytest.raises(UserError, match="named twice"):
        ds_distill("report", other, other, "--output", page)
    with pytest.raises(UserError, match="no finished run"):
        ds_distill("report", tmp_path, "--output", page)


@pytest.mark.further
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
        assert one["logits"]["decisions"] == one["logits"]["texts"] == found["examples"]
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


@pytest.mark.further
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


@pytest.mark.further
def test_a_student_is_pushed_to_a_private_repository(
    place: Path, tmp_path: Path, command_environment: dict[str, str]
) -> None:
    done = ds_distill("push", place / "long", "me/student", "--dry-run")
    assert done.exit_code == 0 and "Nothing was pushed" in done.output
    with pytest.raises(UserError, match=r"^bad//name: Repo id must"):
        ds_distill("push", place / "long", "bad//name", "--dry-run")
    with pytest.raises(UserError, match="is no run's folder"):
        ds_distill("push", tmp_path, "me/student")
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
