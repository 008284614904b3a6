"""Shared fixtures: real data where they are, tiny models, a toy task that is learnt in seconds."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SHARED_DATA = Path(
    os.environ.get("DS_DISTILL_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data")
)

# No test asks the hub, and deepspeed is not to look for accelerators in the small processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: torch's threads would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

TOY_LABELS = ["animal", "food", "weather"]
TOY_WORDS = {
    "animal": "cat dog horse tiger sparrow whale fox rabbit wolf bear",
    "food": "bread soup apple cheese rice noodle cake salad bean olive",
    "weather": "rain snow wind storm fog hail thunder cloud frost sun",
}
TOY_FILLERS = (
    "the a we they saw had near after before under with of some very old new big small day "
    "night morning today again never often house road river and but then there was is"
)
TOY_SIZES = {"train": 200, "validation": 60, "test": 60, "transfer": 200}


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets and vocabularies."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no shared data in {SHARED_DATA}; set DS_DISTILL_SHARED_DATA")
    return SHARED_DATA


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random encoders, two layers of width 32, with real tokenizers.

    `toy` has the words of the toy task alone; `bert`, `roberta` and `deberta` have the real
    vocabularies where those are, and without them `bert` is made of the toy words.
    """
    root = tmp_path_factory.mktemp("models")
    made = {"toy": make_tiny_bert(root / "toy", toy_vocabulary())}
    vocabularies = SHARED_DATA / "vocabs"
    if not vocabularies.is_dir():
        return {**made, "bert": make_tiny_bert(root / "bert", toy_vocabulary())}
    words = (vocabularies / "bert-base-uncased" / "vocab.txt").read_text(encoding="utf-8")
    made["bert"] = make_tiny_bert(root / "bert", words.splitlines())
    made["roberta"] = make_tiny_roberta(root / "roberta", vocabularies / "roberta-base")
    made["deberta"] = make_tiny_deberta(root / "deberta", vocabularies / "deberta-v3-base")
    return made


TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.1,  # so narrow a model hardly learns from the usual 0.02
}


def toy_vocabulary() -> list[str]:
    """Tokens of a WordPiece vocabulary that knows the toy task's words, and pieces for others."""
    words = [*TOY_FILLERS.split(), *" ".join(TOY_WORDS.values()).split()]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *words, *letters, *(f"##{letter}" for letter in letters), *".,?!"]
    return list(dict.fromkeys(pieces))


def make_tiny_bert(folder: Path, vocabulary: list[str], **config: Any) -> Path:
    from transformers import BertConfig, BertModel, BertTokenizer

    sizes = {**TINY, "max_position_embeddings": 128, **config}
    save_tiny(folder, BertModel, BertConfig(vocab_size=len(vocabulary), **sizes))
    ids = {token: number for number, token in enumerate(vocabulary)}
    BertTokenizer(vocab=ids).save_pretrained(folder)
    return folder


def make_tiny_roberta(folder: Path, vocabulary: Path) -> Path:
    from transformers import RobertaConfig, RobertaModel, RobertaTokenizer

    files = (str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    tokenizer = RobertaTokenizer(*files)
    config = RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=130, type_vocab_size=1, **TINY
    )
    save_tiny(folder, RobertaModel, config)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_deberta(folder: Path, vocabulary: Path) -> Path:
    """As DeBERTa-v3 is built: relative positions only, shared keys, an spm vocabulary."""
    from transformers import AutoTokenizer, DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=128_100,
        max_position_embeddings=128,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        type_vocab_size=0,
        pooler_hidden_size=TINY["hidden_size"],
        **TINY,
    )
    save_tiny(folder, DebertaV2Model, config)
    shutil.copyfile(vocabulary / "spm.model", folder / "spm.model")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def save_tiny(folder: Path, kind: Any, config: Any) -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)


def toy_text(label: str, draw: random.Random) -> str:
    """A sentence with two words of its class among fillers."""
    words = draw.choices(TOY_WORDS[label].split(), k=2)
    words += draw.choices(TOY_FILLERS.split(), k=draw.randint(3, 9))
    draw.shuffle(words)
    return " ".join(words)


