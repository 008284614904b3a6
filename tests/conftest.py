"""Shared fixtures: real data where they are, tiny models, a toy task that is learnt in seconds."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import budget
import hypothesis
import numpy as np
import psutil
import pytest
from processes import ended
from toys import (
    TOY_WORDS,
    make_tiny_bert,
    make_tiny_deberta,
    make_tiny_roberta,
    recipe_of,
    toy_vocabulary,
    write_toy_task,
    write_toy_vocabs,
)
from warm import Warm

if TYPE_CHECKING:
    from ds_distill.engine.world import World

SHARED_DATA = Path(
    os.environ.get("DS_DISTILL_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data")
)

# No test asks the hub, and deepspeed is not to look for accelerators in the small processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes is no property of the code: a busy machine takes several times as long.
# Which examples are drawn is the same in each run; HYPOTHESIS_PROFILE=random draws anew, and a
# failure then prints how its example is had again.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: torch's threads would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    budget.register(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is loaded by now stays: the garbage collector need not look at it hundreds of times."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # at the end what is left is told to leak


TEST = pytest.StashKey[str]()
"""Of a session: the test that is run."""


def seed_generators(name: str) -> None:
    """Those of the whole process, from a test's or fixture's name: what a test draws does not
    depend on which ran before it."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[TEST] = item.nodeid
    seed_generators(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fixture that several tests share is the same whichever of them asks first, and that one
    draws what it would without having asked first."""
    if fixturedef.scope == "function":
        return (yield)
    seed_generators(f"{fixturedef.baseid}::{fixturedef.argname}")
    try:
        return (yield)
    finally:
        seed_generators(request.config.stash[TEST])


@pytest.fixture
def parts_as_before() -> Iterator[None]:
    """Takes out again what a test's classes have put among the parts."""
    from ds_distill.recipe.codecs import CODECS
    from ds_distill.recipe.data import SOURCES
    from ds_distill.recipe.metrics import METRICS
    from ds_distill.recipe.phases import PHASES
    from ds_distill.recipe.policies import POLICIES
    from ds_distill.recipe.tasks import TASKS
    from ds_distill.recipe.terms import TERMS

    with ExitStack() as restored:
        for table in (PHASES, TERMS, POLICIES, CODECS, SOURCES, TASKS, *METRICS.values()):
            restored.enter_context(patch.dict(table))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """A process that a test started and left would keep pytest from ending."""
    yield
    left = psutil.Process().children(recursive=True)
    told = [" ".join(process.cmdline()[:8]) or process.name() for process in left]
    for process in left:
        process.kill()
    assert not told, told


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets and vocabularies."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no shared data in {SHARED_DATA}; set DS_DISTILL_SHARED_DATA")
    return SHARED_DATA


@pytest.fixture(scope="session")
def vocabs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of vocabularies by name: the published ones where they are, else toy ones of the
    same kinds. A test of what is true of the published ones alone asks for `shared_data` too."""
    published = SHARED_DATA / "vocabs"
    if published.is_dir():
        return published
    return write_toy_vocabs(tmp_path_factory.mktemp("vocabs"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, vocabs: Path) -> dict[str, Path]:
    """Folders of random encoders, two layers of width 32. `toy` has the words of the toy task
    alone; `bert`, `roberta` and `deberta` have the vocabularies of `vocabs`."""
    root = tmp_path_factory.mktemp("models")
    words = (vocabs / "bert-base-uncased" / "vocab.txt").read_text(encoding="utf-8")
    return {
        "toy": make_tiny_bert(root / "toy", toy_vocabulary()),
        "bert": make_tiny_bert(root / "bert", words.splitlines()),
        "roberta": make_tiny_roberta(root / "roberta", vocabs / "roberta-base"),
        "deberta": make_tiny_deberta(root / "deberta", vocabs / "deberta-v3-base"),
    }


@pytest.fixture(scope="session")
def vocabularies(vocabs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tokenizers with the vocabularies of `vocabs`."""
    from transformers import AutoTokenizer, RobertaTokenizer

    kinds = {"bert-base-cased": "bert", "pubmedbert-uncased": "bert", "albert-base": "albert"}
    kinds |= {"deberta-v3-base": "deberta-v2", "roberta-base": "roberta"}
    root = tmp_path_factory.mktemp("vocabularies")
    for name, kind in kinds.items():
        folder = root / name
        shutil.copytree(vocabs / name, folder, copy_function=shutil.copyfile)
        folder.chmod(0o755)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        if kind == "roberta":
            files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
            RobertaTokenizer(*files).save_pretrained(folder)
        else:
            lower = {"do_lower_case": "uncased" in name} if kind == "bert" else {}
            AutoTokenizer.from_pretrained(folder, **lower).save_pretrained(folder)
    return {name: root / name for name in kinds}


