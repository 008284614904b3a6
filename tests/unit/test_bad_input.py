"""Wrong input: one paragraph that names the place, the value, the rule and the fix; exit code 2;
nothing left behind. The mistakes are in bad_input.yaml."""

import errno
import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
import yaml
from kinds import change
from processes import python

from ds_distill.cli import main
from ds_distill.engine.world import World
from ds_distill.recipe import load_recipe
from ds_distill.run.folder import RunFolder

CASES = yaml.safe_load(Path(__file__).with_name("bad_input.yaml").read_text(encoding="utf-8"))
MAX_LINES = 6


@dataclass
class Desk:
    """A folder to make mistakes in."""

    root: Path
    model: Path

    def prepare(self, case):
        """Make a case's mistake; returns the command line."""
        overrides = list(case.get("set", []))
        if "model" in case or "classes" in case:
            self._copy_model(case.get("model", {}), case.get("classes"))
            overrides.append(f"{case['as']}.model=./m")
        if "phases" in case:
            recipe = yaml.safe_load((self.root / "toy.yaml").read_text())
            changed = {**recipe, "phases": case["phases"]}
            (self.root / "toy.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
        if "deepspeed" in case:
            (self.root / "ds.json").write_text(json.dumps(case["deepspeed"]))
            overrides.append("deepspeed=ds.json")
        if "remove" in case:
            (self.root / case["remove"]).unlink()
        for name, content in case.get("write", {}).items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(content, encoding="utf-8")
        for name, (opening, times, closing) in case.get("generate", {}).items():
            (self.root / name).write_text(opening * times + closing * times)
        for name, line in case.get("append", {}).items():
            with open(self.root / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        for name, (old, new) in case.get("replace", {}).items():
            text = (self.root / name).read_text(encoding="utf-8")
            assert old in text
            (self.root / name).write_text(text.replace(old, new), encoding="utf-8")
        if case.get("first_run"):
            RunFolder(self.root / "run").create(load_recipe(str(self.root / "toy.yaml")), {})
        command = case.get("run", "run toy.yaml --folder run").replace("{model}", str(self.model))
        return [*shlex.split(command), *overrides]

    def _copy_model(self, changes, classes):
        folder = self.root / "m"
        shutil.copytree(self.model, folder)
        if classes is not None:
            changes = changes | {
                "architectures": ["BertForSequenceClassification"],
                "id2label": {str(number): label for number, label in enumerate(classes)},
                "label2id": {label: number for number, label in enumerate(classes)},
            }
        change(folder / "config.json", **changes)

    def files(self):
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*")}


@pytest.fixture
def desk(tmp_path, toy_task, toy_recipe, tiny_models, monkeypatch):
    root = tmp_path / "desk"
    shutil.copytree(toy_task, root / "data")
    text = toy_recipe.read_text(encoding="utf-8").replace(str(toy_task), "./data")
    (root / "toy.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(root)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    return Desk(root, tiny_models["toy"])


@pytest.fixture(scope="module", autouse=True)
def own_process_group():
    """A run in this process joins a group and sets variables that no other test may inherit."""
    before = dict(os.environ)
    World.start()
    yield
    World.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def refused(desk, monkeypatch, capfd):
    """What a command says that ends with 2 and writes nothing."""

    def refused(arguments):
        before = desk.files()
        monkeypatch.setattr(sys, "argv", ["ds-distill", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        said = capfd.readouterr().err
        assert exit_.value.code == 2, said
        assert desk.files() == before, "something was written"
        return str(said)

    return refused


def check_paragraph(text, parts, mistakes=1):
    lines = text.rstrip("\n").split("\n")
    assert lines[0].startswith("ds-distill: "), text
    assert "Traceback" not in text
    assert [part for part in parts if part not in text] == [], text
    if mistakes > 1:
        assert lines[0] == f"ds-distill: {mistakes} mistakes:", text
        numbers = [line.partition(". ")[0] for line in lines[1:-1]]
        assert numbers == [str(number) for number in range(1, mistakes + 1)], text
        assert lines[-1] == "Nothing was started."
        lines = lines[1:-1]
    else:
        assert " mistakes:" not in lines[0], text
        assert len(lines) <= MAX_LINES
    assert all(lines) and max(map(len, lines)) < 900, text


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_ends_in_one_paragraph(name, desk, monkeypatch, refused):
    arguments = desk.prepare(CASES[name])
    if "environment" in CASES[name]:
        [(_, cache)] = CASES[name]["environment"].items()
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    check_paragraph(refused(arguments), CASES[name]["says"], CASES[name].get("mistakes", 1))


def test_a_mistake_ends_a_real_process_with_2(desk, ds_distill):
    name = "odd label"
    arguments = desk.prepare(CASES[name])
    before = desk.files()
    done = ds_distill(*arguments, cwd=desk.root, code=2)
    check_paragraph(done.stderr, CASES[name]["says"])
    assert desk.files() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rum", "toy.yaml"], "No such command"),
        (["run"], "Missing argument 'RECIPE'"),
        (["run", "toy.yaml", "--foldr", "x"], "No such option"),
        (["launch", "toy.yaml", "--num-gpus", "0"], "greater than or equal to 1"),
        (["profile", "toy.yaml", "--steps", "4"], "greater than or equal to 5"),
    ],
)
def test_a_wrong_command_line_shows_the_usage(arguments, expected, refused):
    said = refused(arguments)
    assert expected in said and "Usage: ds-distill" in said


AT_ONCE = [case for case in CASES.values() if case.get("at_once")]
WITHOUT_TORCH = """
import json, sys
from ds_distill.cli import main
sys.modules["torch"] = None  # importing it fails
for command in json.loads(sys.argv[1]):
    sys.argv = ["ds-distill", *command]
    try:
        main()
    except SystemExit as end:
        print(f"exit {end.code}", file=sys.stderr)
"""


def test_what_a_library_need_not_find_is_told_before_torch_is_imported(desk):
    commands = [desk.prepare(case) for case in AT_ONCE]
    before = desk.files()
    done = python(WITHOUT_TORCH, json.dumps(commands))
    told = done.stderr.split("exit 2\n")
    assert len(told) == len(AT_ONCE) + 1, done.stderr
    for said, case in zip(told, AT_ONCE, strict=False):
        assert [part for part in case["says"] if part not in said] == [], said
    assert desk.files() == before


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/a/x.html"), "/a/x.html: Read-only file"),
        (PermissionError(errno.EACCES, "Permission denied", b"/a"), "/a: Permission denied. Name"),
        (OSError(errno.ENOSPC, "No space left on device"), "no space is left: [Errno 28] No space"),
        (RuntimeError("disk quota exceeded (os error 122)"), "no space is left: disk quota exc"),
    ],
)
def test_what_the_system_refuses_is_told_in_a_sentence(error, told, monkeypatch, refused):
    monkeypatch.setattr("ds_distill.cache.reader.caches_in", Mock(side_effect=error))
    assert refused(["cache", "info", "somewhere"]).startswith(f"ds-distill: {told}")


def test_a_path_that_is_too_long_is_a_mistake(refused):
    for arguments in (["cache", "info", "z" * 300], ["run", "toy.yaml", "--folder", "z" * 300]):
        assert refused(arguments) == "ds-distill: a path of the command line is too long\n"