def write_toy_task(folder: Path, sizes: dict[str, int] = TOY_SIZES) -> Path:
    """train, validation and test with labels, transfer without, and labels.json."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, size in sizes.items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for number in range(size):
                label = TOY_LABELS[number % len(TOY_LABELS)]
                row = {"text": toy_text(label, draw)}
                if split != "transfer":
                    row["label"] = label
                file.write(json.dumps(row) + "\n")
    (folder / "labels.json").write_text(json.dumps(TOY_LABELS))
    return folder


@pytest.fixture(scope="session")
def toy_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a learnable toy classification; tests must not change it."""
    return write_toy_task(tmp_path_factory.mktemp("task") / "toy")


@pytest.fixture(scope="session")
def toy_settings(toy_task: Path, tiny_models: dict[str, Path]) -> dict[str, Any]:
    """The toy recipe as data: two experts, two students, seconds on one core. Copy, then change."""
    return toy_recipe_data(toy_task, tiny_models["toy"])


def toy_recipe_data(task: Path, model: Path) -> dict[str, Any]:
    return {
        "name": "toy",
        "description": "Two experts and two students of a toy task.",
        "task": {"data": {"path": str(task)}, "max_length": 32},
        "teachers": {"first": {"model": str(model)}, "second": {"model": str(model)}},
        "student": {"model": str(model), "layers": [0]},
        "training": {"batch_size": 16, "learning_rate": 1.0e-2, "epochs": 6},
        "phases": [
            {
                "fine-tune": {
                    "name": "teach-first",
                    "models": "first",
                    "focus": {"classes": ["animal", "food"], "share_of_others": 0.1},
                }
            },
            {
                "fine-tune": {
                    "name": "teach-second",
                    "models": "second",
                    "focus": {"classes": ["weather", "food"], "share_of_others": 0.1},
                }
            },
            {"expertise": {"split": "validation"}},
            {"cache": {"splits": "transfer"}},
            {
                "distil": {
                    "split": "transfer",
                    "teachers": "cached",
                    "routing": ["average", "expertise"],
                    "losses": {"kl": {"temperature": 2.0}},
                }
            },
            {"evaluate": {"split": "test"}},
        ],
        "logging": {"every": 5},
        "deepspeed": "zero1_fp32",
    }


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
    """A masked-LM recipe as data. A text says one word again and again, so that a hidden token
    can be told by its neighbours."""
    folder = tmp_path_factory.mktemp("texts")
    words = " ".join(TOY_WORDS.values()).split()
    draw = random.Random(0)
    for split, size in {"train": 240, "validation": 40, "test": 60}.items():
        lines = [" ".join([draw.choice(words)] * draw.randint(5, 12)) for _ in range(size)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return {
        "name": "toy-masked-lm",
        "description": "A masked-LM teacher and half of its layers.",
        "task": {
            "type": "masked-lm",
            "data": {"path": str(folder)},
            "max_length": 32,
            "masking": {"rate": 0.2, "seed": 1},
        },
        "teachers": {"bert": {"model": str(tiny_models["toy"])}},
        "student": {"model": str(tiny_models["toy"]), "layers": [0]},
        "training": {"batch_size": 16, "learning_rate": 1.0e-2, "epochs": 4, "dropout": 0.0},
        "phases": [
            {"fine-tune": {"models": "bert"}},
            {"distil": {"losses": {"cross_entropy": {"weight": 0.5}, "kl": {"temperature": 2.0}}}},
            {"evaluate": {"split": "test"}},
        ],
        "logging": {"every": 1},
        "deepspeed": "zero1_fp32",
    }


CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def ds_distill(command_environment: dict[str, str]) -> CommandLine:
    """Run `ds-distill` in a process of its own, with captured output."""

    def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        extra = options.pop("env", {})
        return subprocess.run(
            [sys.executable, "-m", "ds_distill", *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**command_environment, **extra},
            **{"timeout": 300, **options},
        )

    return run


@pytest.fixture(scope="session")
def command_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process under test: CPU, one thread, its own cache of data, and no
    word of a process group that another test is part of."""
    group = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in group}
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_DATASETS_CACHE": str(tmp_path_factory.mktemp("datasets-cache")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


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
