"""The one command of what needs a GPU: it judges what steps wrote, and one step stops no other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from run import Step, all_on_the_gpu, do, install, no_path_failed, stages_agree, steps

SUITE = '<a><testsuite tests="{}" failures="{}" errors="0" skipped="0">{}</testsuite></a>'


@pytest.mark.parametrize(
    ("names", "failures", "good"),
    [(["op[cuda]", "op[cpu]"], 0, True), (["op[cpu]"], 0, False), (["op[cuda]"], 1, False)],
)
def test_kernels_must_have_run_on_the_gpu(tmp_path, names, failures, good):
    cases = "".join(f'<testcase name="{name}"/>' for name in names)
    (tmp_path / "kernels.xml").write_text(SUITE.format(len(names), failures, cases))
    if good:
        assert all_on_the_gpu(tmp_path) == "2 tests, 1 of them kernels on the GPU"
    else:
        with pytest.raises(ValueError, match="of them on the GPU"):
            all_on_the_gpu(tmp_path)


def test_losses_of_two_stages_must_agree(tmp_path):
    for stage, loss in (("zero3", 1.001), ("zero1", 1.0)):
        measured = {"steps": [{"loss": loss}, {"loss": 2.0}]}
        (tmp_path / f"one-engine-{stage}.json").write_text(json.dumps(measured))
    assert stages_agree(tmp_path) == "losses of stage 3 and 1 are 0.10% apart"
    (tmp_path / "one-engine-zero3.json").write_text(
        json.dumps({"steps": [{"loss": 1}, {"loss": 3}]})
    )
    with pytest.raises(ValueError, match=r"50.0% apart"):
        stages_agree(tmp_path)


def test_a_path_that_failed_fails_its_step(tmp_path):
    rows = [{"path": "live"}, {"path": "textbrewer", "error": "no such module"}]
    (tmp_path / "old.json").write_text(json.dumps({"paths": [rows[0]]}))
    assert no_path_failed(tmp_path) == ""
    (tmp_path / "new.json").write_text(json.dumps({"paths": rows}))
    os.utime(tmp_path / "old.json", (1, 1))
    with pytest.raises(ValueError, match="textbrewer: no such module"):
        no_path_failed(tmp_path)


def test_steps_are_judged_and_cut_off(tmp_path, capsys):
    def bad(folder: Path) -> str:
        raise ValueError("3 is not 1")

    environment = dict(os.environ)
    good = do(
        Step("good", 60, ["-c", "print(5)"], lambda folder: "all well"), tmp_path, environment
    )
    assert good["failed"] is False and good["said"] == "all well"
    assert (tmp_path / "good.log").read_text() == "5\n"
    broken = do(Step("broken", 60, ["-c", "raise SystemExit(3)"]), tmp_path, environment)
    assert broken["failed"] and broken["said"] == "exit code 3"
    slow = do(Step("slow", 1, ["-c", "import time; time.sleep(60)"]), tmp_path, environment)
    assert slow["failed"] and slow["said"] == "cut off after 1 s" and slow["seconds"] < 30
    judged = do(Step("judged", 60, ["-c", ""], bad), tmp_path, environment)
    assert judged["failed"] and judged["said"] == "3 is not 1"
    assert capsys.readouterr().out.count("FAILED") == 3


def test_every_step_writes_where_it_is_told(tmp_path):
    made = steps(tmp_path, Path("texts.txt"), "tokenizer")
    assert len({step.name for step in made}) == len(made)
    assert all(any(str(tmp_path) in word for word in step.command) for step in made)


def test_packages_that_are_here_are_not_installed_again(tmp_path):
    (tmp_path / "pytest-1.0-py3-none-any.whl").write_bytes(b"no wheel: pip would fail")
    assert install(tmp_path) == tmp_path / "site" and not (tmp_path / "site").exists()
