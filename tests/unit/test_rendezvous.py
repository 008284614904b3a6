"""Where ranks meet: forks of one small process, without a process group."""

import json
import os
import queue
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import python

from ds_distill.process import watchdog
from ds_distill.process.failures import Failure
from ds_distill.process.identity import free_port
from ds_distill.process.rendezvous import named

HOST = socket.gethostname()

RANKS = """
import json, os, sys, time
import numpy as np
import torch
from ds_distill.process import activity as progress
from ds_distill.process import rendezvous as rendezvous
from ds_distill.process.rendezvous import Rendezvous, RanksMissing, StoreLost

def say(*words):  # in one write, for others write here too
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

ranks, size, limit, what = json.loads(sys.argv[1])
progress.TELL_SECONDS = 0.5
os.environ.update(WORLD_SIZE=str(size), LOCAL_SIZE="2")

def work(rank):
    os.environ["RANK"] = str(rank)
    try:
        ranks_met = Rendezvous.join(limit)
        if what == "late" and rank == 2:
            time.sleep(2)
        if what == "failure" and rank == 2:
            ranks_met.store.set(rendezvous.FAILURE, "it")
            time.sleep(2)
            return
        if what == "judge":
            judge(ranks_met)
        for _ in range(20):
            ranks_met.barrier(lambda missing: say("waiting for", missing))
        if rank == 0:
            time.sleep(1)  # the store ends with this process
    except (RanksMissing, StoreLost) as error:
        say(rank, type(error).__name__, error)
        if rank == 0:
            time.sleep(2)

def judge(ranks_met):
    # Rank 0 takes an interval, which lasts longer than a rank may go without a sign of progress;
    # each of its parts is far shorter.
    from ds_distill.evaluation import bootstrap
    from ds_distill.recipe.metrics.metric import MeanMetric
    from ds_distill.process.watchdog import Watchdog

    class Slow(MeanMetric):
        def counts(self, values):
            return np.stack([values, np.ones_like(values)], axis=1)

        def difference(self, sums):
            time.sleep(0.15)
            return super().difference(sums)

    def ended(failure, where):
        say(failure)
        os._exit(1)

    watchdog = Watchdog(ranks_met, 1.5, ended)
    watchdog.start()
    text = None
    if ranks_met.rank == 0:
        bootstrap._AT_ONCE = 1
        one, other = np.array([1.0, 1.0]), np.zeros(2)
        found = bootstrap.paired_interval(one, other, Slow(None, ()), resamples=20)
        text = json.dumps(found)
    say(ranks_met.rank, ranks_met.from_main(text))
    watchdog.stop()

children = []
for rank in ranks:
    if (child := os.fork()) == 0:
        work(rank)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


def run_ranks(ranks, size, limit, what="", port=None):
    """The lines that ranks print."""
    port = port or free_port()
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    own["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = python(RANKS, json.dumps([ranks, size, limit, what]), env={**os.environ, **own})
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def test_an_exchange_that_is_stuck_ends_the_run(monkeypatch):
    """A rank whose store neither answers nor breaks off, as where the network swallows all."""
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.1)
    let_go, failures = threading.Event(), queue.Queue[Failure]()
    process = SimpleNamespace(host="there", is_alive=lambda: None)
    store = SimpleNamespace(set=lambda key, value: let_go.wait(), check=lambda keys: False)
    ranks = SimpleNamespace(rank=1, processes=[process, process], connect=lambda: store)
    watch = watchdog.Watchdog(ranks, 0.5, lambda failure, where: failures.put(failure))
    watch.start()
    failure = failures.get(timeout=20)
    watch.stop()
    let_go.set()
    assert (failure.rank, failure.host) == (0, "there")


def test_ranks_meet_and_wait_for_each_other():
    lines = run_ranks([0, 1, 2, 3], 4, 60, "late")
    assert lines and set(lines) == {f"waiting for rank 2 on {HOST}"}


def test_a_failure_ends_a_wait():
    lines = run_ranks([0, 1, 2], 3, 60, "failure")
    assert {f"{rank} StoreLost another rank has failed" for rank in (0, 1)} <= set(lines)


def test_a_long_interval_of_one_rank_is_no_end_of_the_run():
    """All learn what it found."""
    lines = run_ranks([0, 1], 2, 60, "judge")
    found = sorted(line for line in lines if "waiting" not in line)
    assert found == ["0 [1.0, 1.0]", "1 [1.0, 1.0]"]


def test_those_that_do_not_come_are_named_with_their_hosts():
    """By a rank beside them, else by the number of the node."""
    lines = run_ranks([0, 2], 6, 4)
    missing = f"ranks 1, 3 on {HOST}; ranks 4-5 on node 2"
    assert any(line.startswith(f"ds-distill: waiting for {missing}, at most") for line in lines)
    for rank in (0, 2):
        [line] = [line for line in lines if line.startswith(f"{rank} RanksMissing")]
        assert f"{missing}: did not come within 4 seconds. " in line
        assert f"There are: ranks 0, 2 on {HOST}. " in line


def test_without_rank_0_the_others_name_its_address():
    lines = run_ranks([1], 2, 2)
    assert lines[0].startswith("ds-distill: rank 1 waits for rank 0 at 127.0.0.1:")
    assert lines[-1].startswith("1 RanksMissing rank 0 does not answer at 127.0.0.1:")


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [line] = run_ranks([0], 2, 2, port=port)
    taken = f"cannot listen on port {port}. If another program has it, give the launcher another"
    assert taken in line


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([(0, "a")], "rank 0 on a"),
        ([(0, "a"), (1, "a"), (2, "a"), (5, "b")], "ranks 0-2 on a; rank 5 on b"),
        ([(0, None), (2, None)], "ranks 0, 2"),
    ],
)
def test_ranks_in_words(ranks, text):
    assert named(ranks) == text
