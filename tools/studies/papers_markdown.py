"""Tables of docs/studies, from docs/results/papers/TABLE.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_distill.files import read_json
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.metric import MetricClass

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "papers"
PAGES = {"doktra": "doktra.md", "transfer": "transfer-sets.md"}
"""Of docs/studies, by what a table's name begins with."""
CLOSING = "<!-- end of table -->"


def opening(name: str) -> str:
    """The line before a table in its page; CLOSING is the one after."""
    return f"<!-- {name} -->\n"


def page_of(name: str) -> Path:
    """The page that shows a table."""
    return ROOT / "docs" / "studies" / PAGES[name.partition("-")[0]]


def show() -> None:
    """Put every table that is there into its page, between its marks."""
    for file in sorted(RESULTS.glob("*.json")):
        page = page_of(file.stem)
        text = page.read_text(encoding="utf-8")
        before, mark, rest = text.partition(opening(file.stem))
        if not mark:
            raise SystemExit(f"{page} has no line {opening(file.stem).strip()}")
        _, mark, after = rest.partition(CLOSING)
        text = before + opening(file.stem) + markdown(file.stem, read_json(file)) + mark + after
        page.write_text(text, encoding="utf-8")


def markdown(name: str, table: dict[str, Any]) -> str:
    """What its page shows of a table."""
    text = ""
    for label, variant in table["variants"].items():
        metric = METRICS[variant["over"]][variant["metric"]]
        text += f"\n`{label}`, {variant['examples']:,} examples of {variant['split']}:\n\n"
        text += f"{_values(variant, metric, table['seeds'])}\n{_differences(variant, metric)}\n"
    where, file = table["environment"], f"results/papers/{name}.json"
    machine = f"{where['processor']}, {where['cores']} cores, torch {where['packages']['torch']}"
    date = where["dates"][-1].partition("T")[0]
    return f"{text}\nFrom [{file}](../{file}): {machine}, {date}.\n"


def _values(variant: dict[str, Any], metric: MetricClass, seeds: list[int]) -> str:
    """A row per model."""
    models = variant["models"]
    more = {
        key: METRICS[variant["over"]][key]
        for key in ("accuracy", "ece")
        if key in models[next(iter(models))] and key != metric.name
    }
    signs = any("other_sign" in model for model in models.values())
    by_seed = f"{metric.heading()}, seeds {', '.join(map(str, seeds))}"
    heads = ["model", "steps", by_seed, "mean", *(entry.title for entry in more.values())]
    if signs:
        heads.append("neurons on the other side")
    text = _row(heads) + _row(["---"] * len(heads))
    for name, model in models.items():
        values = model[metric.name]
        cells = [
            f"`{name}`, {model['role']}",
            f"{model['steps']['mean']:.0f}" if "steps" in model else "",
            " / ".join(map(metric.shown_as, values["seeds"])),
            metric.shown_as(values["mean"]),
            *(entry.shown_as(model[key]["mean"]) for key, entry in more.items()),
        ]
        if signs:
            cells.append(f"{model['other_sign']['mean']:.1%}" if "other_sign" in model else "")
        text += _row(cells)
    return text


def _differences(variant: dict[str, Any], metric: MetricClass) -> str:
    """A column per student, a row per model that it is compared with."""
    found = {(pair["student"], pair["other"]): pair for pair in variant["differences"]}
    students = list(dict.fromkeys(student for student, _ in found))
    text = _row(["", *(f"`{name}`" for name in students)]) + _row(["---"] * (1 + len(students)))
    for other in variant["models"]:
        pairs = [found.get((student, other)) for student in students]
        if any(pairs):
            cells = ["" if pair is None else _difference(pair, metric) for pair in pairs]
            text += _row([f"less `{other}`", *cells])
    return text


def _difference(pair: dict[str, Any], metric: MetricClass) -> str:
    """The interval is over the seeds, and of one seed the bootstrap's; of several, how many are
    above or below with the whole of their own."""
    intervals = pair["intervals"]
    low, high = map(metric.difference_as, pair["t_interval"] or intervals[0])
    text = f"{metric.difference_as(pair['mean'])} ({low} to {high})"
    if len(intervals) > 1:
        above = sum(low > 0 for low, _ in intervals)
        below = sum(high < 0 for _, high in intervals)
        text += f"; above in {above}" if above else ""
        text += f"; below in {below}" if below else ""
    if pair.get("retention", {}).get("mean") is not None:
        text += f"; keeps {pair['retention']['mean']:.1%}"
    if "gap_closed" in pair:
        closed = pair["gap_closed"]["mean"]
        text += "; no gap in a seed" if closed is None else f"; closes {closed:.0%} of the gap"
    return text


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
