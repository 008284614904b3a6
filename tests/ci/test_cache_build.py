"""`ds-distill cache build`: killed and continued, on other numbers of ranks, in a shared folder."""

import copy
import json
import math
import shlex
import shutil
import signal
import time

import pytest
import torch
from cache_files import block_checksums, contents
from processes import Process, kill_all
from runs import Runs, command_line, logged, written
from toys import make_toy_classifier, write_toy_task
from transformers import BertForSequenceClassification

from ds_distill.cache.build_plan import BUILDING
from ds_distill.cache.reader import CacheReader
from ds_distill.errors import UserError

EXAMPLES = 3200
SIZES = dict.fromkeys(("train", "validation", "test"), 9)
BLOCKS = 2 * 13  # of 256 examples, for each teacher


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Classifiers of the toy task with random weights: there is nothing to train before."""
    made = {}
    for name, factor in {"first": 1.0, "second": 2.0, "wild": 1e7, "broken": math.nan}.items():
        made[name] = make_toy_classifier(tmp_path_factory.mktemp("teachers") / name)
        model = BertForSequenceClassification.from_pretrained(made[name])
        with torch.no_grad():
            model.classifier.weight.mul_(factor)
        model.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def settings(toy_settings, classifiers, tmp_path_factory):
    """The toy recipe with teachers that are trained, and a transfer set of 3,200 texts."""
    sizes = {**SIZES, "transfer": EXAMPLES}
    task = write_toy_task(tmp_path_factory.mktemp("task") / "toy", sizes)
    made = copy.deepcopy(toy_settings)
    made["task"]["data"] = {"path": str(task)}
    made["teachers"] = {name: {"model": str(classifiers[name])} for name in ("first", "second")}
    distil = {"split": "transfer", "teachers": "cached", "routing": "average", "losses": {"kl": {}}}
    made["phases"] = [{"cache": {"splits": "transfer", "batch_size": 8}}, {"distil": distil}]
    return made


@pytest.fixture(scope="module")
def builds(settings, warm, tmp_path_factory):
    """`cache build` of one recipe on some ranks."""
    recipe = written(settings, tmp_path_factory.mktemp("recipe"))

    def on(ranks):
        runs = Runs(recipe, warm, None)
        on_ranks = ["--num-gpus", str(ranks)] if ranks > 1 else []
        runs.arguments = ["cache", "build", str(recipe), *on_ranks]
        return runs

    return on


def finish(build, folder):
    """Returns the event that the build began with."""
    build.finish(folder)
    return logged(folder, "cache")[-1]


def blocks_are_written(share):
    return lambda folder: blocks(folder) >= share * BLOCKS


def cache_of(folder):
    return folder / "cache" / "00-cache"


def blocks(folder):
    """Those that are there."""
    return len(list(cache_of(folder).glob("*/shard-*.arrow")))


@pytest.fixture(scope="module")
def whole(builds, tmp_path_factory):
    """The build that nothing happened to, on two ranks."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    event = finish(builds(2), folder)
    assert (event["blocks"], event["kept"]) == (BLOCKS, 0)
    assert blocks(folder) == BLOCKS
    return cache_of(folder)


def check_whole(cache, whole):
    """The same rows with the same bytes, whatever files they lie in."""
    assert block_checksums(cache) == block_checksums(whole)
    CacheReader(cache).verify()
    assert not (cache / BUILDING).exists()


def test_a_build_that_was_stopped_at_half_goes_on(builds, whole, tmp_path):
    folder, build = tmp_path / "run", builds(2)
    code, output = build.stop(folder, blocks_are_written(0.5), False, Process.terminate)
    assert code == 75 and build.left() == [], output
    line = output.splitlines()[-1]
    assert line.startswith(f"ds-distill: stopped by SIGTERM. {folder} keeps what was written.")
    assert line.endswith(shlex.join(["ds-distill", *build.arguments, "--folder", str(folder)]))
    stopped = blocks(folder)
    assert stopped < BLOCKS
    shutil.copytree(folder, tmp_path / "alone", symlinks=True)
    event = finish(build, folder)
    assert event["kept"] >= stopped and event["kept"] >= 0.4 * event["blocks"]
    check_whole(cache_of(folder), whole)
    # The same on another number of ranks.
    event, alone = finish(builds(1), tmp_path / "alone"), cache_of(tmp_path / "alone")
    assert event["kept"] >= stopped and event["blocks"] == BLOCKS
    check_whole(alone, whole)
    assert (alone / "index-13.arrow").read_bytes() == (whole / "index-13.arrow").read_bytes()


@pytest.fixture
def workers(builds, tmp_path):
    """Start a worker of the cache tmp_path / "shared"."""
    started = []

    def start(ranks=1):
        folder = f"phases.cache.folder={tmp_path / 'shared'}"
        started.append(builds(ranks).begin(tmp_path, "--worker", folder))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            kill_all(process)


