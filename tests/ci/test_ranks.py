"""Two ranks, of which one does not come, hangs, is stopped or killed, or fails: the other one ends
in a stated time, the rank that was to blame is named once, and the run goes on afterwards."""

import socket
import time
from signal import SIGCONT, SIGKILL, SIGSEGV, SIGSTOP

import pytest
from ranks import Ranks
from runs import steps, written
from toys import break_word, make_toy_classifier
from transformers import BertForSequenceClassification

from ds_distill.process.failures import first_failure

LIMIT = 20.0
"""Seconds that a rank may be silent."""
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, toy_settings, warm):
    recipe = written(toy_settings, tmp_path_factory.mktemp("ranks"))
    options = ["training.epochs=200", "training.save_every=10", "logging.every=1"]
    made = Ranks(recipe, warm, *options, f"timeout_minutes={LIMIT / 60}")
    yield made
    made.kill()


def results(started, within):
    """Exit code, output and errors of each rank."""
    deadline, found = time.monotonic() + within, []
    for process in started:
        output, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        found.append((process.returncode, output, errors))
    return found


def wait_for_steps(folder, count, started):
    deadline = time.monotonic() + 180
    before = steps(folder)
    while steps(folder) < before + count:
        for process in started:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def last(errors):
    return errors.splitlines()[-1] if errors else ""


def test_a_rank_that_does_not_come_is_named(ranks, tmp_path):
    folders = [tmp_path / f"run-{rank}" for rank in (0, 1)]
    started = [ranks.start(folder, ranks=(rank,))[0] for rank, folder in enumerate(folders)]
    lines = (
        f"ds-distill: rank 0 on {HOST}: rank 1 on {HOST}: did not come within 20 seconds.",
        f"ds-distill: rank 1 on {HOST}: rank 0 does not answer at 127.0.0.1:",
    )
    for rank, (code, output, errors) in enumerate(results(started, 300)):
        assert code == 1, errors
        assert last(errors).startswith(lines[rank]) and "Traceback" not in errors
        assert "waiting for rank 1" in output or "waits for rank 0" in output
        failure = first_failure(folders[rank])
        assert (failure.rank, failure.kind) == (rank, "fault")
        assert [path.name for path in folders[rank].iterdir()] == ["failures"]


def test_whoever_is_to_blame_is_named_and_the_run_goes_on(ranks, tmp_path):
    folder = tmp_path / "run"

    # Rank 1 is killed before there is a run.
    first, _ = results(ranks.start(folder, plant="die:1:0"), 400)
    assert first[0] == 1 and f"rank 1 on {HOST}: its process ended" in last(first[2]), first
    assert not (folder / "recipe.yaml").exists()

    # It has an error of its own.
    first, second = results(ranks.start(folder, plant="fail:1:5"), 400)
    assert (first[0], second[0]) == (1, 1), (first, second)
    assert last(second[2]) == f"ds-distill: rank 1 on {HOST}: ValueError: planted here"
    assert second[2].count("Traceback") >= 1 and "in planted" in second[2]
    assert first[2] == "", "rank 0 reports a consequence"
    failure = first_failure(folder)
    assert (failure.rank, failure.kind, failure.message) == (1, "fault", "ValueError: planted here")

    # A rank hangs, in a thread that its main thread waits for.
    started = ranks.start(folder, "--resume", plant="hang:1:15")
    first, second = results(started, 400)
    assert (first[0], second[0]) == (1, 1), (first, second)
    assert last(first[2]).startswith(
        f"ds-distill: rank 1 on {HOST}: no rank has gone on for 20 seconds, and it is "
        "behind. Last seen: phase teach-first, step 1"
    ), first[2]
    assert "in planted_hang" in first[2]
    assert "timeout_minutes" in last(first[2])
    assert first_failure(folder).rank == 1 and "behind" in first_failure(folder).message

    # Memory runs out.
    first, second = results(ranks.start(folder, "--resume", plant="memory:1:15"), 400)
    assert (first[0], second[0]) == (2, 2), (first, second)
    assert "Traceback" not in second[2] and first[2] == ""
    line = last(second[2])
    start = "ds-distill: phases.teach-first: memory ran out on rank 1 (cpu), at step 1"
    assert line.startswith(start)
    assert "Set phases.teach-first.micro_batch_size below 8" in line

    # One gets SIGTERM: both save a checkpoint at the same step.
    started = ranks.start(folder, "--resume")
    wait_for_steps(folder, 3, started)
    started[1].terminate()
    first, second = results(started, 300)
    assert (first[0], second[0]) == (75, 75), (first, second)
    line = last(first[2] + second[2])
    assert line.startswith("ds-distill: stopped by SIGTERM, with a checkpoint of first at step ")
    step = int(line.rpartition(" ")[2])
    assert (folder / "checkpoints" / "00-first" / f"step-{step:08d}" / "progress.json").is_file()
    assert first_failure(folder).exit_code == 75

    # One rank alone goes on from there, and then two again.
    started = ranks.start(folder, "--resume", ranks=(0,), size=1)
    wait_for_steps(folder, 3, started)
    started[0].terminate()
    [(code, output, errors)] = results(started, 300)
    assert code == 75 and f"first: continues at step {step} of" in output, errors
    assert "on 1 rank(s); 1 and 2 were used in this run" in output

    # One is frozen.
    started = ranks.start(folder, "--resume")
    wait_for_steps(folder, 3, started)
    started[1].send_signal(SIGSTOP)
    at = time.monotonic()
    [(code, _, errors)] = results(started[:1], 200)
    assert code == 1 and LIMIT - 2 < time.monotonic() - at < LIMIT + 25
    assert f"rank 1 on {HOST}: it has given no sign for 20 seconds" in last(errors), errors
    started[1].send_signal(SIGCONT)
    [(code, _, errors)] = results(started[1:], 200)
    # Its stack at most: the timer that prints it reads other threads' frames while they run.
    assert code in (1, -SIGSEGV) and "ds-distill:" not in errors, errors


