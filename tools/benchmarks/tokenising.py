"""How long a split takes to be tokenised by all cores, against one thread: the same file, by turns.

    python tools/benchmarks/tokenising.py --vocabulary FOLDER --output tests/results/tokenising.json

Texts are drawn from a seed, of 5 to 60 words of the vocabulary. The ratio is of wall time, of pairs
of turns beside each other, so measure on a quiet machine; the result has its load. A tokenizer's
threads are those that `tokenizers` starts by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ds_distill.files import write_json
from ds_distill.run.inputs import describe_environment

ALONE = "--alone"


def one(vocabulary: Path, texts: int, work: Path) -> None:
    """Tokenise, and print the wall and CPU seconds of this process, without its imports."""
    import datasets
    from transformers import BertTokenizer

    from ds_distill.data.tokenise import tokenise

    datasets.disable_progress_bars()
    names = [line for line in vocabulary.read_text(encoding="utf-8").split() if line.isalpha()]
    draw = random.Random(0)
    rows = [" ".join(draw.choices(names, k=draw.randint(5, 60))) for _ in range(texts)]
    tokenizer = BertTokenizer(str(vocabulary))
    examples = datasets.Dataset.from_dict({"text": rows})
    tokenise(examples.select(range(100)), tokenizer, 128, work / "warm.arrow")
    wall, cpu = time.perf_counter(), time.process_time()
    tokenise(examples, tokenizer, 128, work / "tokens.arrow")
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))


def turn(vocabulary: Path, texts: int, threads: bool) -> list[float]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true" if threads else "false"}
    command = [sys.executable, __file__, "--vocabulary", str(vocabulary), "--texts", str(texts)]
    done = subprocess.run(
        [*command, ALONE], env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vocabulary", type=Path, required=True, help="a vocab.txt of BERT's")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument(ALONE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        with tempfile.TemporaryDirectory() as folder:
            one(given.vocabulary, given.texts, Path(folder))
        return
    rows = []
    for number in range(given.turns):
        order = (True, False) if number % 2 else (False, True)
        found = {threads: turn(given.vocabulary, given.texts, threads) for threads in order}
        row: dict[str, Any] = {
            "one_thread": dict(zip(("wall_seconds", "cpu_seconds"), found[False], strict=True)),
            "all_cores": dict(zip(("wall_seconds", "cpu_seconds"), found[True], strict=True)),
            "ratio": found[False][0] / found[True][0],
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    ratios = sorted(row["ratio"] for row in rows)
    summary = {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    print(json.dumps(summary))
    if given.output is not None:
        about = {"environment": describe_environment(1, "cpu"), "load": os.getloadavg()[0]}
        content = {**about, "texts": given.texts, "ratio": summary, "turns": rows}
        write_json(given.output, content)


if __name__ == "__main__":
    main()
