"""The one command of what needs a GPU: it judges what steps wrote, keeps to its budget, and goes on
where it was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "gpu"))

import apis
import quickstart
import run
from record import ARCHIVE, LOG_BYTES, SUMMARY, Record, shorten
from run import Budget, do_all, install
from steps import Step, all_passed_on, no_path_failed, ours_ran, stages_agree, steps

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
    if good:
        assert all_passed_on("cuda", file) == "2 tests, 1 of them with cuda"
    else:
        with pytest.raises(ValueError, match="of them ran with cuda"):
            all_passed_on("cuda", file)


def test_losses_of_two_stages_must_agree(tmp_path):
    def write(name: str, loss: float) -> None:
        rows = [{"path": "textbrewer", "first_loss": 9.0}, {"path": "live", "first_loss": loss}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"paths": rows}))

    write("two-engines", 1.001)
    assert stages_agree(tmp_path) == "no step at stage 0 to compare with"
    write("step-classification", 1.0)
    assert stages_agree(tmp_path) == "first losses of stage 0 and 3 are 0.10% apart"
    write("two-engines", 1.5)
    with pytest.raises(ValueError, match=r"\[1.0, 1.5\]"):
        stages_agree(tmp_path)


def test_a_path_that_failed_fails_its_step(tmp_path):
    file = tmp_path / "step.json"
    rows: list[dict[str, Any]] = [{"path": "live"}, {"path": "cached"}]
    ratios = {"live": {"seconds": 1.0}, "cached": {"seconds": 0.4}}
    file.write_text(json.dumps({"paths": rows, "of_live": ratios}))
    assert no_path_failed(file) == "time of live's: cached 0.4"
    rows += [{"path": "textbrewer", "error": "no such module"}]
    file.write_text(json.dumps({"paths": rows, "of_live": ratios}))
    with pytest.raises(ValueError, match="textbrewer: no such module"):
        no_path_failed(file)


def test_a_rival_may_fail_in_the_benchmark(tmp_path):
    head = "shape,dtype,path,failure\n"
    (tmp_path / "a.csv").write_text(head + "N=1,float32,ds_kernels,\nN=1,float32,liger,no memory\n")
    assert ours_ran(tmp_path / "a.csv") == "2 rows; failed: liger"
    (tmp_path / "a.csv").write_text(head + "N=1,float32,ds_kernels,no memory\n")
    with pytest.raises(ValueError, match="N=1 float32: no memory"):
        ours_ran(tmp_path / "a.csv")


def test_every_step_writes_where_it_is_told(tmp_path):
    for toy in (False, True):
        made = steps(tmp_path, Path("texts.txt"), "tokenizer", "model", toy)
        assert len({step.name for step in made}) == len(made)
        assert len({step.results for step in made}) == len(made)
        for step in made:
            assert any(word.endswith(str(tmp_path / step.results)) for word in step.command)
            assert 0 < step.least <= step.limit
            assert toy or step.limit <= 600 - run.RESERVE  # what a command may take there


def test_the_quickstart_takes_its_overrides(tmp_path):
    for toy, number in ((False, 0), (True, 5)):
        made = steps(tmp_path, Path("texts.txt"), "tokenizer", "model", toy)
        command = next(step.command for step in made if step.name == "quickstart")
        given = quickstart.parse(command[1:])
        assert given.model == "model" and len(given.overrides) == number
        command = next(step.command for step in made if step.name == "quickstart-fp16")
        assert len(quickstart.parse(command[1:]).overrides) == number + 1


def test_the_first_steps_are_those_of_most_worth(tmp_path):
    """Of what 600 s allow: the main kernels right and measured."""
    names = [step.name for step in steps(tmp_path, Path("texts.txt"), "tokenizer")]
    ops = ["masked_kl", "linear_kl", "topk_kl"]
    first = [f"{what}-{op}" for what in ("tests", "benchmark") for op in ops]
    models = ["teacher-speed", "step-classification", "step-masked-lm", "one-engine-zero3"]
    assert names[:10] == first + models


# --------------------------------------------------------------------- doing them


def record_in(folder: Path, names: list[str]) -> Record:
    (folder / "work").mkdir(exist_ok=True)
    return Record(folder / "output", folder / "work", names)


def writes(folder: Path, name: str, code: str = "", **more: Any) -> Step:
    """A step that appends a line to its results, then runs `code`."""
    file = folder / "work" / f"{name}.txt"
    code = f"open({str(file)!r}, 'a').write('part\\n'); {code}"
    given: dict[str, Any] = {"limit": 60, "least": 1, "check": lambda folder: ""}
    return Step(name, results=file.name, command=["-c", code], **{**given, **more})


def done(record: Record, chosen: list[Step], seconds: float | None = None) -> dict[str, str]:
    budget = Budget(seconds, time.monotonic())
    do_all(chosen, record, budget, environment=dict(os.environ), gpu="H100")
    return {step.name: record.state(step.name) for step in chosen}


def outputs(record: Record, name: str) -> str:
    return str(record.entries[name]["outputs"])


def test_steps_are_judged(tmp_path, capsys):
    def bad(folder: Path) -> str:
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
    assert outputs(record, "good") == "all well"
    assert (record.results / "good.log").read_text() == "5\n"
    assert outputs(record, "broken").startswith("exit code 3: see broken.log")
    assert outputs(record, "judged") == "ValueError: 3 is not 1"
    assert outputs(record, "silent") == "it wrote no silent.txt"
    assert outputs(record, "slow") == "not done after 1 s; what it wrote is partial"
    capsys.readouterr()
    again = done(record, chosen[::-1])
    assert again["good"] == "done" and (record.results / "good.txt").read_text() == "part\n"
    assert "done   good, by an earlier call" in capsys.readouterr().out


def test_what_failed_is_tried_again_after_the_others(tmp_path, capsys):
    chosen = [writes(tmp_path, "one", "raise SystemExit(1)"), writes(tmp_path, "two")]
    record = record_in(tmp_path, ["one", "two"])
    done(record, chosen[:1])
    capsys.readouterr()
    chosen[0] = writes(tmp_path, "one")
    assert done(record, chosen) == {"one": "done", "two": "done"}
    lines = capsys.readouterr().out.splitlines()
    started = [line.split()[1].rstrip(",") for line in lines if line.startswith("start")]
    assert started == ["two", "one"]


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
    assert re.fullmatch(r"the budget ended after [2-5] of 30 s; .* partial", outputs(record, "cut"))
    summary = json.loads((tmp_path / "output" / SUMMARY).read_text())
    assert [step["state"] for step in summary["steps"]] == ["waiting", "cut", "waiting"]
    assert summary["whole"] is False
    with tarfile.open(tmp_path / "output" / ARCHIVE) as archive:
        assert {"cut.txt", "cut.log", SUMMARY} <= set(archive.getnames())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # its parent may not look
    except psutil.NoSuchProcess:
        return False


def test_a_step_ends_with_all_its_processes(tmp_path):
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', "
        f"'import time; time.sleep(60)']); open({str(pid)!r}, 'w').write(str(child.pid)); "
    )
    chosen = [
        writes(tmp_path, "stopped", code + "time.sleep(60)", limit=5),
        writes(tmp_path, "left", code),  # ends by itself, its child does not
    ]
    record = record_in(tmp_path, ["stopped", "left"])
    for step in chosen:
        done(record, [step])
        assert not is_running(int(pid.read_text()))


def test_only_what_measures_no_time_runs_beside_others(tmp_path):
    """Each step waits for another's file, or finds that none is there."""
    place = str(tmp_path / "work")
    waits = (
        f"import os, time; end = time.time() + 30\n"
        f"while not os.path.exists({place!r} + '/{{}}.txt') and time.time() < end: time.sleep(.01)"
        f"\nassert time.time() < end"
    )
    alone = f"import os; assert not os.path.exists({place!r} + '/other.txt')"
    chosen = [
        writes(tmp_path, "measured", alone),
        writes(tmp_path, "one", waits.format("two"), timed=False),
        writes(tmp_path, "other"),
        writes(tmp_path, "two", waits.format("one"), timed=False),
    ]
    record = record_in(tmp_path, [step.name for step in chosen])
    assert set(done(record, chosen).values()) == {"done"}