def wait_for_claims(cache, count, worker):
    """Of blocks."""
    while len(list((cache / BUILDING).glob("*/*.lock"))) < count:
        assert worker.poll() is None, worker.communicate()[0]
        time.sleep(0.001)


def test_what_a_killed_worker_leaves_is_written_by_those_that_come_later(workers, whole, tmp_path):
    shared = tmp_path / "shared"
    first = workers()
    wait_for_claims(shared, 5, first)
    first.send_signal(signal.SIGSTOP)
    before = len(list((shared / BUILDING).glob("*/*.lock")))
    second = workers(ranks=2)
    wait_for_claims(shared, before + 2, second)  # it works beside the one that gives no sign
    kill_all(first)
    output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output
    check_whole(shared, whole)
    assert len(list((tmp_path / "runs").iterdir())) == 1, "that of the killed one"


def test_a_worker_of_several_ranks_is_told_its_folder(
    settings, in_this_process, monkeypatch, tmp_path
):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    arguments = ["--worker", f"phases.cache.folder={tmp_path / 'shared'}"]
    with pytest.raises(UserError, match="name it by --folder"):
        command_line("cache", "build", written(settings, tmp_path), *arguments)
    assert not (tmp_path / "shared").exists()


# --------------------------------------------------------------- a folder that is shared


def test_runs_that_share_a_folder_only_add_what_is_missing(settings, ds_distill, tmp_path):
    task = write_toy_task(tmp_path / "task", {**SIZES, "transfer": 60})
    few = (task / "transfer.jsonl").read_text()
    shared = copy.deepcopy(settings)
    shared["task"]["data"] = {"path": str(task)}
    shared["phases"][0]["cache"]["folder"] = str(tmp_path / "shared")

    def build(name):
        recipe, folder = written({**shared, "name": name}, tmp_path, name), tmp_path / "runs" / name
        ds_distill("cache", "build", recipe, "--folder", folder)
        return json.loads((folder / "phases" / "00-cache.json").read_text())

    first = build("first")
    distinct = len(set(few.splitlines()))
    assert first["examples"] == first["added"] == distinct
    # Logits of fp16 are right to 1e-3 of a few units; the teacher's own sums are fp32.
    for near in first["fidelity"].values():
        assert 0 <= near["kl"] < 1e-5 and near["lost"] < 1e-4
    before = contents(tmp_path / "shared")
    # Another recipe of the same teachers and data: other phases, another seed.
    shared["seed"] = 7
    assert build("second")["added"] == 0
    assert contents(tmp_path / "shared") == before
    # More data, some of it twice; the splits share an example.
    extra = [json.dumps({"text": f"the cat had soup {number}"}) for number in range(20)]
    (task / "transfer.jsonl").write_text("\n".join([*extra, *extra[:5], few]))
    shared["phases"][0]["cache"]["splits"] = ["transfer", "validation"]
    validation = {json.loads(line)["text"] for line in (task / "validation.jsonl").open()}
    third = build("third")
    texts = {json.loads(line)["text"] for line in few.splitlines()}
    assert third["added"] == 20 + len(validation - texts)
    assert third["examples"] == distinct + third["added"]
    after = contents(tmp_path / "shared")
    shards = [name for name in before if "shard" in name]
    assert {name: after[name] for name in shards} == {name: before[name] for name in shards}
    reader = CacheReader(tmp_path / "shared")
    reader.verify()
    assert reader.manifest.examples == third["examples"]
    # A teacher that is another one now is refused, and nothing is touched.
    shared["teachers"]["first"] = shared["teachers"]["second"]
    other = written({**shared, "name": "other"}, tmp_path, "other")
    done = ds_distill("cache", "build", other, "--folder", tmp_path / "other", code=2)
    assert "teacher 'first' was cached with weights" in done.stderr
    assert contents(tmp_path / "shared") == after


@pytest.mark.parametrize(
    ("teacher", "mend"),
    [
        ("wild", "in float16 alone: set the cache phase's dtype to float32"),
        ("broken", "Its weights are damaged"),
    ],
)
def test_signals_that_are_not_finite_are_refused_with_their_locations(
    teacher, mend, settings, classifiers, ds_distill, tmp_path
):
    task = write_toy_task(tmp_path / "task", {**SIZES, "transfer": 9})
    made = {**copy.deepcopy(settings), "teachers": {"t": {"model": str(classifiers[teacher])}}}
    made["task"]["data"] = {"path": str(task)}
    done = ds_distill(
        "cache", "build", written(made, tmp_path), "--folder", tmp_path / "run", code=2
    )
    assert mend in done.stderr and "teachers.t: " in done.stderr
    places = [f"{task / 'transfer.jsonl'}:{number} " for number in range(1, 10)]
    assert sum(place in done.stderr for place in places) == 3, done.stderr
    assert not (cache_of(tmp_path / "run") / "manifest.json").exists()
