"""The tables of docs/studies/encoders.md, from docs/results/encoders.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from encoders_recipes import TASKS, TEXT_ALONE, TRIPLE, methods
from pages import row

from ds_distill.evaluation.bootstrap import mean_interval

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "encoders.json"
PAGE = ROOT / "docs" / "studies" / "encoders.md"
MARK = "compact encoders"
WORDS = "8000 words"
WORDS_ALONE = f"expand-vocabulary, {WORDS}"
"""A grown vocabulary without a teacher."""

Record = dict[str, Any]
MEASURES: dict[str, tuple[Callable[[Record], float | None], str, float]] = {
    "nats per character": (lambda one: _of_text(one, "nats_per_character"), ".3f", 1),
    "of it known words": (lambda one: _of_known(one), ".3f", 1),
    "of it split words": (lambda one: _of_split(one), ".3f", 1),
    "NCBI-disease, entity F1": (lambda one: float(one["diseases"][TASKS["diseases"]]), ".1f", 100),
    "GAD, F1": (lambda one: float(one["gad"][TASKS["gad"]]), ".1f", 100),
    "GAD, accuracy": (lambda one: float(one["gad"]["accuracy"]), ".1f", 100),
}
"""How each is read from a record, shown, and by what it is multiplied before."""


def _of_text(one: Record, key: str) -> float | None:
    return None if one["text"] is None else float(one["text"][key])


def _of_known(one: Record) -> float | None:
    """The part of words that are one token of the teacher's."""
    if (text := one["text"]) is None:
        return None
    return float(text["known"] * math.log(text["perplexity_of_known"]) / text["characters"])


def _of_split(one: Record) -> float | None:
    """The rest: of words that the teacher's vocabulary splits."""
    every, known = _of_text(one, "nats_per_character"), _of_known(one)
    return None if every is None or known is None else every - known


def tables(found: dict[str, Any]) -> str:
    """Values by method, then differences to the text alone, to DistilBERT's losses, and of VE-KD to
    as many words without a teacher."""
    runs: dict[str, dict[int, Record]] = {}
    for one in found["runs"]:
        runs.setdefault(one["method"], {})[one["seed"]] = one
    heads = ["", "seeds", *MEASURES, "parameters, M", "without embeddings", "speed-up"]
    text = row(heads) + row(["---"] * len(heads))
    for name, by_seed in runs.items():
        text += row([f"`{name}`", str(len(by_seed)), *_values(by_seed), *_weights(by_seed)])
    first = next(iter(found["runs"]))
    baseline = [f"{100 * first[task]['baseline'][metric]:.1f}" for task, metric in TASKS.items()]
    always = f"{100 * first['gad']['baseline']['accuracy']:.1f}"
    text += row(["the most frequent answer", "", "", "", "", *baseline, always, "", "", ""])
    for other in (TEXT_ALONE, TRIPLE):
        if other in runs:
            text += "\n" + _differences(runs, other)
    if WORDS_ALONE in runs:
        text += "\n" + _differences({x: runs[x] for x in runs if WORDS in x}, WORDS_ALONE)
    places = [one["environment"] for one in found["runs"]]
    machines = " and ".join(
        sorted(
            {
                f"{where['processor']}, {where['cores']} cores, torch {where['packages']['torch']}"
                for where in places
            }
        )
    )
    dates = sorted({where["dates"][-1].partition("T")[0] for where in places})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    file = f"results/{RESULTS.name}"
    number = len(found["runs"])
    every = sum(len(one.seeds) for one in methods(1).values())
    so_far = "" if number == every else f" {number} of {every} trainings so far."
    return f"{text}\nFrom [{file}](../{file}): {machines}, {days}.{so_far}\n"


def _values(by_seed: dict[int, Record]) -> list[str]:
    """Means over the seeds; of three, with the smallest and the largest."""
    cells = []
    for read, form, times in MEASURES.values():
        values = [value for value in map(read, by_seed.values()) if value is not None]
        if not values:
            cells.append("-")
            continue
        cells.append(f"{times * fmean(values):{form}}")
        if len(values) > 1:
            cells[-1] += f" ({times * min(values):{form}} to {times * max(values):{form}})"
    return cells


def _weights(by_seed: dict[int, Record]) -> list[str]:
    weights = [one["weight"] for one in by_seed.values()]
    sizes = [f"{weights[0][key] / 1e6:.1f}" for key in ("parameters", "without_embeddings")]
    return [*sizes, f"{fmean(one['speed_up'] for one in weights):.1f}"]


def _differences(runs: dict[str, dict[int, Record]], other: str) -> str:
    """The mean over the seeds, and its interval where there are three."""
    heads = [f"less `{other}`", *MEASURES]
    text = row(heads) + row(["---"] * len(heads))
    for name, by_seed in runs.items():
        if name == other:
            continue
        cells = []
        for read, form, times in MEASURES.values():
            pairs = [
                (read(one), read(runs[other][seed]))
                for seed, one in by_seed.items()
                if seed in runs[other]
            ]
            apart = [times * (a - b) for a, b in pairs if a is not None and b is not None]
            cells.append(_difference(apart, form))
        text += row([f"`{name}`", *cells])
    return text


def _difference(apart: list[float], form: str) -> str:
    if not apart:
        return "-"
    interval = mean_interval(apart)
    if interval is None:
        return f"{apart[0]:+{form}}"
    low, high = interval
    beyond = "**" if low > 0 or high < 0 else ""
    return f"{beyond}{fmean(apart):+{form}}{beyond} ({low:+{form}} to {high:+{form}})"