# --------------------------------------------------------- killed, continued, signalled

DRIVER = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {gpu!r})
import run
from record import Record
from steps import Step

run.SAVE_SECONDS = 0.1
output, work = Path({output!r}), Path({work!r})
work.mkdir()
slow = '''
import time
from pathlib import Path
file = Path("{work}/slow.txt")
number = len(file.read_text().split()) if file.exists() else 0
while number < 40:
    with file.open("a") as parts:
        parts.write(str(number) + chr(10))
    number += 1
    time.sleep(0.05)
'''
quick = "open('{work}/{{0}}.txt', 'a').write('part')"
chosen = [
    Step("first", 60, 1, "first.txt", ["-c", quick.format("first")]),
    Step("slow", 60, 1, "slow.txt", ["-c", slow]),
    Step("last", 60, 1, "last.txt", ["-c", quick.format("last")]),
]
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
record = Record(output, work, [step.name for step in chosen])
record.take(output)
run.do_all(chosen, record, run.Budget(None, 0), environment=dict(os.environ), gpu="H100")
"""


def start_driver(tmp_path: Path, number: int) -> subprocess.Popen[bytes]:
    names = {"gpu": str(GPU), "output": str(tmp_path / "out"), "work": str(tmp_path / str(number))}
    return subprocess.Popen([sys.executable, "-c", DRIVER.format(**names)], cwd=tmp_path)


def in_archive(output: Path) -> dict[str, str]:
    """Name and content of each file, and the states of steps under their names."""
    with tarfile.open(output / ARCHIVE) as archive:
        files = {
            member.name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    entries = json.loads(files[SUMMARY])["steps"]
    return files | {entry["step"]: entry["state"] for entry in entries}


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.02)


def test_killed_or_signalled_it_goes_on(tmp_path):
    output = tmp_path / "out"

    def some_parts(more_than: int) -> Callable[[], bool]:
        def happened() -> bool:
            if not (output / ARCHIVE).is_file():
                return False
            return len(in_archive(output).get("slow.txt", "").split()) > more_than

        return happened

    process = start_driver(tmp_path, 0)
    wait_for(some_parts(2))
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in tree:
        each.kill()
    process.wait()
    before = in_archive(output)
    assert [before[name] for name in ("first", "slow", "last")] == ["done", "running", "waiting"]
    count = len(before["slow.txt"].split())
    assert count < 40

    process = start_driver(tmp_path, 1)
    wait_for(some_parts(count + 2))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    after = in_archive(output)
    assert after["slow"] == "cut" and "signal" in after[SUMMARY]

    assert start_driver(tmp_path, 2).wait(60) == 0
    whole = in_archive(output)
    assert [whole[name] for name in ("first", "slow", "last")] == ["done"] * 3
    assert whole["first.txt"] == whole["last.txt"] == "part"
    assert whole["slow.txt"].split() == [str(number) for number in range(40)]
    assert json.loads((output / SUMMARY).read_text())["whole"] is True


INTERRUPTED = """
import sys
sys.path.insert(0, {gpu!r})
from run import running
with running(["-c", "import time; time.sleep(60)"], dict()) as process:
    process._waitpid_lock.acquire()  # as a signal within process.wait() may leave it
    sys.exit(143)
