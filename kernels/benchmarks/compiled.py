"""What the compiler makes of every launch: a JSON file, and a table beside it.

PYTHONPATH=kernels python kernels/benchmarks/compiled.py [--targets sm_90]

Nothing runs on a GPU. Counts are exact, and the same again under the same Triton. The table has
those of `results/compiled-before.json` in brackets, the kernels before they were counted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from assembly import Compiled
from compiling import TARGETS, Launch
from launches import COUNTED, ROWS, calls, each
from modelled import MACHINES, least_bytes, seconds

RESULTS = Path(__file__).parent / "results"
BEFORE = RESULTS / "compiled-before.json"
_launches: list[tuple[Launch, str]] = []


def compile_one(index: int) -> Compiled | str:
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
    processes = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # nothing is pickled
        for number, found in enumerate(pool.imap(compile_one, range(len(rows)), 1)):
            row, launch = rows[number], _launches[number][0]
            if isinstance(found, Compiled):
                row |= asdict(found) | {"each": each(launch, found)}
            else:
                row["failed"] = found
            print(number + 1, "of", len(rows), *list(row.values())[:6], row.get("each"), flush=True)
    return rows


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("target", "op", "shape", "dtype", "kernel", "mode"))


def limits(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], tuple[float, float]]:
    """By machine, vocabulary and dtype: the modelled time of masked_kl both ways over that of its
    least bytes, of 15% of the rows and of these alone."""
    found: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["op"] == "masked_kl" and row.get("loops"):
            found.setdefault((row["target"], row["shape"], row["dtype"]), []).append(row)
    result = {}
    for machine in MACHINES:
        for (target, shape, dtype), pair in found.items():
            if target != machine.target or len(pair) != 2:
                continue
            width, size = int(shape.removeprefix("V=")), 4 if "32" in dtype else 2
            result[machine.name, shape, dtype] = tuple(
                seconds(pair, {"N": n, "counted": COUNTED, "V": width, "size": size}, machine)
                * machine.copied
                / least_bytes(COUNTED, n - COUNTED, width, size)
                for n in (ROWS, COUNTED)
            )
    return result


def table(result: dict[str, Any], before: dict[str, Any] | None) -> str:
    rows, old = result["rows"], {key(row): row for row in before["rows"]} if before else {}
    lines = [
        f"# What Triton {result['triton']} makes of the kernels, {result['date']}",
        "",
        "Compiled on a CPU. Instructions of a thread per pair of logits, per "
        "score, or per pair of states, in each loop, or in all of a program that has none; for "
        "topk_kl's K entries per entry. Bytes of loads and stores there; spilled bytes of a "
        "thread; shared bytes of a program; occupancy: warps that fit. AMD's scalar unit is not "
        "counted. "
        + (f"In brackets: Triton {before['triton']}, {before['of']}." if before else ""),
        "",
        "| target | op | shape | dtype | kernel | registers | spilled | shared | occupancy | "
        "instructions | loads | stores | shuffles, barriers |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            cells = [row["target"], row["op"], row["shape"], row["dtype"], row["kernel"]]
            lines.append("| " + " | ".join([*cells, f"failed: {row['failed']}"]) + " |" * 8)
        else:
            lines.append("| " + " | ".join(_cells(row, old.get(key(row)))) + " |")
    machines = ", ".join(f"{one.name} {one.copied / 1e12:.2f}" for one in MACHINES)
    lines += [
        "",
        "Modelled time of masked_kl, forward and backward, over that of its least bytes "
        f"(TB/s copied: {machines}; rates of `modelled.py`): {COUNTED:,} counted rows of "
        f"{ROWS:,}, and these alone.",
        "",
        "| machine | vocabulary | dtype | of all | alone |",
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
    both = [row] if was is None else [row, was]

    def sizes(kind: str) -> str:
        of = [sorted({int(size) for loop in one["loops"] for size in loop[kind]}) for one in both]
        now, *earlier = [", ".join(map(str, widths)) for widths in of]
        return now + "".join(f" ({widths})" for widths in earlier if widths)

    def beside(name: str) -> str:
        def shown(value: Any) -> str:
            return " + ".join(f"{x:g}" for x in value) if isinstance(value, list) else f"{value:g}"

        return shown(row[name]) + (f" ({shown(was[name])})" if was and name in was else "")

    mode = "" if row["mode"] is None else f" {row['mode']}"
    waits = ", ".join(f"{loop['shuffles']}, {loop['barriers']}" for loop in row["loops"])
    names = [row["target"], row["op"], row["shape"], row["dtype"], row["kernel"] + mode]
    figures = [beside(name) for name in ("registers", "spilled", "shared", "occupancy", "each")]
    return [*names, *figures, sizes("loads"), sizes("stores"), waits]


def write(file: Path, result: dict[str, Any]) -> None:
    """A launch a line."""
    about = json.dumps({name: value for name, value in result.items() if name != "rows"})
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    file.write_text(f'{about[:-1]}, "rows": [\n{rows}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="sm_80,sm_90,sm_100,gfx942")
    parser.add_argument("--of", default="the working tree", help="which kernels, for the table")
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled.json")
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"--targets {', '.join(unknown)}: there are {', '.join(TARGETS)}")
    result = {
        "date": datetime.date.today().isoformat(),
        "of": arguments.of,
        "triton": importlib.metadata.version("triton"),
        "torch": torch.__version__,
        "rows": rows_of(targets),
    }
    write(arguments.out, result)
    before = (
        json.loads(BEFORE.read_text()) if BEFORE.is_file() and arguments.out != BEFORE else None
    )
    arguments.out.with_suffix(".md").write_text(table(json.loads(json.dumps(result)), before))
    print(arguments.out)


if __name__ == "__main__":
    main()
