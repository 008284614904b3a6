"""The README.md that is shipped with the student."""

from __future__ import annotations

from typing import Any

import yaml

from ds_distill.recipe.schema import Recipe
from ds_distill.reporting.verdict import last_evaluation


def model_card(recipe: Recipe, results: dict[str, Any]) -> str:
    """Markdown with the metadata block of the Hugging Face hub."""
    evaluation = last_evaluation(results)
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["knowledge-distillation", "ds-distill"],
    }
    if _is_hub_id(recipe.student.model):
        metadata["base_model"] = recipe.student.model
    if evaluation:
        metadata["metrics"] = ["accuracy", "f1"]
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False).strip(),
        "---",
        "",
        f"# {recipe.name}: student `{results['student']}`",
        "",
        results["verdict"],
        "",
        "```python",
        "from transformers import pipeline",
        "",
        'classify = pipeline("text-classification", model="PATH/TO/THIS/FOLDER")',
        'classify("a text")',
        "```",
        "",
        "## How it was made",
        "",
        f"Starts from `{recipe.student.model}`"
        + (f", layers {recipe.student.layers}" if recipe.student.layers else "")
        + f"; task data: `{recipe.task.data.path}`.",
    ]
    if recipe.teachers:
        teachers = ", ".join(f"{name} (`{t.model}`)" for name, t in recipe.teachers.items())
        lines += ["", f"Teachers: {teachers}."]
    if evaluation:
        lines += ["", f"## Accuracy on {evaluation['split']}", "", *_table(evaluation)]
    environment = results["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in environment["packages"].items() if v)
    lines += ["", "## Versions", "", f"ds_distill {environment['ds_distill']}, {versions}."]
    return "\n".join(lines) + "\n"


def _table(evaluation: dict[str, Any]) -> list[str]:
    labels = list(next(iter(evaluation["models"].values()))["per_class"])
    rows = [
        "| model | role | accuracy | macro F1 | " + " | ".join(labels) + " |",
        "|" + "---|" * (4 + len(labels)),
    ]
    for name, model in evaluation["models"].items():
        classes = [
            "-" if value is None else f"{value:.3f}" for value in model["per_class"].values()
        ]
        numbers = [f"{model['accuracy']:.3f}", f"{model['macro_f1']:.3f}", *classes]
        rows.append(f"| {name} | {model['role']} | " + " | ".join(numbers) + " |")
    return rows


def _is_hub_id(reference: str) -> bool:
    return not reference.startswith(("pkg:", ".", "/", "~")) and reference.count("/") <= 1
