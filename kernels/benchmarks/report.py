"""The Markdown table and the plot of a results CSV.

python kernels/benchmarks/report.py kernels/benchmarks/results/DATE-DEVICE.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, str]

TARGETS = {
    # op: (what its time is held against, the factor wanted), in bfloat16 on a GPU. Floors are an
    # upper bound of time, rivals' times a lower one.
    "masked_kl": [("floor", 1.3)],
    "masked_cosine": [("floor", 1.5)],
    "linear_kl": [
        ("eager", 5.0), ("eager_compact", 1.3), ("compile_compact", 1.3),
        ("liger_compact", 2.0), ("liger_kl_compact", 2.0),
        ("liger_chunked", 2.0), ("liger_chunked_compact", 2.0),
    ],
    "topk_kl": [("eager", 3.0)],
}  # fmt: skip


def _number(row: Row, key: str, digits: int = 3) -> str:
    return f"{float(row[key]):.{digits}g}" if row.get(key) else "not measured"


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['op']} {row['shape']} {row['dtype']}", []).append(row)
    return found


def table(rows: list[Row]) -> str:
    about = rows[0]
    loads = ", ".join(dict.fromkeys(row["load"] for row in rows))
    copies = ", ".join(dict.fromkeys(row["copy_gb_s"] for row in rows))
    lines = [
        f"# {about['date']}, {about['device']}",
        "",
        f"torch {about['torch']}, triton {about['triton']}, liger-kernel {about['liger-kernel']}, "
        f"Python {about['python']}; copy {copies} GB/s, system load {loads} at "
        "the start of each run. Median milliseconds, 15% of "
        "the rows counted where a path has a mask; the range is p20 to p80 of forward + backward. "
        "Speed is the path's time over ours: below 1 we lose. Floor: least bytes at the copy "
        "bandwidth. Modelled: of each pass the longest of its bytes and the instructions that the "
        "compiler made (modelled.py). Errors are relative, against float64.",
    ]
    if not on_gpu(rows):
        lines += [
            "",
            "GPU: not measured. Memory: not measured on a CPU. liger-kernel: only its chunked loss "
            "runs on a CPU; its others are Triton kernels.",
        ]
    lines += [
        "",
        "| problem | path | forward | backward | both | range | speed | floor | modelled | "
        "peak MB | loss error | gradient error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for title, members in groups(rows).items():
        ours = next((row for row in members if row["path"] == "ds_kernels"), {})
        for row in members:
            if row.get("failure"):
                lines.append(f"| {title} | {row['path']} | failed: {row['failure']} |" + " |" * 9)
                continue
            speed = float(row["both_ms"]) / float(ours["both_ms"]) if ours.get("both_ms") else 0.0
            spread = f"{_number(row, 'both_ms_p20')} - {_number(row, 'both_ms_p80')}"
            cells = [
                title, row["path"], _number(row, "forward_ms"), _number(row, "backward_ms"),
                _number(row, "both_ms"), spread, f"{speed:.2f}", _number(row, "floor_ms"),
                f"{float(row['modelled_ms']):.3g}" if row.get("modelled_ms") else "",
                _number(row, "peak_mb", 4), _number(row, "loss_error", 2),
                _number(row, "gradient_error", 2),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def on_gpu(rows: list[Row]) -> bool:
    return any(word in rows[0]["device"].lower() for word in ("cuda", "nvidia"))


def targets(rows: list[Row]) -> str:
    """Each target and how near a GPU's run came to it."""
    lines = ["", "| problem | against | wanted | measured | |", "|---|---|---|---|---|"]
    for title, members in groups([row for row in rows if row["dtype"] == "bfloat16"]).items():
        times = {row["path"]: float(row["both_ms"]) for row in members if row.get("both_ms")}
        if "ds_kernels" not in times:
            continue
        for against, factor in TARGETS.get(members[0]["op"], []):
            if against == "floor":
                ratio = times["ds_kernels"] / float(members[0]["floor_ms"])
                reached, wanted = ratio <= factor, f"at most {factor}"
            elif against in times:
                ratio = times[against] / times["ds_kernels"]
                reached, wanted = ratio >= factor, f"at least {factor}"
            else:
                continue
            verdict = "reached" if reached else "missed"
            lines.append(f"| {title} | {against} | {wanted} | {ratio:.2f} | {verdict} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    found = groups([row for row in rows if row.get("both_ms")])
    with_memory = any(row.get("peak_mb") for row in rows)
    figure, axes = plt.subplots(
        1, 1 + with_memory, figsize=(9 * (1 + with_memory), 0.75 * len(found) + 1.5), squeeze=False
    )
    paths = list(dict.fromkeys(row["path"] for row in rows))
    colours = dict(zip(paths, plt.get_cmap("tab10").colors, strict=False))
    for axis, key, label in zip(
        axes[0], ["both_ms", "peak_mb"], ["ms, forward + backward", "extra peak MB"], strict=False
    ):
        for index, members in enumerate(found.values()):
            height = 0.8 / len(paths)
            for row in members:
                if row.get(key):
                    offset = (paths.index(row["path"]) - len(paths) / 2) * height
                    axis.barh(index + offset, float(row[key]), height, color=colours[row["path"]])
            if key == "both_ms":
                floor = float(members[0]["floor_ms"])
                axis.plot([floor, floor], [index - 0.45, index + 0.45], color="black", lw=2)
        axis.set_yticks(range(len(found)), list(found), fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel(label + (" (black: byte floor)" if key == "both_ms" else ""))
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in paths]
    axes[0][0].legend(handles, paths, fontsize=7, loc="lower right")
    figure.suptitle(f"{rows[0]['date']}, {rows[0]['device']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(path: Path) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    text = table(rows) + (targets(rows) if on_gpu(rows) else "")
    path.with_suffix(".md").write_text(text)
    plot(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    report(Path(sys.argv[1]))
