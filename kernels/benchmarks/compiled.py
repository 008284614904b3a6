"""What the compiler makes of every launch: a JSON file, and a table beside it.

PYTHONPATH=kernels python kernels/benchmarks/compiled.py [--targets sm_90] [--before FILE.json]

Nothing runs on a GPU. Counts are exact, and the same again under the same Triton. --before takes an
earlier file, whose figures stand beside the new ones.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from compiling import TARGETS, Compiled, Launch
from launches import COUNTED, ROWS, calls, each

RESULTS = Path(__file__).parent / "results"
# An H100 SXM: warps issued a second (132 multiprocessors of 4 schedulers at 1.98 GHz), elements of
# exponentials a second (16 a multiprocessor and cycle), copied bytes a second, and its L2 cache.
ISSUED, SPECIAL, COPIED, CACHE = 132 * 4 * 1.98e9, 132 * 16 * 1.98e9, 2.9e12, 50 << 20
_launches: list[tuple[Launch, str]] = []


def compile_one(index: int) -> Compiled | str | None:
    launch, target = _launches[index]
    try:
        return launch.compile(target)
    except Exception as failure:  # the compiler's own
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:200]


def rows_of(targets: list[str]) -> list[dict[str, Any]]:
    rows = []
    for target in targets:
        for call in calls():
            for launch in call.launches(target):
                _launches.append((launch, target))
                rows.append(
                    {
                        "op": call.op,
                        "shape": call.shape,
                        "dtype": str(call.dtype).removeprefix("torch."),
                        "kernel": launch.kernel.__name__.strip("_"),
                        "mode": launch.arguments.get("MODE"),
                        "target": target,
                    }
                )
    with multiprocessing.get_context("fork").Pool() as pool:  # launches cannot be pickled
        for number, found in enumerate(pool.imap(compile_one, range(len(rows)), 1)):
            row, launch = rows[number], _launches[number][0]
            if isinstance(found, Compiled):
                row |= {key: value for key, value in asdict(found).items() if key != "kernel"}
                row["each"] = each(launch, found)
            else:
                row["failed" if found else "compiles"] = found or True
            print(number + 1, "of", len(rows), *list(row.values())[:6], row.get("each"), flush=True)
    return rows


def limit(rows: list[dict[str, Any]], counted: int, others: int) -> float:
    """The modelled time of masked_kl both ways over that of its least bytes: of each pass the
    longest of what is issued, the exponentials, and the bytes.

    rows: its forward and backward launch, of one target. counted, others: rows of logits.
    """
    width, size = int(rows[0]["shape"].removeprefix("V=")), 4 if "32" in rows[0]["dtype"] else 2
    pairs = counted * width
    programs = 132 * max(1, round(rows[0]["occupancy"] * 2048 / rows[0]["loops"][0]["threads"]))
    again = 0 if 2 * size * width * min(programs, counted) <= CACHE else 2 * size
    forward, backward = rows
    passes = [
        (forward["each"][0], 2, 2 * size * pairs),
        (forward["each"][1], 2, again * pairs),
        (backward["each"][-1], 2, 3 * size * pairs + size * others * width),
    ]
    seconds = sum(
        max(pairs * instructions / 32 / ISSUED, pairs * special / SPECIAL, moved / COPIED)
        for instructions, special, moved in passes
    )
    return seconds / ((5 * size * pairs + size * others * width) / COPIED)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("target", "op", "shape", "dtype", "kernel", "mode"))


def limits(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """By target, vocabulary and dtype: of 15% of the rows, and of these alone."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["op"] == "masked_kl" and row.get("loops"):
            found.setdefault((row["target"], row["shape"], row["dtype"]), []).append(row)
    return {
        name: (limit(pair, COUNTED, ROWS - COUNTED), limit(pair, COUNTED, 0))
        for name, pair in found.items()
        if len(pair) == 2
    }


def table(result: dict[str, Any], before: dict[str, Any] | None) -> str:
    rows, old = result["rows"], {key(row): row for row in before["rows"]} if before else {}
    lines = [
        f"# What Triton {result['triton']} makes of the kernels, {result['date']}",
        "",
        "Compiled on a CPU, never run on a GPU. Instructions of a thread per pair of logits, per "
        "score, or per pair of states, in each loop; bytes of its loads and stores; spilled bytes "
        "of a thread; occupancy: warps that fit. "
        + (f"In brackets: Triton {before['triton']}, {before['date']}." if before else ""),
        "",
        "| target | op | shape | dtype | kernel | registers | spilled | occupancy | instructions | "
        "loads | stores | shuffles, barriers |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "loops" not in row:
            what = "compiles" if row.get("compiles") else f"failed: {row['failed']}"
            cells = [row["target"], row["op"], row["shape"], row["dtype"], row["kernel"], what]
            lines.append("| " + " | ".join(cells) + " |" * 7)
            continue
        was = old.get(key(row))
        lines.append("| " + " | ".join(_cells(row, was)) + " |")
    lines += [
        "",
        "Modelled time of masked_kl, forward and backward, over that of its least bytes on an H100 "
        f"({COPIED / 1e12} TB/s copied): {COUNTED:,} counted rows of {ROWS:,}, and these alone.",
        "",
        "| target | vocabulary | dtype | of all | alone |",
        "|---|---|---|---|---|",
    ]
    earlier = limits(before["rows"]) if before else {}
    for name, (masked, alone) in limits(rows).items():
        was = earlier.get(name)
        brackets = [f" ({value:.2f})" for value in was] if was else ["", ""]
        lines.append(
            f"| {' | '.join(name)} | {masked:.2f}{brackets[0]} | {alone:.2f}{brackets[1]} |"
        )
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any], was: dict[str, Any] | None) -> list[str]:
    def sizes(kind: str) -> str:
        found = {int(size) for loop in row["loops"] for size in loop[kind]}
        return ", ".join(map(str, sorted(found)))

    def beside(name: str) -> str:
        def shown(value: Any) -> str:
            return " + ".join(f"{x:g}" for x in value) if isinstance(value, list) else f"{value:g}"

        return shown(row[name]) + (f" ({shown(was[name])})" if was and name in was else "")

    mode = "" if row["mode"] is None else f" {row['mode']}"
    waits = ", ".join(f"{loop['shuffles']}, {loop['barriers']}" for loop in row["loops"])
    names = [row["target"], row["op"], row["shape"], row["dtype"], row["kernel"] + mode]
    figures = [beside("registers"), beside("spilled"), beside("occupancy"), beside("each")]
    return [*names, *figures, sizes("loads"), sizes("stores"), waits]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="sm_80,sm_90,sm_100,gfx942")
    parser.add_argument("--before", type=Path, help="an earlier file")
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled.json")
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"--targets {', '.join(unknown)}: there are {', '.join(TARGETS)}")
    result = {
        "date": datetime.date.today().isoformat(),
        "triton": importlib.metadata.version("triton"),
        "torch": torch.__version__,
        "rows": rows_of(targets),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    before = json.loads(arguments.before.read_text()) if arguments.before else None
    arguments.out.with_suffix(".md").write_text(table(json.loads(json.dumps(result)), before))
    print(arguments.out)


if __name__ == "__main__":
    main()
