"""Collect what run.py needs on a GPU machine without a network, below 64 MiB.

    python tests/gpu/kit.py KIT --texts biomed.txt.gz --vocabulary vocab.txt --python 3.12

Wheels of packages such a machine may lack (torch, triton, transformers, pandas and pyarrow it must
have; without matplotlib, kernels/benchmarks/report.py is run elsewhere), real texts, and BERT's
tokenizer made from its vocabulary file.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
from pathlib import Path

from transformers import BertTokenizer

BINARY = [
    "absl-py", "accelerate", "annotated-types", "datasets", "dill", "einops", "flashdeberta",
    "hjson", "hypothesis", "iniconfig", "jinja2", "liger-kernel", "markdown", "markdown-it-py",
    "markupsafe", "mdurl", "msgpack", "multiprocess", "ninja", "pluggy", "protobuf", "psutil",
    "py-cpuinfo", "pydantic", "pydantic_core", "pygments", "pytest", "pyyaml", "rich",
    "shellingham", "sortedcontainers", "tensorboard", "typer", "typing-inspection",
    "typing_extensions", "werkzeug", "xxhash",
]  # fmt: skip
SOURCE = ["deepspeed", "textbrewer"]
"""Whose wheels have to be made, and hold no compiled code."""
TEXTS = 4000


def pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *map(str, arguments)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kit", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="one text a line, gzip")
    parser.add_argument("--vocabulary", type=Path, required=True, help="BERT's vocab.txt")
    parser.add_argument("--python", default="3.12", help="the GPU machine's")
    given = parser.parse_args()
    given.kit.mkdir(parents=True, exist_ok=True)
    platform = ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
    only = ["--only-binary=:all:", "--python-version", given.python, *platform]
    pip("download", "--no-deps", *only, "-d", given.kit, *BINARY)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", given.kit, *SOURCE)
    with gzip.open(given.texts, "rt") as lines, gzip.open(given.kit / "texts.txt.gz", "wt") as kept:
        kept.writelines(line for line, _ in zip(lines, range(TEXTS), strict=False))
    words = given.vocabulary.read_text(encoding="utf-8").splitlines()
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    tokenizer.save_pretrained(given.kit / "tokenizer")
    (given.kit / "tokenizer" / "config.json").write_text('{"model_type": "bert"}\n')
    size = sum(file.stat().st_size for file in given.kit.rglob("*") if file.is_file())
    print(f"{given.kit}: {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
