"""`ds-distill cache build`: killed and continued, on other numbers of ranks, in a shared folder."""

from __future__ import annotations

import copy
import json
import math
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cache_files import block_checksums, contents
from processes import Process, events, kill_all
from runs import DS_DISTILL, Moment, Runs
from toys import make_toy_classifier, write_toy_task
from transformers import BertForSequenceClassification

from ds_distill.cache.build_plan import BUILDING
from ds_distill.cache.reader import CacheReader
from ds_distill.cli import app
from ds_distill.errors import UserError

EXAMPLES = 3200
BLOCKS = 2 * 13  # of 256 examples, for each teacher


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
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
def settings(
    toy_settings: dict[str, Any],
    classifiers: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """The toy recipe with teachers that are trained, and a transfer set of 3,200 texts."""
    sizes = {"train": 9, "validation": 9, "test": 9, "transfer": EXAMPLES}
    task = write_toy_task(tmp_path_factory.mktemp("task") / "toy", sizes)
    made = copy.deepcopy(toy_settings)
    made["task"]["data"] = {"path": str(task)}
    made["teachers"] = {name: {"model": str(classifiers[name])} for name in ("first", "second")}
    made["phases"] = [
        {"cache": {"splits": "transfer", "batch_size": 8}},
        {
            "distil": {
                "split": "transfer",
                "teachers": "cached",
                "routing": "average",
                "losses": {"kl": {"temperature": 2.0}},
            }
        },
    ]
    return made


class Builds:
    """`cache build` of one recipe on some ranks."""

    def __init__(self, recipe: Path, environment: dict[str, str]) -> None:
        self.recipe, self.environment = recipe, environment

    def on(self, ranks: int) -> Runs:
        runs = Runs(self.recipe, self.environment, None)
        on_ranks = ["--num-gpus", str(ranks)] if ranks > 1 else []
        runs.arguments = ["cache", "build", str(self.recipe), *on_ranks]
        return runs

    def finish(self, folder: Path, ranks: int) -> dict[str, Any]:
        """Returns the event that the build began with."""
        self.on(ranks).finish(folder)
        return [event for event in events(folder) if event["event"] == "cache"][-1]

    def kill(self, folder: Path, ranks: int, share: float) -> None:
        """Kill a build when this share of the blocks is written."""
        assert self.on(ranks).kill(folder, blocks_are_written(share), resume=False)

    def stop(self, folder: Path, ranks: int, share: float) -> int:
        """The same with SIGTERM to the process that was started. Returns how many were written."""
        runs = self.on(ranks)
        code, output = runs.stop(folder, blocks_are_written(share), False, Process.terminate)
        assert code == 75, output
        assert runs.left() == []
        line = output.splitlines()[-1]
        assert line.startswith(f"ds-distill: stopped by SIGTERM. {folder} keeps what was written.")
        assert line.endswith(shlex.join(["ds-distill", *runs.arguments, "--folder", str(folder)]))
        return written(folder)


def blocks_are_written(share: float) -> Moment:
    return lambda folder: written(folder) >= share * BLOCKS


def cache_of(folder: Path) -> Path:
    return folder / "cache" / "00-cache"


def written(folder: Path) -> int:
    """Blocks that are there."""
    return len(list(cache_of(folder).glob("*/shard-*.arrow")))


@pytest.fixture(scope="module")
def builds(
    settings: dict[str, Any],
    command_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Builds:
    recipe = tmp_path_factory.mktemp("recipe") / "toy.yaml"
    recipe.write_text(yaml.safe_dump(settings, sort_keys=False))
    return Builds(recipe, command_environment)


@pytest.fixture(scope="module")
def whole(builds: Builds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build that nothing happened to, on two ranks."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    event = builds.finish(folder, ranks=2)
    assert (event["blocks"], event["kept"]) == (BLOCKS, 0)
    assert written(folder) == BLOCKS
    return folder


def test_a_build_that_was_stopped_at_half_goes_on(builds, whole, tmp_path):
    killed = builds.stop(tmp_path / "run", ranks=2, share=0.5)
    assert killed < BLOCKS
    shutil.copytree(tmp_path / "run", tmp_path / "alone", symlinks=True)
    event = builds.finish(tmp_path / "run", ranks=2)
    assert event["kept"] >= killed and event["kept"] >= 0.4 * event["blocks"]
    assert block_checksums(cache_of(tmp_path / "run")) == block_checksums(cache_of(whole))
    CacheReader(cache_of(tmp_path / "run")).verify()
    # The same on another number of ranks: other files, the same rows with the same bytes.
    event = builds.finish(tmp_path / "alone", ranks=1)
    assert event["kept"] >= killed and event["blocks"] == BLOCKS
    alone = cache_of(tmp_path / "alone")
    CacheReader(alone).verify()
    assert block_checksums(alone) == block_checksums(cache_of(whole))
    assert (alone / "index-13.arrow").read_bytes() == (
        cache_of(whole) / "index-13.arrow"
    ).read_bytes()
    assert not (alone / BUILDING).exists()


@pytest.fixture
def workers(settings, builds, tmp_path) -> Iterator[Callable[..., Process]]:
    """Start a worker of the cache tmp_path / "shared"."""
    shared = copy.deepcopy(settings)
    shared["phases"][0]["cache"]["folder"] = str(tmp_path / "shared")
    recipe = tmp_path / "shared.yaml"
    recipe.write_text(yaml.safe_dump(shared))
    started = []

    def start(ranks: int = 1) -> Process:
        command = [*DS_DISTILL, "cache", "build", str(recipe), "--worker"]
        started.append(
            subprocess.Popen(
                [*command, *(["--num-gpus", str(ranks)] if ranks > 1 else [])],
                env=builds.environment,
                cwd=tmp_path,
                start_new_session=True,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            kill_all(process)


def claimed(cache: Path) -> int:
    return len(list((cache / BUILDING).glob("*/*.lock")))


def test_what_a_killed_worker_leaves_is_written_by_those_that_come_later(workers, whole, tmp_path):
    shared = tmp_path / "shared"
    first = workers()
    while claimed(shared) < 5:
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)
    before = claimed(shared)
    second = workers(ranks=2)
    while claimed(shared) < before + 2:  # it works beside the one that gives no sign
        assert second.poll() is None, second.communicate()[0]
        time.sleep(0.001)
    kill_all(first)
    output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output
    assert block_checksums(shared) == block_checksums(cache_of(whole))
    CacheReader(shared).verify()
    assert not (shared / BUILDING).exists()
    assert len(list((tmp_path / "runs").iterdir())) == 1, "that of the killed one"


def test_workers_need_a_cache_that_all_see_and_teachers_that_are_there(
    settings, toy_settings, in_this_process, monkeypatch, tmp_path
):
    def refused(made, *more):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
        command = ["cache", "build", str(tmp_path / "recipe.yaml"), "--worker", *more]
        with pytest.raises(UserError) as refusal:
            app(command, standalone_mode=False)
        return str(refusal.value)

    assert "phases.cache.folder is not set" in refused(settings)
    message = "comes before the cache, and each worker would run it again"
    assert message in refused(toy_settings)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    shared = f"phases.cache.folder={tmp_path / 'shared'}"
    assert "name it by --folder" in refused(settings, shared)
    assert not (tmp_path / "shared").exists()


# --------------------------------------------------------------- a folder that is shared


def test_runs_that_share_a_folder_only_add_what_is_missing(settings, ds_distill, tmp_path):
    task = write_toy_task(
        tmp_path / "task", {"train": 9, "validation": 9, "test": 9, "transfer": 60}
    )
    few = (task / "transfer.jsonl").read_text()
    shared = copy.deepcopy(settings)
    shared["task"]["data"] = {"path": str(task)}
    shared["phases"][0]["cache"]["folder"] = str(tmp_path / "shared")

    def build(name: str) -> dict[str, Any]:
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**shared, "name": name}))
        folder = tmp_path / "runs" / name
        done = ds_distill("cache", "build", tmp_path / f"{name}.yaml", "--folder", folder)
        assert done.returncode == 0, done.stdout + done.stderr
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
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**shared, "name": "other"}))
    done = ds_distill("cache", "build", tmp_path / "other.yaml", "--folder", tmp_path / "other")
    assert done.returncode == 2 and "teacher 'first' was cached with weights" in done.stderr
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
    task = write_toy_task(
        tmp_path / "task", {"train": 9, "validation": 9, "test": 9, "transfer": 9}
    )
    made = {**copy.deepcopy(settings), "teachers": {"t": {"model": str(classifiers[teacher])}}}
    made["task"]["data"] = {"path": str(task)}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(made))
    done = ds_distill("cache", "build", tmp_path / "bad.yaml", "--folder", tmp_path / "run")
    assert done.returncode == 2 and mend in done.stderr and "teachers.t: " in done.stderr
    places = [f"{task / 'transfer.jsonl'}:{number} " for number in range(1, 10)]
    assert sum(place in done.stderr for place in places) == 3, done.stderr
    assert not (cache_of(tmp_path / "run") / "manifest.json").exists()