"""


def test_a_signal_within_a_wait_ends_it():
    code = INTERRUPTED.format(gpu=str(GPU))
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 143


SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {gpu!r})
from record import Record
record = Record(Path({output!r}), Path({work!r}), ["step"])
print("ready", flush=True)
for number in range(10**6):
    for name in "abc":
        (record.results / name).write_text(str(number) * 20000)
    record.note("step", "running", number=number)
"""


def test_the_archive_is_whole_at_any_moment(tmp_path):
    work, output = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    code = SAVER.format(gpu=str(GPU), output=str(output), work=str(work))
    for milliseconds in (5, 40, 90, 130):
        saver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert saver.stdout is not None and saver.stdout.readline() == b"ready\n"
        wait_for(lambda: (output / ARCHIVE).is_file())
        time.sleep(milliseconds / 1000)
        saver.kill()
        saver.wait()
        saver.stdout.close()
        files = in_archive(output)
        number = str(json.loads(files[SUMMARY])["steps"][0]["number"])
        assert all(files[name] == number * 20000 for name in "abc")
        assert json.loads((output / SUMMARY).read_text())["steps"]


def test_results_of_another_gpu_are_not_gone_on_with(tmp_path):
    record = record_in(tmp_path, ["tests-masked_kl"])
    record.note("tests-masked_kl", "done", gpu="H200")
    (tmp_path / "texts.txt").write_text("one\n")
    command = [sys.executable, str(GPU / "run.py"), "--toy", "--texts", str(tmp_path / "texts.txt")]
    given = ["--output", str(tmp_path / "new"), "--earlier", str(tmp_path / "output")]
    ended = subprocess.run([*command, *given], capture_output=True, text=True)
    assert ended.returncode == 2 and "figures of H200, and this is none" in ended.stderr
    ended = subprocess.run([*command, *given[:2], "--only", "nothing"], capture_output=True)
    assert ended.returncode == 2 and b"--only nothing: no step is called so" in ended.stderr


def test_a_step_to_be_done_anew_is_forgotten(tmp_path):
    record = record_in(tmp_path, ["one", "two"])
    done(record, [writes(tmp_path, "one"), writes(tmp_path, "two")])
    record.forget("one", "one.txt")
    record.save()
    other = Record(tmp_path / "second", tmp_path / "third", ["one", "two"])
    (tmp_path / "third").mkdir()
    assert other.take(tmp_path / "output") and not other.take(tmp_path / "nowhere")
    assert (other.state("one"), other.state("two")) == ("waiting", "done")
    assert not (tmp_path / "third" / "one.txt").exists()


def test_one_call_at_a_time(tmp_path):
    record_in(tmp_path, ["one"])
    with pytest.raises(BlockingIOError, match="output: another call writes there"):
        record_in(tmp_path, ["one"])


