"""The one command of what needs a GPU: it judges what steps wrote, keeps to its budget, and goes on
where it was killed."""

import json
import os
import re
import sys
import tarfile
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "gpu"))

import apis
import run
from record import ARCHIVE, SUMMARY, Record
from run import Budget, do_all
from steps import Step, all_passed_on, steps

GPU = Path(run.__file__).parent
SUITE = '<a><testsuite tests="{}" failures="{}" errors="0" skipped="0">{}</testsuite></a>'


# ------------------------------------------------------------------ what steps wrote


@pytest.mark.parametrize(
    ("names", "failures", "good"),
    [(["op[cuda]", "op[cpu]"], 0, True), (["op[cpu]"], 0, False), (["op[cuda]"], 1, False)],
)
def test_kernels_must_have_run_on_the_gpu(tmp_path, names, failures, good):
    cases = "".join(f'<testcase name="{name}"/>' for name in names)
    skipped = '<testcase name="other[cuda]"><skipped/></testcase>'
    file = tmp_path / "tests.xml"
    file.write_text(SUITE.format(len(names), failures, cases + skipped))
    refused = pytest.raises(ValueError, match="of them ran with cuda")
    with nullcontext() if good else refused:
        assert all_passed_on("cuda", file) == "2 tests, 1 of them with cuda"


def test_every_step_writes_where_it_is_told(tmp_path):
    for toy in (False, True):
        made = steps(tmp_path, Path("texts.txt"), "tokenizer", "model", toy)
        assert len({step.name for step in made}) == len(made)
        assert len({step.results for step in made}) == len(made)
        for step in made:
            assert any(word.endswith(str(tmp_path / step.results)) for word in step.command)
            assert 0 < step.least <= step.limit
            assert toy or step.limit <= 600 - run.RESERVE  # what a command may take there


# --------------------------------------------------------------------- doing them


def record_in(folder, names):
    (folder / "work").mkdir(exist_ok=True)
    return Record(folder / "output", folder / "work", names)


def writes(folder, name, code="", **more):
    """A step that appends a line to its results, then runs `code`."""
    file = folder / "work" / f"{name}.txt"
    code = f"open({str(file)!r}, 'a').write('part\\n'); {code}"
    given = {"limit": 60, "least": 1, "check": lambda folder: ""}
    return Step(name, results=file.name, command=["-c", code], **{**given, **more})


def done(record, chosen, seconds=None):
    budget = Budget(seconds, time.monotonic())
    do_all(chosen, record, budget, environment=dict(os.environ), gpu="H100")
    return {step.name: record.state(step.name) for step in chosen}


def test_steps_are_judged(tmp_path, capsys):
    def bad(folder):
        raise ValueError("3 is not 1")

    chosen = [
        writes(tmp_path, "good", "print(5)", check=lambda folder: "all well"),
        writes(tmp_path, "broken", "raise SystemExit(3)"),
        writes(tmp_path, "judged", check=bad),
        writes(tmp_path, "silent", f"import os; os.remove({str(tmp_path / 'work/silent.txt')!r})"),
        writes(tmp_path, "slow", "import time; time.sleep(60)", limit=1),
    ]
    record = record_in(tmp_path, [step.name for step in chosen])
    assert list(done(record, chosen).values()) == ["done", *["failed"] * 4]
    assert (record.results / "good.log").read_text() == "5\n"
    outputs = {name: record.entries[name]["outputs"] for name in record.entries}
    assert outputs.pop("broken").startswith("exit code 3: see broken.log")
    assert outputs == {
        "good": "all well",
        "judged": "ValueError: 3 is not 1",
        "silent": "it wrote no silent.txt",
        "slow": "not done after 1 s; what it wrote is partial",
    }
    capsys.readouterr()
    again = done(record, chosen[::-1])
    assert again["good"] == "done" and (record.results / "good.txt").read_text() == "part\n"
    assert "done   good, by an earlier call" in capsys.readouterr().out


def test_no_step_starts_that_cannot_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RESERVE", 0)
    chosen = [
        writes(tmp_path, "long", limit=90, least=50),
        writes(tmp_path, "cut", "import time; time.sleep(60)", limit=30, least=2),
        writes(tmp_path, "short", limit=30, least=2),
    ]
    record = record_in(tmp_path, [step.name for step in chosen])
    started = time.monotonic()
    assert done(record, chosen, 6) == {"long": "waiting", "cut": "cut", "short": "waiting"}
    assert time.monotonic() - started < 30
    said = record.entries["cut"]["outputs"]
    assert re.fullmatch(r"the budget ended after [2-5] of 30 s; .* partial", said)
    summary = json.loads((tmp_path / "output" / SUMMARY).read_text())
    assert [step["state"] for step in summary["steps"]] == ["waiting", "cut", "waiting"]
    assert summary["whole"] is False
    with tarfile.open(tmp_path / "output" / ARCHIVE) as archive:
        assert {"cut.txt", "cut.log", SUMMARY} <= set(archive.getnames())


# --------------------------------------------------------- killed, continued, signalled


def test_all_that_is_used_was_looked_up():
    """A new name: see that torch 2.11 and Triton 3.6 have it, then write the list anew."""
    missing = set(apis.from_source()) - set(apis.listed())
    assert not missing, "python tools/gpu/apis.py > tools/gpu/apis.txt"


def test_the_libraries_here_have_what_is_listed():
    there = {name for name in apis.PACKAGES if find_spec(name) is not None}
    here = [line for line in apis.listed() if line.partition("(")[0].split(".")[0] in there]
    assert [*filter(None, map(apis.fault, here))] == []


def test_a_later_call_goes_on_from_what_an_earlier_one_wrote(tmp_path):
    record = record_in(tmp_path, ["one", "two"])
    assert done(record, [writes(tmp_path, "one")]) == {"one": "done"}
    other = Record(tmp_path / "second", tmp_path / "third", ["one", "two"])
    (tmp_path / "third").mkdir()
    assert other.take(tmp_path / "output") and not other.take(tmp_path / "nowhere")
    assert (other.state("one"), other.state("two")) == ("done", "waiting")
    assert (tmp_path / "third" / "one.txt").read_text() == "part\n"
