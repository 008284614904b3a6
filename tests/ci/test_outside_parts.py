"""Parts of another package, from its wheel: the example of docs/extending.md, checked, launched on
two ranks, and on one killed and resumed; evaluated and reported. Nothing in ds_distill knows their
names."""

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml
from processes import ended, events
from runs import Runs, evaluation, logged, results, written

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_parts"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel's content and metadata, to be put on PYTHONPATH."""
    root = tmp_path_factory.mktemp("outside")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    wheels, target = root / "wheels", root / "site"
    for command in (
        ["wheel", "--no-deps", *isolation, "--wheel-dir", str(wheels), str(EXAMPLE)],
        ["install", "--no-deps", "--no-index", "--target", str(target)],
    ):
        more = [str(path) for path in wheels.glob("*.whl")] if "install" in command else []
        ended(sys.executable, "-m", "pip", "--quiet", *command, *more, cwd=root)
    return target


@pytest.fixture(scope="module")
def environment(installed, command_environment):
    paths = [str(installed), command_environment.get("PYTHONPATH", "")]
    return {"PYTHONPATH": ":".join(filter(None, paths))}


def recipe_data(toy_settings):
    distil = {
        "split": "transfer",
        "teachers": "cached",
        "routing": [{"policy": "confident", "power": 2.0}, "average"],
        "losses": {"reverse_kl": {"temperature": 2.0}},
    }
    soup = {"soup": {"models": ["confident", "average"]}}
    phases = [*toy_settings["phases"][:4], {"distil": distil}, soup, toy_settings["phases"][-1]]
    return {"import": ["example_parts"], **toy_settings, "phases": phases}


def test_parts_of_a_wheel_are_checked_run_killed_resumed_and_reported(
    tmp_path, toy_settings, environment, ds_distill, warm
):
    data = recipe_data(toy_settings)
    written(data, tmp_path, "toy")
    # The key `import` is what brings the parts.
    without = ds_distill("check", "toy.yaml", "import=[]", cwd=tmp_path, env=environment, code=2)
    assert "unknown policy 'confident'" in without.stderr
    for name in ("unknown term 'reverse_kl'", "unknown phase 'soup'"):
        assert name in without.stderr
    absent = ds_distill("check", "toy.yaml", cwd=tmp_path, code=2)
    assert "import.0: cannot be imported: Module" in absent.stderr

    with_it = ds_distill("check", "toy.yaml", cwd=tmp_path, env=environment)
    assert "no mistakes found. 7 phases" in with_it.stdout

    wrong = yaml.safe_dump(data, sort_keys=False).replace("power:", "pover:")
    (tmp_path / "wrong.yaml").write_text(wrong)
    refused = ds_distill("check", "wrong.yaml", cwd=tmp_path, env=environment, code=2)
    line = 1 + wrong.split("\n").index(next(x for x in wrong.split("\n") if "pover" in x))
    assert f"wrong.yaml:{line}  phases.4.distil.routing.0.pover: unknown key." in refused.stderr
    assert "Did you mean `power`?" in refused.stderr

    launched = tmp_path / "launched"
    Runs(Path("toy.yaml"), warm, 2, environment).finish(launched)
    check_results(launched)

    runs = Runs(Path("toy.yaml"), warm, None, environment)
    folder = tmp_path / "run"
    assert runs.kill(folder, in_the_first_student, resume=False), "the run ended first"
    runs.finish(folder, resume=True)
    check_results(folder)


def in_the_first_student(folder):
    return any(event["phase"] == "confident" for event in events(folder))


def check_results(folder):
    record = evaluation(folder)
    models = record["models"]
    roles = dict.fromkeys(("first", "second"), "teacher")
    roles |= dict.fromkeys(("confident", "average", "soup"), "student")
    assert {name: model["role"] for name, model in models.items()} == roles
    for model in models.values():
        assert model["worst_class"] == min(model["per_class"].values())
    assert "worst_class" in record["baseline"]
    compared = results(folder)["phases"][2]["comparison"]["policies"]
    assert "confident" in compared and "average" in compared
    page, card = (folder / "report.html").read_text(), (folder / "student/README.md").read_text()
    assert "<th>worst class</th>" in page and "| worst class |" in card
    for name, shown in (("confident", "confident (shipped)"), ("soup", "soup")):
        assert f">{name}" in page and f"| {shown} | student |" in card
    assert any("reverse_kl" in event for event in events(folder))
    evaluated = logged(folder, "evaluation")
    assert len(evaluated) == 5 and all("worst_class" in event for event in evaluated)