@pytest.fixture(scope="session")
def toy_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a learnable toy classification; tests must not change it."""
    return write_toy_task(tmp_path_factory.mktemp("task") / "toy")


@pytest.fixture(scope="session")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of each kind of task and two models, as golden/materials.py writes it."""
    from materials import write_materials

    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder)
    for task in ("words", "spans"):  # has no split to measure expertise on
        shutil.copy(folder / task / "test.jsonl", folder / task / "validation.jsonl")
    return folder


@pytest.fixture(scope="session")
def toy_settings(toy_task: Path, tiny_models: dict[str, Path]) -> dict[str, Any]:
    """The toy recipe as data: two experts, two students, seconds on one core. Copy, then change."""
    return recipe_of("toy", task=toy_task, toy=tiny_models["toy"])


@pytest.fixture
def toy_recipe(tmp_path: Path, toy_settings: dict[str, Any]) -> Path:
    """A recipe file for the toy task: fine-tune, expertise, cache, distil, evaluate."""
    import yaml

    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_settings, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def masked_lm_settings(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]
) -> dict[str, Any]:
    """A masked-LM recipe as data. A text repeats one word, so that a masked token
    can be predicted from its neighbours."""
    folder = tmp_path_factory.mktemp("texts")
    words = " ".join(TOY_WORDS.values()).split()
    draw = random.Random(0)
    for split, size in {"train": 240, "validation": 40, "test": 60}.items():
        lines = [" ".join([draw.choice(words)] * draw.randint(5, 12)) for _ in range(size)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return recipe_of("toy-masked-lm", texts=folder, toy=tiny_models["toy"])


NOTHING: Mapping[str, str] = MappingProxyType({})
CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def warm(command_environment: dict[str, str]) -> Iterator[Warm]:
    """A process that has the libraries loaded, for forks."""
    process = Warm(command_environment)
    yield process
    process.close()


@pytest.fixture(scope="session")
def ds_distill(warm: Warm) -> CommandLine:
    """Run `ds-distill` with captured output in a process that must end with `code`: a fork, but
    for commands that start ranks. env: more of the environment."""

    def run(
        *given: str | Path, code: int = 0, env: Mapping[str, str] = NOTHING, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        arguments, environment = [*map(str, given)], {**warm.environment, **env}
        if {"launch", "--num-gpus"} & {*arguments}:
            command = [sys.executable, "-m", "ds_distill", *arguments]
            return ended(*command, code=code, env=environment, **how)
        done = warm.run(arguments, environment=environment, **how)
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a process that is a rank."""


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A module's tests may make this process the only rank of a group; the next module's find it
    as it was."""
    before = {name: os.environ[name] for name in GROUP if name in os.environ}
    yield
    if (world := sys.modules.get("ds_distill.engine.world")) is not None:
        world.World.stop()
    for name in GROUP:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as the only rank of a group."""
    from ds_distill.engine.world import World

    yield World.start()
    World.stop()


@pytest.fixture(scope="session")
def command_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process under test: CPU, one thread, its own cache of data, and no
    word of a process group that another test is part of."""
    inherited = {name: value for name, value in os.environ.items() if name not in GROUP}
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_DATASETS_CACHE": str(tmp_path_factory.mktemp("datasets-cache")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def in_this_process(command_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that a test does in its own process are on the CPU, with its own cache of data."""
    for name in ("DS_ACCELERATOR", "HF_DATASETS_CACHE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, command_environment[name])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make a file system of some KiB; skips where that is not allowed."""
    place = tmp_path / "disk"

    def make(kib: int) -> Path:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
        return place

    yield make
    if place.is_mount():
        subprocess.run(["umount", "--lazy", str(place)], check=True)
