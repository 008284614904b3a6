"""An exported student beside the one that it was made of: in a report and a model card."""

from __future__ import annotations

from typing import Any

from ds_distill.reporting.result_tables import difference_cell, wide_note
from ds_distill.reporting.results import task_metric_of
from ds_distill.tables import Cell, Table

PYTORCH = "PyTorch"
"""Beside the files' names."""
TITLE = "## ONNX\n"
"""Of the model card's section."""


def export_table(found: dict[str, Any]) -> Table:
    """The files beside PyTorch; found: `exported` of results.json, the content of export.json."""
    metric = task_metric_of(found)
    first, split = found[PYTORCH], found["split"]
    heads = ["", metric.title, "less PyTorch's", "MB", "ms a text", "largest logit difference"]
    score, milliseconds = metric.shown_as(first["score"]), f"{first['milliseconds']:.3g}"
    rows: list[list[str | Cell]] = [[PYTORCH, score, "", "", milliseconds, ""]]
    for name, one in found["files"].items():
        rows.append(
            [
                name,
                metric.shown_as(one["score"]),
                difference_cell(metric, one, first["score"]),
                f"{one['bytes'] / 1e6:.1f}",
                f"{one['milliseconds']:.3g}",
                f"{one['logits']['largest']:.2g}",
            ]
        )
    texts = next(iter(found["files"].values()))["logits"]["texts"]
    note = (
        f"On {found['examples']:,} examples of {split}, with 95% intervals; *: beyond chance. "
        f"Time: the median for one text of {found['length']} tokens, {found['threads']} CPU "
        f"thread(s). Logits on {texts:,} texts."
    )
    return Table("", heads, rows, [note, *wide_note(metric, rows)])


def card_section(found: dict[str, Any]) -> str:
    """Of a model card, in Markdown: how the files compare, and how to run them."""
    table = export_table(found)
    smallest = list(found["files"])[-1]
    usage = _USAGE.format(file=smallest)
    return "\n".join([TITLE, table.markdown(), "", *table.notes, "", usage])


_USAGE = """Run in the folder of these files; PyTorch is not needed:

```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
session = onnxruntime.InferenceSession("{file}", providers=["CPUExecutionProvider"])
inputs = tokenizer(["A text."], padding=True, truncation=True, return_tensors="np")
outputs = session.run(None, {{one.name: inputs[one.name] for one in session.get_inputs()}})
```
"""