def test_long_logs_keep_their_end(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("x" * 2 * LOG_BYTES + "the end")
    shorten(log)
    assert log.stat().st_size < LOG_BYTES + 100 and log.read_text().endswith("xthe end")


# ------------------------------------------------------------------------- the kit


def wheel(kit: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(kit / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "here = True\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        file.writestr(f"{info}/RECORD", "")


def test_missing_packages_are_installed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "kit").mkdir()
    for name in ("gpu_kit_one", "gpu_kit_two"):
        wheel(tmp_path / "kit", name)
    (tmp_path / "kit" / "pytest-1.0-py3-none-any.whl").write_bytes(b"no wheel: pip would fail")
    site = install(tmp_path / "kit")
    assert {file.name for file in site.glob("*.py")} == {"gpu_kit_one.py", "gpu_kit_two.py"}
    (site / "gpu_kit_one.py").write_text("changed\n")
    assert install(tmp_path / "kit") == site  # by an earlier call
    assert (site / "gpu_kit_one.py").read_text() == "changed\n"


# ------------------------------------------------------------------------ libraries


def test_all_that_is_used_was_looked_up():
    """A new name: see that torch 2.11 and Triton 3.6 have it, then write the list anew."""
    missing = set(apis.from_source()) - set(apis.listed())
    assert not missing, "python tools/gpu/apis.py > tools/gpu/apis.txt"


def test_the_libraries_here_have_what_is_listed():
    there = {name: find_spec(name) is not None for name in apis.PACKAGES}
    faults = [
        fault
        for line in apis.listed()
        if there[line.partition("(")[0].split(".")[0]]
        for fault in [apis.fault(line)]
        if fault
    ]
    assert not faults


def test_names_are_found_in_source(tmp_path):
    (tmp_path / "a.py").write_text(
        "import torch.nn.functional as F\nfrom torch import nn\nimport torch\n"
        "from ._shared import tl\nimport numpy as np\n"
        "F.pad(x, value=1)\nnn.Linear(1, 2).weight\ntorch.cuda.no_such_thing\ntl.load(mask=0)\n"
        "def f():\n    import triton as t\n    return t.jit\nnp.zeros(3)\n"
    )
    lines = apis.lines(apis.used([tmp_path / "a.py"]))
    assert lines == [
        "torch.cuda.no_such_thing",
        "torch.nn",
        "torch.nn.Linear",
        "torch.nn.functional.pad(value)",
        "triton.jit",
        "triton.language.load(mask)",
    ]
    assert apis.fault("torch.cuda.no_such_thing") == (
        "torch.cuda.no_such_thing: torch.cuda has no no_such_thing"
    )
    assert apis.fault("torch.nn.Linear(bias)") == ""
    assert apis.fault("torch.nn.Linear(biased)") == "torch.nn.Linear has no biased"


# -------------------------------------------------------------- the kernels' benchmark


BENCHMARK = """
import sys
from pathlib import Path
sys.path[:0] = [{folder!r}, {kernels!r}]
import torch
import run

torch.compile = lambda path, dynamic: path  # minutes; what is shown here is which problems run
measured = []
measure = run.measure
run.measure = lambda problem, *rest: measured.append(run._shape(problem)) or measure(problem, *rest)
run.FLUSH_BYTES, run.copy_bandwidth, run.find_spec = 1, lambda timer: 1e9, lambda name: None
table = Path({table!r})
sys.argv = ["run.py", "--toy", "--resume", "--seconds", "0", "--out", str(table)]
sys.argv += ["--only", "masked_kl", "--dtype", "float32"]

def again():
    measured.clear()
    run.main()
    return measured

assert again() == ["N=32 V=6", "N=8 V=1000", "N=64 V=640"], measured
lines = table.read_text().splitlines()
assert not again(), measured
assert table.read_text().splitlines() == lines
kept = [line for line in lines if "N=8 V=1000" not in line]
table.write_text(chr(10).join(kept) + chr(10))
assert again() == ["N=8 V=1000"], measured
assert len(table.read_text().splitlines()) == len(lines)
table.write_text(table.read_text().replace(torch.__version__, "2.0"))
assert len(again()) == 3, "rows of another torch were kept"
sys.argv.remove("--resume")
assert len(again()) == 3, "without --resume rows were kept"
assert len(table.read_text().splitlines()) == len(lines)
"""


def test_the_benchmark_goes_on_where_it_was(tmp_path):
    benchmarks = GPU.parents[1] / "kernels" / "benchmarks"
    places = {"folder": str(benchmarks), "kernels": str(benchmarks.parent)}
    code = BENCHMARK.format(**places, table=str(tmp_path / "kernels.csv"))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