def test_a_host_that_sees_files_late(toy_settings, warm, tmp_path):
    """All ranks go on from the checkpoint that rank 0 sees, and build the cache that it begins."""
    recipe = written(toy_settings, tmp_path)
    options = ["training.epochs=2", "training.save_minutes=0.001", "logging.every=1"]
    ranks = Ranks(recipe, warm, *options, "timeout_minutes=2")
    folder = tmp_path / "run"
    assert [code for code, *_ in results(ranks.start(folder, plant="fail:1:9"), 300)] == [1, 1]
    found = results(ranks.start(folder, "--resume", plant="late:1:0"), 400)
    assert [code for code, *_ in found] == [0, 0], found
    assert "first: continues at step" in found[0][1]


def test_a_rank_that_reads_another_recipe_is_refused(ranks, tmp_path):
    """A host whose file system still shows what was there before an edit: each rank would train by
    its own rate, and the weights of stage 0 drift apart without a word."""
    folder = tmp_path / "run"
    unlike = ["phases.teach-first.learning_rate=0.5", "deepspeed=zero3_bf16"]
    first, second = results(ranks.start(folder, rank_options={1: unlike}), 300)
    assert (first[0], second[0]) == (2, 2), (first, second)
    line = last(second[2])
    assert line.startswith(f"ds-distill: rank 1 on {HOST}: it differs from rank 0 in ")
    assert "phases.0.fine-tune.learning_rate (0.5, there 0.0" in line, line
    assert "deepspeed.bf16.enabled (True, there " in line, line
    assert "Traceback" not in first[2] + second[2]
    assert not (folder / "recipe.yaml").exists()


def test_a_rank_that_reads_another_teacher_is_refused(toy_settings, warm, tmp_path):
    """A hub cache of its host's own, or a copy: half of a cache would be another teacher's."""
    hosts = {rank: tmp_path / f"host-{rank}" for rank in (0, 1)}
    for host in hosts.values():
        make_toy_classifier(host / "teacher")
    break_word(hosts[1] / "teacher", BertForSequenceClassification, "snow")
    teachers = {**toy_settings["teachers"], "first": {"model": "/proc/self/cwd/teacher"}}
    recipe = written({**toy_settings, "teachers": teachers}, tmp_path)
    ranks = Ranks(recipe, warm, "timeout_minutes=1")
    folder = tmp_path / "run"
    first, second = results(ranks.start(folder, rank_folders=hosts), 300)
    assert (first[0], second[0]) == (2, 2), (first, second)
    line = last(second[2])
    start = f"ds-distill: rank 1 on {HOST}: it differs from rank 0 in "
    assert line.startswith(f"{start}teachers.first.model ("), line
    assert not (folder / "recipe.yaml").exists()


def test_a_folder_is_of_one_run(ranks, tmp_path):
    folder = tmp_path / "run"
    started = ranks.start(folder)
    wait_for_steps(folder, 3, started)
    # Another run, of as many ranks or of one, is refused the folder.
    for more, own in (((), (0, 1)), (("--resume",), (0,))):
        others = results(ranks.start(folder, *more, ranks=own, size=len(own)), 300)
        assert [code for code, *_ in others] == [2] * len(own), others
        errors = "".join(text for *_, text in others)
        assert f"is in use by process {started[0].pid} on host {HOST}" in errors
        assert "Traceback" not in errors
    wait_for_steps(folder, 3, started)
    assert first_failure(folder) is None
    # One that is killed is named at once by the other one.
    started[0].send_signal(SIGKILL)
    at = time.monotonic()
    _, (code, _, errors) = results(started, 200)
    assert code == 1 and time.monotonic() - at < LIMIT
    line = f"ds-distill: rank 0 on {HOST}: its process ended without an error of its own"
    assert last(errors).startswith(line), errors
    assert "Traceback" not in errors
    assert first_failure(folder).rank == 0
